// Fused multiply-add with the same bits on every SIMD target.
#if defined(STRATA_CPU_ADAM_FUSED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_FUSED_INL_H_
#undef STRATA_CPU_ADAM_FUSED_INL_H_
#else
#define STRATA_CPU_ADAM_FUSED_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

/// a * b + c, rounded once.
template <class D>
HWY_INLINE hn::Vec<D> fused(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return hn::Set(d, std::fma(hn::GetLane(a), hn::GetLane(b), hn::GetLane(c)));
}

/// a * b - c, rounded once.
template <class D>
HWY_INLINE hn::Vec<D> fused_minus(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return fused(d, a, b, hn::Neg(c));
}

#elif HWY_NATIVE_FMA

template <class D>
HWY_INLINE hn::Vec<D> fused(D /*d*/, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return hn::MulAdd(a, b, c);
}

template <class D>
HWY_INLINE hn::Vec<D> fused_minus(D /*d*/, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return hn::MulSub(a, b, c);
}

#else

/// a * b + c of finite numbers, to be rounded to float: in double the product is exact, and the sum
/// is rounded to odd (its last bit is set where it is inexact), after which rounding again, to 24
/// bits, is as good as once. Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums"
/// (IEEE Transactions on Computers, 2008), theorem 1; the error of the sum is Knuth's TwoSum.
template <class D>
HWY_INLINE hn::Vec<D> sum_to_odd(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  const hn::RebindToUnsigned<D> du;
  const auto product = hn::Mul(a, b);
  const auto sum = hn::Add(product, c);
  const auto from_c = hn::Sub(sum, product);
  const auto error = hn::Add(hn::Sub(product, hn::Sub(sum, from_c)), hn::Sub(c, from_c));
  const auto bits = hn::BitCast(du, sum);
  const auto one = hn::Set(du, uint64_t{1});
  // One step away from zero where the error has the sum's sign, towards it otherwise.
  const auto opposite = hn::ShiftRight<63>(hn::Xor(bits, hn::BitCast(du, error)));
  const auto step = hn::Sub(one, hn::Add(opposite, opposite));
  const auto exact = hn::RebindMask(du, hn::Eq(error, hn::Zero(d)));
  const auto is_odd = hn::Eq(hn::And(bits, one), one);
  return hn::BitCast(d, hn::IfThenElse(hn::Or(exact, is_odd), bits, hn::Add(bits, step)));
}

template <class D>
HWY_INLINE hn::Vec<D> fused(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  const hn::Half<D> dh;
  const hn::Rebind<double, decltype(dh)> dd;
  const auto lower =
      sum_to_odd(dd, hn::PromoteTo(dd, hn::LowerHalf(dh, a)),
                 hn::PromoteTo(dd, hn::LowerHalf(dh, b)), hn::PromoteTo(dd, hn::LowerHalf(dh, c)));
  const auto upper =
      sum_to_odd(dd, hn::PromoteTo(dd, hn::UpperHalf(dh, a)),
                 hn::PromoteTo(dd, hn::UpperHalf(dh, b)), hn::PromoteTo(dd, hn::UpperHalf(dh, c)));
  return hn::Combine(d, hn::DemoteTo(dh, upper), hn::DemoteTo(dh, lower));
}

template <class D>
HWY_INLINE hn::Vec<D> fused_minus(D d, hn::Vec<D> a, hn::Vec<D> b, hn::Vec<D> c) {
  return fused(d, a, b, hn::Neg(c));
}

#endif

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_CPU_ADAM_FUSED_INL_H_
