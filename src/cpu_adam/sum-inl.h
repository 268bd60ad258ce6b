// The sum of squares in vectors, compiled once for each SIMD target of Highway.
#if defined(STRATA_CPU_ADAM_SUM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_SUM_INL_H_
#undef STRATA_CPU_ADAM_SUM_INL_H_
#else
#define STRATA_CPU_ADAM_SUM_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu_adam/reduction.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <DType dtype, class D>
HWY_INLINE hn::Vec<D> load_for_sum(D d, const void* array, int64_t i) {
  if constexpr (dtype == DType::kF32) {
    return hn::LoadU(d, static_cast<const float*>(array) + i);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto upper = hn::PromoteTo(d32, hn::LoadU(d16, static_cast<const uint16_t*>(array) + i));
    return hn::BitCast(d, hn::ShiftLeft<16>(upper));
  }
}

template <DType dtype>
HWY_INLINE double sum_part_as(const void* gradient, int64_t begin, int64_t end) {
  // Capped, because a vector must not have more lanes than the sum has accumulators.
  const hn::CappedTag<double, kSumLanes> d;
  const hn::Rebind<float, decltype(d)> d32;
  constexpr size_t kVectors = kSumLanes / hn::MaxLanes(d);
  static_assert(!HWY_HAVE_SCALABLE, "arrays of vectors need vectors of a size known here");
  hn::Vec<decltype(d)> sums[kVectors];
  HWY_UNROLL(16)
  for (auto& sum : sums) sum = hn::Zero(d);

  int64_t i = begin;
  for (; i + int64_t{kSumLanes} <= end; i += kSumLanes) {
    HWY_UNROLL(16)
    for (size_t k = 0; k < kVectors; ++k) {
      const auto offset = static_cast<int64_t>(k * hn::MaxLanes(d));
      const auto x = hn::PromoteTo(d, load_for_sum<dtype>(d32, gradient, i + offset));
      // The square of a float is exact in double: fused or not, this gives the same bits.
      sums[k] = hn::MulAdd(x, x, sums[k]);
    }
  }
  SumLanes lanes;
  for (size_t k = 0; k < kVectors; ++k) hn::StoreU(sums[k], d, lanes.data() + k * hn::MaxLanes(d));
  return finish_part(lanes, gradient, dtype, i, end);
}

inline double sum_part(const void* gradient, DType dtype, int64_t begin, int64_t end) {
  if (dtype == DType::kBf16) return sum_part_as<DType::kBf16>(gradient, begin, end);
  return sum_part_as<DType::kF32>(gradient, begin, end);
}

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_CPU_ADAM_SUM_INL_H_
