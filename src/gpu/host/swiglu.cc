#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/swiglu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

/// Any value for NaN, depending on the target; all uses multiply it with x.
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0F);
  const auto at_least = hn::Max(hn::Neg(x), hn::Set(d, kLowestExponent));
  return hn::Div(one, hn::Add(one, exp(d, hn::Min(at_least, hn::Set(d, kHighestExponent)))));
}

template <class T>
HWY_INLINE void swiglu_rows_of(const SwigluArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
    const T* up = gate + args.width;
    T* out = static_cast<T*>(args.out) + row * args.width;
    for_each_vector(args.width, [&](auto d, int64_t i) HWY_ATTR {
      const auto g = load(d, gate + i);
      store(d, hn::Mul(hn::Mul(g, sigmoid(d, g)), load(d, up + i)), out + i);
    });
  }
}

void swiglu_rows(const SwigluArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return swiglu_rows_of<Bf16>(args, begin, end);
  return swiglu_rows_of<float>(args, begin, end);
}

template <class T>
HWY_INLINE void swiglu_backward_rows_of(const SwigluBackwardArgs& args, int64_t begin,
                                        int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
    const T* up = gate + args.width;
    const T* dout = static_cast<const T*>(args.dout) + row * args.width;
    T* dgate = static_cast<T*>(args.d_gate_up) + row * 2 * args.width;
    T* dup = dgate + args.width;
    for_each_vector(args.width, [&](auto d, int64_t i) HWY_ATTR {
      const auto one = hn::Set(d, 1.0F);
      const auto g = load(d, gate + i);
      const auto u = load(d, up + i);
      const auto dy = load(d, dout + i);
      const auto s = sigmoid(d, g);
      // silu'(g) = s + g * s * (1 - s), with s = sigmoid(g).
      const auto slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
      store(d, hn::Mul(hn::Mul(dy, u), slope), dgate + i);
      store(d, hn::Mul(dy, hn::Mul(g, s)), dup + i);
    });
  }
}

void swiglu_backward_rows(const SwigluBackwardArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return swiglu_backward_rows_of<Bf16>(args, begin, end);
  return swiglu_backward_rows_of<float>(args, begin, end);
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(swiglu_rows);
HWY_EXPORT(swiglu_backward_rows);

}  // namespace

void swiglu(const SwigluArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.rows, rows_of_chunk(args.width), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu_rows)(args, begin, end);
  });
}

void swiglu_backward(const SwigluBackwardArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.rows, rows_of_chunk(args.width), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(swiglu_backward_rows)(args, begin, end);
  });
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
