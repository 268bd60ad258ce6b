// The shape of sum_of_squares: how the elements are dealt to partial sums, and in which order those
// are added. Nothing here depends on threads or SIMD width.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "base/dtype.h"

namespace strata::cpu_adam {

/// Element i of a part is added to lane i mod kSumLanes of that part, in ascending order.
inline constexpr size_t kSumLanes = 16;
using SumLanes = std::array<double, kSumLanes>;

/// At most so many parts: their sums lie on the stack.
inline constexpr size_t kMaxSumParts = 256;
using SumParts = std::array<double, kMaxSumParts>;

/// Elements of each part but the last: as few as kMaxSumParts allows, but enough to be worth a
/// task.
[[nodiscard]] constexpr int64_t sum_part_elements(int64_t count) noexcept {
  constexpr int64_t kSmallest = 32768;
  constexpr auto kParts = static_cast<int64_t>(kMaxSumParts);
  constexpr auto kLanes = static_cast<int64_t>(kSumLanes);
  const int64_t even = count / kParts + (count % kParts != 0 ? 1 : 0);
  return std::max(kSmallest, (even + kLanes - 1) / kLanes * kLanes);
}

/// Adds the upper half to the lower half until one value is left.
template <size_t size>
[[nodiscard]] constexpr double sum_by_halves(std::array<double, size> values) noexcept {
  static_assert((size & (size - 1)) == 0);
  for (size_t width = size / 2; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) values[i] += values[i + width];
  }
  return values[0];
}

/// Adds the last elements [begin, end), fewer than kSumLanes, to their lanes, then the lanes.
[[nodiscard]] double finish_part(SumLanes lanes, const void* gradient, DType dtype, int64_t begin,
                                 int64_t end) noexcept;

}  // namespace strata::cpu_adam
