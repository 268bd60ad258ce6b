#include "comm/ordered_sum.h"

#include <array>
#include <cstddef>
#include <cstring>

#include "base/bf16.h"
#include "base/error.h"

namespace strata::comm {
namespace {

constexpr int64_t kPiece = 512;  // sums that stay in the first-level cache
using Sums = std::array<float, kPiece>;

float widen(float value) { return value; }
float widen(Bf16 value) { return to_float(value); }
void round_to(float sum, float& out) { out = sum; }
void round_to(float sum, Bf16& out) { out = to_bf16(sum); }

template <class T>
const T* at(const void* input, int64_t element) {
  return static_cast<const T*>(input) + element;
}

// The count is a constant for all but the last piece, so that the compiler uses vectors.
template <class T>
void sum_piece(const void* const* inputs, int ranks, int64_t first, int64_t count, T* out) {
  Sums sums;
  const T* input = at<T>(inputs[0], first);
  for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] = widen(input[i]);
  for (int rank = 1; rank < ranks; ++rank) {
    input = at<T>(inputs[rank], first);
    for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>(i)] += widen(input[i]);
  }
  for (int64_t i = 0; i < count; ++i) round_to(sums[static_cast<size_t>(i)], out[i]);
}

template <class T>
void sum(const void* const* inputs, int ranks, int64_t count, void* out) {
  auto* to = static_cast<T*>(out);
  int64_t first = 0;
  for (; first + kPiece <= count; first += kPiece) {
    sum_piece<T>(inputs, ranks, first, kPiece, to + first);
  }
  sum_piece<T>(inputs, ranks, first, count - first, to + first);
}

}  // namespace

void sum_in_order(const void* const* inputs, int ranks, int64_t count, DType dtype,
                  void* out) noexcept {
  STRATA_CHECK(ranks > 0 && count >= 0, "there must be something to sum");
  if (count == 0) return;
  if (ranks == 1) {  // as it is, also what is not a number
    if (out != inputs[0]) std::memcpy(out, inputs[0], static_cast<size_t>(count) * size_of(dtype));
    return;
  }
  if (dtype == DType::kBf16) {
    sum<Bf16>(inputs, ranks, count, out);
  } else {
    sum<float>(inputs, ranks, count, out);
  }
}

}  // namespace strata::comm
