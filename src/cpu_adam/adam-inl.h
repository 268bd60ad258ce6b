// The vector loops, compiled once for each SIMD target of Highway. No include guard of the usual
// kind: Highway flips it between targets.
#if defined(STRATA_CPU_ADAM_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_ADAM_INL_H_
#undef STRATA_CPU_ADAM_ADAM_INL_H_
#else
#define STRATA_CPU_ADAM_ADAM_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu_adam/definition.h"
#include "cpu_adam/reduction.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Loads as many elements as `d` (float) has lanes; `array` holds bf16 or float, as `dtype` says.
template <DType dtype, class D>
HWY_INLINE hn::Vec<D> load_as_float(D d, const void* array, int64_t i) {
  if constexpr (dtype == DType::kF32) {
    return hn::LoadU(d, static_cast<const float*>(array) + i);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto upper = hn::PromoteTo(d32, hn::LoadU(d16, static_cast<const uint16_t*>(array) + i));
    return hn::BitCast(d, hn::ShiftLeft<16>(upper));
  }
}

template <DType dtype, class D>
HWY_INLINE hn::Vec<D> load_master(D d, const Shard& shard, int64_t i) {
  if constexpr (dtype == DType::kF32) {
    return load_as_float<dtype>(d, shard.weight, i);
  } else {
    // join_master subtracts the residual's top bit from the weight: that is to add the residual
    // sign-extended.
    const hn::Rebind<int16_t, D> d16;
    const hn::RebindToSigned<D> d32;
    const auto residual = hn::LoadU(d16, reinterpret_cast<const int16_t*>(shard.residual) + i);
    const auto weight = hn::BitCast(d32, load_as_float<dtype>(d, shard.weight, i));
    return hn::BitCast(d, hn::Add(weight, hn::PromoteTo(d32, residual)));
  }
}

template <DType dtype, class D>
HWY_INLINE void store_master(D d, hn::Vec<D> master, const Shard& shard, int64_t i) {
  if constexpr (dtype == DType::kF32) {
    hn::StoreU(master, d, static_cast<float*>(shard.weight_out) + i);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, master);
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d32, 0x8000U)));
    hn::StoreU(hn::TruncateTo(d16, rounded), d16, static_cast<uint16_t*>(shard.weight_out) + i);
    hn::StoreU(hn::TruncateTo(d16, bits), d16, shard.residual_out + i);
  }
}

template <DType weight_dtype, DType gradient_dtype>
HWY_INLINE void update_run_as(const Shard& shard, int64_t begin, int64_t end,
                              const StepConstants& constants, float decay) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto gradient_scale = hn::Set(d, constants.gradient_scale);
  const auto beta1 = hn::Set(d, constants.beta1);
  const auto one_minus_beta1 = hn::Set(d, constants.one_minus_beta1);
  const auto beta2 = hn::Set(d, constants.beta2);
  const auto one_minus_beta2 = hn::Set(d, constants.one_minus_beta2);
  const auto inverse_sqrt_correction2 = hn::Set(d, constants.inverse_sqrt_correction2);
  const auto epsilon = hn::Set(d, constants.epsilon);
  const auto step_size = hn::Set(d, constants.step_size);
  const auto decays = hn::Set(d, decay);

  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const auto g = hn::Mul(load_as_float<gradient_dtype>(d, shard.gradient, i), gradient_scale);
    const auto m =
        hn::Add(hn::Mul(beta1, hn::LoadU(d, shard.moment1 + i)), hn::Mul(one_minus_beta1, g));
    const auto v = hn::Add(hn::Mul(beta2, hn::LoadU(d, shard.moment2 + i)),
                           hn::Mul(hn::Mul(one_minus_beta2, g), g));
    const auto denominator = hn::Add(hn::Mul(hn::Sqrt(v), inverse_sqrt_correction2), epsilon);
    const auto master = load_master<weight_dtype>(d, shard, i);
    const auto update =
        hn::Add(hn::Mul(step_size, hn::Div(m, denominator)), hn::Mul(decays, master));
    store_master<weight_dtype>(d, hn::Sub(master, update), shard, i);
    hn::StoreU(m, d, shard.moment1_out + i);
    hn::StoreU(v, d, shard.moment2_out + i);
  }
  if (i < end) update_elements(shard, i, end, constants, decay);
}

/// update_elements over [begin, end), to the same bits.
inline void update_run(const Shard& shard, int64_t begin, int64_t end,
                       const StepConstants& constants, float decay) {
  constexpr DType kBf16 = DType::kBf16;
  constexpr DType kF32 = DType::kF32;
  const bool bf16_gradient = shard.gradient_dtype == kBf16;
  if (shard.weight_dtype == kBf16) {
    if (bf16_gradient) return update_run_as<kBf16, kBf16>(shard, begin, end, constants, decay);
    return update_run_as<kBf16, kF32>(shard, begin, end, constants, decay);
  }
  if (bf16_gradient) return update_run_as<kF32, kBf16>(shard, begin, end, constants, decay);
  return update_run_as<kF32, kF32>(shard, begin, end, constants, decay);
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
      const auto x = hn::PromoteTo(d, load_as_float<dtype>(d32, gradient, i + offset));
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

#endif  // STRATA_CPU_ADAM_ADAM_INL_H_
