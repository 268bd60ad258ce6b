#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/rotary.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

template <class T>
HWY_INLINE void rotary_rows_of(const RotaryArgs& args, int64_t begin, int64_t end) {
  const int64_t half = args.head_dim / 2;
  const float direction = args.inverse ? -1.0F : 1.0F;
  for (int64_t row = begin; row < end; ++row) {
    const float* cosines = args.cos_sin + args.positions[row] * args.head_dim;
    const float* sines = cosines + half;
    for (int64_t head = 0; head < args.heads; ++head) {
      T* low = static_cast<T*>(args.x) + row * args.x_stride + head * args.head_dim;
      T* high = low + half;
      for_each_vector(half, [&](auto d, int64_t i) HWY_ATTR {
        const auto c = hn::LoadU(d, cosines + i);
        const auto s = hn::Mul(hn::LoadU(d, sines + i), hn::Set(d, direction));
        const auto a = load(d, low + i);
        const auto b = load(d, high + i);
        store(d, hn::NegMulAdd(b, s, hn::Mul(a, c)), low + i);
        store(d, hn::MulAdd(a, s, hn::Mul(b, c)), high + i);
      });
    }
  }
}

void rotary_rows(const RotaryArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return rotary_rows_of<Bf16>(args, begin, end);
  return rotary_rows_of<float>(args, begin, end);
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "base/error.h"
#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(rotary_rows);

}  // namespace

void rotary(const RotaryArgs& args, tbb::task_arena& arena) {
  STRATA_CHECK(args.head_dim % 2 == 0, "rotary embedding needs an even head_dim");
  const int64_t chunk = rows_of_chunk(args.heads * args.head_dim);
  for_each_chunk(arena, args.rows, chunk, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(rotary_rows)(args, begin, end);
  });
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
