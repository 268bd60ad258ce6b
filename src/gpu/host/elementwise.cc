#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/elementwise.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "cpu_adam/reduction.h"
#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

template <class T>
HWY_INLINE void add_range_of(const AddArgs& args, int64_t begin, int64_t end) {
  const T* a = static_cast<const T*>(args.a) + begin;
  const T* b = static_cast<const T*>(args.b) + begin;
  T* out = static_cast<T*>(args.out) + begin;
  for_each_vector(end - begin, [&](auto d, int64_t i) HWY_ATTR {
    store(d, hn::Add(load(d, a + i), load(d, b + i)), out + i);
  });
}

void add_range(const AddArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return add_range_of<Bf16>(args, begin, end);
  return add_range_of<float>(args, begin, end);
}

template <class In, class Out>
HWY_INLINE void cast_range_of(const CastArgs& args, int64_t begin, int64_t end) {
  const In* in = static_cast<const In*>(args.in) + begin;
  Out* out = static_cast<Out*>(args.out) + begin;
  for_each_vector(end - begin,
                  [&](auto d, int64_t i) HWY_ATTR { store(d, load(d, in + i), out + i); });
}

/// For types that differ.
void cast_range(const CastArgs& args, int64_t begin, int64_t end) {
  if (args.in_dtype == DType::kBf16) return cast_range_of<Bf16, float>(args, begin, end);
  return cast_range_of<float, Bf16>(args, begin, end);
}

template <class T>
HWY_INLINE double finish_part_of(const FinishGradientArgs& args, int64_t begin, int64_t end) {
  using cpu_adam::kSumLanes;
  // Capped, because a vector must not have more lanes than the sum has accumulators.
  const hn::CappedTag<double, kSumLanes> d;
  const hn::Rebind<float, decltype(d)> d32;
  constexpr size_t kVectors = kSumLanes / hn::MaxLanes(d);
  static_assert(!HWY_HAVE_SCALABLE, "arrays of vectors need vectors of a size known here");
  hn::Vec<decltype(d)> sums[kVectors];
  HWY_UNROLL(16)
  for (auto& sum : sums) sum = hn::Zero(d);

  T* gradient = static_cast<T*>(args.gradient);
  int64_t i = begin;
  for (; i + int64_t{kSumLanes} <= end; i += kSumLanes) {
    HWY_UNROLL(16)
    for (size_t k = 0; k < kVectors; ++k) {
      const int64_t at = i + static_cast<int64_t>(k * hn::MaxLanes(d));
      store(d32, load(d32, args.accumulated + at), gradient + at);
      const auto x = hn::PromoteTo(d, load(d32, gradient + at));
      // The square of a float is exact in double: fused or not, this gives the same bits.
      sums[k] = hn::MulAdd(x, x, sums[k]);
    }
  }
  const OneFloat d1;
  for (int64_t j = i; j < end; ++j) store(d1, load(d1, args.accumulated + j), gradient + j);
  cpu_adam::SumLanes lanes;
  for (size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[k], d, lanes.data() + k * hn::MaxLanes(d));
  return cpu_adam::finish_part(lanes, args.gradient, args.gradient_dtype, i, end);
}

double finish_gradient_part(const FinishGradientArgs& args, int64_t begin, int64_t end) {
  if (args.gradient_dtype == DType::kBf16) return finish_part_of<Bf16>(args, begin, end);
  return finish_part_of<float>(args, begin, end);
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <cstring>

#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(add_range);
HWY_EXPORT(cast_range);
HWY_EXPORT(finish_gradient_part);

}  // namespace

void add(const AddArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.count, kChunkElements, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(add_range)(args, begin, end);
  });
}

void cast(const CastArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.count, kChunkElements, [&](int64_t begin, int64_t end) {
    if (args.in_dtype != args.out_dtype) {
      HWY_DYNAMIC_DISPATCH(cast_range)(args, begin, end);
      return;
    }
    const size_t size = size_of(args.in_dtype);
    const size_t offset = static_cast<size_t>(begin) * size;
    std::memcpy(static_cast<std::byte*>(args.out) + offset,
                static_cast<const std::byte*>(args.in) + offset,
                static_cast<size_t>(end - begin) * size);
  });
}

size_t finish_gradient_scratch_bytes(const FinishGradientArgs& /*args*/) { return 0; }

void finish_gradient(const FinishGradientArgs& args, tbb::task_arena& arena) {
  // The tree of cpu_adam::sum_of_squares, so that the norm is the same wherever it is taken.
  const int64_t part = cpu_adam::sum_part_elements(args.count);
  cpu_adam::SumParts sums{};
  for_each_chunk(arena, args.count, part, [&](int64_t begin, int64_t end) {
    sums[static_cast<size_t>(begin / part)] =
        HWY_DYNAMIC_DISPATCH(finish_gradient_part)(args, begin, end);
  });
  *args.sum_of_squares = cpu_adam::sum_by_halves(sums);
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
