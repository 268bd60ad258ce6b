#include "gpu/host/attention_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/attention_rows.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

/// The keys of the block that its row `row` sees: the first so many.
HWY_INLINE int64_t seen_keys(const ScoreBlock& block, int64_t row) {
  const int64_t query_row = block.first_row + row;
  if (query_row >= block.used_rows) return 0;
  const int64_t position = block.first_position + query_row / block.group;
  return std::clamp<int64_t>(position + 1 - block.first_key, 0, block.keys);
}

/// e^(a * b - c), which is at most about 1 for a key that is seen; NaN if any is.
template <class D>
HWY_INLINE hn::Vec<D> probability(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  const auto x = hn::MulSub(a, b, c);
  const auto lowest = hn::Set(d, kLowestExponent);
  return exp(d, hn::IfThenElse(hn::Lt(x, lowest), lowest, x));
}

/// out[0, count) = value(d, i), and zeros up to `keys`, which is a multiple of the lanes.
template <class T, class Value>
HWY_INLINE void store_seen(int64_t count, int64_t keys, T* out, Value value) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store(d, value(d, i), out + i);
  if (i < count) {
    const auto seen = hn::FirstN(d, static_cast<size_t>(count - i));
    store(d, hn::IfThenElseZero(seen, value(d, i)), out + i);
    i += lanes;
  }
  for (; i < keys; i += lanes) store(d, hn::Zero(d), out + i);
}

template <class T>
HWY_INLINE void softmax_block_of(const ScoreBlock& block, const float* scores,
                                 OnlineSoftmax* softmax, float* sums, int64_t width,
                                 T* probabilities) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto scale = hn::Set(d, block.scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    const float* s = scores + row * block.keys;
    const int64_t count = seen_keys(block, row);
    OnlineSoftmax& state = softmax[row];
    float factor = 1;
    auto row_sum = hn::Zero(d);
    if (count > 0) {
      auto largest = hn::Set(d, state.max);
      int64_t i = 0;
      for (; i + lanes <= count; i += lanes) {
        largest = hn::Max(largest, hn::Mul(hn::LoadU(d, s + i), scale));
      }
      if (i < count) {
        const auto seen = hn::FirstN(d, static_cast<size_t>(count - i));
        const auto last = hn::Mul(hn::LoadU(d, s + i), scale);
        largest = hn::Max(largest, hn::IfThenElse(seen, last, largest));
      }
      const float max = hn::GetLane(hn::MaxOfLanes(d, largest));
      if (max != state.max) {
        factor = std::exp(state.max - max);
        if (state.max != -std::numeric_limits<float>::infinity()) {
          float* sum = sums + row * width;
          for_each_vector(width, [&](auto dw, int64_t j) HWY_ATTR {
            hn::StoreU(hn::Mul(hn::LoadU(dw, sum + j), hn::Set(dw, factor)), dw, sum + j);
          });
        }
        state.max = max;
      }
    }
    const auto max = hn::Set(d, state.max);
    T* p = probabilities + row * block.keys;
    store_seen(count, block.keys, p, [&](auto dv, int64_t i) HWY_ATTR {
      auto value = probability(dv, hn::LoadU(dv, s + i), scale, max);
      if (i + lanes > count) {
        value = hn::IfThenElseZero(hn::FirstN(dv, static_cast<size_t>(count - i)), value);
      }
      row_sum = hn::Add(row_sum, value);
      return value;
    });
    state.sum = state.sum * factor + hn::GetLane(hn::SumOfLanes(d, row_sum));
  }
}

void softmax_block(const ScoreBlock& block, const float* scores, OnlineSoftmax* softmax,
                   float* sums, int64_t width, void* probabilities) {
  if (block.dtype == DType::kBf16) {
    return softmax_block_of(block, scores, softmax, sums, width, static_cast<Bf16*>(probabilities));
  }
  return softmax_block_of(block, scores, softmax, sums, width, static_cast<float*>(probabilities));
}

template <class T>
HWY_INLINE void recompute_softmax_block_of(const ScoreBlock& block, const float* log_sum_exp,
                                           float* scores, T* probabilities) {
  const Floats d;
  const auto scale = hn::Set(d, block.scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    float* s = scores + row * block.keys;
    const auto shift = hn::Set(d, log_sum_exp[row]);
    store_seen(seen_keys(block, row), block.keys, probabilities + row * block.keys,
               [&](auto dv, int64_t i) HWY_ATTR {
                 const auto p = probability(dv, hn::LoadU(dv, s + i), scale, shift);
                 hn::StoreU(p, dv, s + i);
                 return p;
               });
  }
}

void recompute_softmax_block(const ScoreBlock& block, const float* log_sum_exp, float* scores,
                             void* probabilities) {
  if (block.dtype == DType::kBf16) {
    return recompute_softmax_block_of(block, log_sum_exp, scores,
                                      static_cast<Bf16*>(probabilities));
  }
  return recompute_softmax_block_of(block, log_sum_exp, scores, static_cast<float*>(probabilities));
}

template <class T>
HWY_INLINE void softmax_gradient_block_of(const ScoreBlock& block, const float* probabilities,
                                          const float* probability_gradients, const float* delta,
                                          T* score_gradients) {
  const Floats d;
  const auto scale = hn::Set(d, block.scale);
  for (int64_t row = 0; row < block.rows; ++row) {
    const float* p = probabilities + row * block.keys;
    const float* dp = probability_gradients + row * block.keys;
    const auto shift = hn::Set(d, delta[row]);
    store_seen(seen_keys(block, row), block.keys, score_gradients + row * block.keys,
               [&](auto dv, int64_t i) HWY_ATTR {
                 const auto scaled = hn::Mul(hn::LoadU(dv, p + i), scale);
                 return hn::Mul(scaled, hn::Sub(hn::LoadU(dv, dp + i), shift));
               });
  }
}

void softmax_gradient_block(const ScoreBlock& block, const float* probabilities,
                            const float* probability_gradients, const float* delta,
                            void* score_gradients) {
  if (block.dtype == DType::kBf16) {
    return softmax_gradient_block_of(block, probabilities, probability_gradients, delta,
                                     static_cast<Bf16*>(score_gradients));
  }
  return softmax_gradient_block_of(block, probabilities, probability_gradients, delta,
                                   static_cast<float*>(score_gradients));
}

template <class T>
HWY_INLINE void scale_row_of(int64_t count, float factor, const float* in, T* out) {
  for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
    store(d, hn::Mul(hn::LoadU(d, in + i), hn::Set(d, factor)), out + i);
  });
}

void scale_row(int64_t count, float factor, const float* in, DType dtype, void* out) {
  if (dtype == DType::kBf16) return scale_row_of(count, factor, in, static_cast<Bf16*>(out));
  return scale_row_of(count, factor, in, static_cast<float*>(out));
}

template <class T>
HWY_INLINE float dot_row_of(int64_t count, const T* a, const T* b) {
  return sum_of(
      count, [&](auto d, int64_t i) HWY_ATTR { return hn::Mul(load(d, a + i), load(d, b + i)); });
}

float dot_row(int64_t count, DType dtype, const void* a, const void* b) {
  if (dtype == DType::kBf16) {
    return dot_row_of(count, static_cast<const Bf16*>(a), static_cast<const Bf16*>(b));
  }
  return dot_row_of(count, static_cast<const float*>(a), static_cast<const float*>(b));
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace strata::gpu::host {
namespace {

HWY_EXPORT(softmax_block);
HWY_EXPORT(recompute_softmax_block);
HWY_EXPORT(softmax_gradient_block);
HWY_EXPORT(scale_row);
HWY_EXPORT(dot_row);

}  // namespace

void softmax_block(const ScoreBlock& block, const float* scores, OnlineSoftmax* softmax,
                   float* sums, int64_t width, void* probabilities) {
  HWY_DYNAMIC_DISPATCH(softmax_block)(block, scores, softmax, sums, width, probabilities);
}

void recompute_softmax_block(const ScoreBlock& block, const float* log_sum_exp, float* scores,
                             void* probabilities) {
  HWY_DYNAMIC_DISPATCH(recompute_softmax_block)(block, log_sum_exp, scores, probabilities);
}

void softmax_gradient_block(const ScoreBlock& block, const float* probabilities,
                            const float* probability_gradients, const float* delta,
                            void* score_gradients) {
  HWY_DYNAMIC_DISPATCH(softmax_gradient_block)
  (block, probabilities, probability_gradients, delta, score_gradients);
}

void scale_row(int64_t count, float factor, const float* in, DType dtype, void* out) {
  HWY_DYNAMIC_DISPATCH(scale_row)(count, factor, in, dtype, out);
}

float dot_row(int64_t count, DType dtype, const void* a, const void* b) {
  return HWY_DYNAMIC_DISPATCH(dot_row)(count, dtype, a, b);
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
