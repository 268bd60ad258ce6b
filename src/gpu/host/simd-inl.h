// What the vector loops of the host kernels share: elements of either type as vectors of float,
// loops over runs of any length, and exp. No include guard of the usual kind: Highway flips it
// between targets.
#if defined(STRATA_GPU_HOST_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_GPU_HOST_SIMD_INL_H_
#undef STRATA_GPU_HOST_SIMD_INL_H_
#else
#define STRATA_GPU_HOST_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>
#include <limits>

#include "base/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using OneFloat = hn::CappedTag<float, 1>;

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load(D d, const Bf16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto upper = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from)));
  return hn::BitCast(d, hn::ShiftLeft<16>(upper));
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, float* to) {
  hn::StoreU(v, d, to);
}

/// Rounds as to_bf16 does.
template <class D>
HWY_INLINE void store(D d, hn::Vec<D> v, Bf16* to) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1U));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7fffU)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000U));
  const auto wide = hn::IfThenElse(hn::IsNaN(v), hn::BitCast(d, quiet), hn::BitCast(d, rounded));
  const auto upper = hn::ShiftRight<16>(hn::BitCast(d32, wide));
  hn::StoreU(hn::TruncateTo(d16, upper), d16, reinterpret_cast<uint16_t*>(to));
}

/// Calls body(d, i) for each vector of [0, count), the last few elements as vectors of one lane.
/// What body stores may overlap what a later call loads.
template <class Body>
HWY_INLINE void for_each_vector(int64_t count, Body body) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(d, i);
  for (; i < count; ++i) body(OneFloat(), i);
}

/// The sum of the lanes of term(d, i) over [0, count), in an order that depends on the target and
/// `count` alone.
template <class Term>
HWY_INLINE float sum_of(int64_t count, Term term) {
  const Floats d;
  const OneFloat d1;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  // Four sums, for an addition takes as long as four loads.
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  auto sum2 = hn::Zero(d);
  auto sum3 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    sum0 = hn::Add(sum0, term(d, i));
    sum1 = hn::Add(sum1, term(d, i + lanes));
    sum2 = hn::Add(sum2, term(d, i + 2 * lanes));
    sum3 = hn::Add(sum3, term(d, i + 3 * lanes));
  }
  for (; i + lanes <= count; i += lanes) sum0 = hn::Add(sum0, term(d, i));
  float tail = 0;
  for (; i < count; ++i) tail += hn::GetLane(term(d1, i));
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  return hn::GetLane(hn::SumOfLanes(d, sum)) + tail;
}

/// The largest of values[0, count), minus infinity if there are none. Some NaNs may be passed over.
HWY_INLINE float max_of(int64_t count, const float* values) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto max0 = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto max1 = max0;
  int64_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(d, values + i));
    max1 = hn::Max(max1, hn::LoadU(d, values + i + lanes));
  }
  for (; i + lanes <= count; i += lanes) max0 = hn::Max(max0, hn::LoadU(d, values + i));
  float max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
  for (; i < count; ++i) max = values[i] > max ? values[i] : max;
  return max;
}

inline constexpr float kLowestExponent = -88.0F;
inline constexpr float kHighestExponent = 88.7F;

/// e^x within 1.1 ULP for x in [-87.3, 88.3], 0 at kLowestExponent, infinity at kHighestExponent,
/// NaN for NaN. Undefined beyond the two: callers clamp, each in the way that it can afford.
template <class D>
HWY_INLINE hn::Vec<D> exp(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  // x = n * ln(2) + r. Adding 1.5 * 2^23 rounds to an integer and leaves it in the lowest bits.
  const auto magic = hn::Set(d, 0x1.8p23F);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 0x1.715476p0F), magic);
  const auto n = hn::Sub(shifted, magic);
  // ln(2) in two parts, the first short enough for n times it to be exact.
  auto r = hn::NegMulAdd(n, hn::Set(d, 0x1.62e4p-1F), x);
  r = hn::NegMulAdd(n, hn::Set(d, 0x1.7f7d1cp-20F), r);

  // e^r = 1 + r + r^2 * q(r) for |r| <= ln(2) / 2: a minimax fit, relative error 3.1e-9.
  auto q = hn::MulAdd(hn::Set(d, 0x1.6a23dp-10F), r, hn::Set(d, 0x1.123a2p-7F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.5558f2p-5F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.555492p-3F));
  q = hn::MulAdd(q, r, hn::Set(d, 0x1.fffffcp-2F));
  const auto y = hn::Add(hn::MulAdd(hn::Mul(r, r), q, r), hn::Set(d, 1.0F));

  // 2^n by its exponent field: 0 for n = -127, infinity for n = 128.
  const auto field = hn::Add(hn::BitCast(di, shifted), hn::Set(di, 127));
  return hn::Mul(y, hn::BitCast(d, hn::ShiftLeft<23>(field)));
}

}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_GPU_HOST_SIMD_INL_H_
