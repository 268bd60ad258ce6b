// The sum over ranks as the host device defines it, and how an array is divided among them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/dtype.h"

namespace strata::comm {

/// out [count] = inputs[0] + inputs[1] + ... + inputs[ranks - 1], added from left to right in fp32
/// and rounded once, to nearest even, to `dtype`. `out` may be one of the inputs, but may not
/// overlap one otherwise. Thread-safe; allocates nothing.
void sum_in_order(const void* const* inputs, int ranks, int64_t count, DType dtype,
                  void* out) noexcept;

/// Elements [first, first + count) of an array.
struct Block {
  int64_t first = 0;
  int64_t count = 0;
};

/// What one rank reduces of an array of any size: all of them as much, but for the last that have
/// any.
[[nodiscard]] constexpr Block block_of(int64_t count, int ranks, int rank) noexcept {
  const int64_t each = (count + ranks - 1) / ranks;
  const int64_t first = std::min(count, each * rank);
  return {.first = first, .count = std::min(each, count - first)};
}

}  // namespace strata::comm
