#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/cross_entropy.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include <algorithm>
#include <cmath>

#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

/// exp(logits - shift), where that is at most 1; NaN for NaN.
template <class D>
HWY_INLINE hn::Vec<D> shifted_exp(D d, const float* logits, float shift) {
  const auto x = hn::Sub(hn::LoadU(d, logits), hn::Set(d, shift));
  const auto lowest = hn::Set(d, kLowestExponent);
  // A comparison, for Max does not pass on NaNs on every target.
  return exp(d, hn::IfThenElse(hn::Lt(x, lowest), lowest, x));
}

/// sum = the sum of exp(x - shift) over a row; shift is the row's largest logit.
struct RowSum {
  float shift;
  double sum;
};

HWY_INLINE RowSum sum_row(const float* logits, int64_t vocabulary) {
  // A block stays in the first-level cache between the search for its maximum and the sum, so the
  // row is fetched once; and the sum in fp32 stays short.
  constexpr int64_t kBlock = 2048;
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;
  for (int64_t begin = 0; begin < vocabulary; begin += kBlock) {
    const float* block = logits + begin;
    const int64_t count = std::min(kBlock, vocabulary - begin);
    const float block_max = max_of(count, block);
    if (block_max > max) {
      sum *= std::exp(static_cast<double>(max) - static_cast<double>(block_max));
      max = block_max;
    }
    // While all logits are minus infinity there is no difference from their maximum.
    const float shift = max == -std::numeric_limits<float>::infinity() ? 0.0F : max;
    sum += static_cast<double>(sum_of(
        count, [&](auto d, int64_t i) HWY_ATTR { return shifted_exp(d, block + i, shift); }));
  }
  return {max == -std::numeric_limits<float>::infinity() ? 0.0F : max, sum};
}

/// Writes the gradients of the row and returns its loss.
template <class T>
HWY_INLINE double cross_entropy_row_of(const CrossEntropyArgs& args, int64_t row) {
  const float* logits = args.logits + row * args.logits_stride;
  T* dlogits =
      args.dlogits == nullptr ? nullptr : static_cast<T*>(args.dlogits) + row * args.dlogits_stride;
  const int32_t target = args.targets[row];
  if (target < 0) {
    if (dlogits != nullptr) {
      for_each_vector(args.vocabulary,
                      [&](auto d, int64_t i) HWY_ATTR { store(d, hn::Zero(d), dlogits + i); });
    }
    return 0;
  }
  const RowSum row_sum = sum_row(logits, args.vocabulary);
  const double distance = static_cast<double>(logits[target]) - static_cast<double>(row_sum.shift);
  if (dlogits != nullptr) {
    const auto scale = static_cast<double>(args.gradient_scale);
    const double probability = std::exp(distance) / row_sum.sum;
    const auto factor = static_cast<float>(scale / row_sum.sum);
    // In ascending order, for dlogits may overwrite the logits already read.
    for_each_vector(args.vocabulary, [&](auto d, int64_t i) HWY_ATTR {
      const auto e = shifted_exp(d, logits + i, row_sum.shift);
      store(d, hn::Mul(e, hn::Set(d, factor)), dlogits + i);
    });
    const OneFloat d1;
    store(d1, hn::Set(d1, static_cast<float>((probability - 1) * scale)), dlogits + target);
  }
  return std::log(row_sum.sum) - distance;
}

/// losses[row] = the loss of each row in [begin, end), in ascending order.
void cross_entropy_rows(const CrossEntropyArgs& args, int64_t begin, int64_t end, double* losses) {
  for (int64_t row = begin; row < end; ++row) {
    losses[row] = args.dtype == DType::kBf16 ? cross_entropy_row_of<Bf16>(args, row)
                                             : cross_entropy_row_of<float>(args, row);
  }
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "base/error.h"
#include "gpu/cross_entropy_place.h"
#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(cross_entropy_rows);

}  // namespace

size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args) {
  return static_cast<size_t>(args.rows) * sizeof(double);
}

void cross_entropy(const CrossEntropyArgs& args, tbb::task_arena& arena) {
  for (int64_t row = 0; row < args.rows; ++row) {
    STRATA_CHECK(args.targets[row] < args.vocabulary, "a target lies outside the vocabulary");
  }
  auto* losses = static_cast<double*>(args.scratch);
  // Rows of gradients that overwrite the logits of earlier rows must wait for those.
  const bool packed = dlogits_place(args) == DlogitsPlace::kPacked;
  const int64_t chunk = packed ? args.rows : rows_of_chunk(args.vocabulary);
  for_each_chunk(arena, args.rows, chunk, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(cross_entropy_rows)(args, begin, end, losses);
  });
  double sum = *args.loss_sum;
  for (int64_t row = 0; row < args.rows; ++row) {
    if (args.targets[row] >= 0) sum += losses[row];
  }
  *args.loss_sum = sum;
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
