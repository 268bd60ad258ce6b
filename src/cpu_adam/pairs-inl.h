// Two vectors of elements at a time, the even and the odd ones, where arrays have 16 bits an
// element.
#if defined(STRATA_CPU_ADAM_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_PAIRS_INL_H_
#undef STRATA_CPU_ADAM_PAIRS_INL_H_
#else
#define STRATA_CPU_ADAM_PAIRS_INL_H_
#endif

#include <hwy/highway.h>

#include "cpu_adam/elements-inl.h"
#include "cpu_adam/moments.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Where a kInt8 block's codes and scales are.
struct Int8Block {
  const uint8_t* codes1;
  const uint8_t* codes2;
  uint8_t* codes1_out;
  uint8_t* codes2_out;
  uint8_t* scale1_out;
  uint8_t* scale2_out;
  uint32_t base1, base2;
  RoundingKey key;
  int64_t first;     // element of the shard
  int64_t in_chunk;  // the same, of the chunk
};

#if HWY_TARGET != HWY_SCALAR

/// Vectors of pairs of neighbours: of two vectors' worth of elements, the even ones and the odd
/// ones. Arrays of 16 bits fall apart in this way, and come together again, without an element
/// changing its lane.
struct Pairs {
  using D = hn::ScalableTag<float>;
  using D32 = hn::RebindToUnsigned<D>;
  using D16 = hn::Repartition<uint16_t, D>;
  using V = hn::Vec<D>;
  using V32 = hn::Vec<D32>;
  struct Both {
    V even, odd;
  };

  /// Floats of which these are the upper halves.
  static Both from_upper(hn::Vec<D16> halves) {
    const V32 pair = hn::BitCast(D32(), halves);
    return {hn::BitCast(D(), hn::ShiftLeft<16>(pair)),
            hn::BitCast(D(), hn::And(pair, hn::Set(D32(), 0xffff0000U)))};
  }
  /// The upper 16 bits of each, in the elements' order.
  static hn::Vec<D16> upper(V32 even, V32 odd) {
    return hn::OddEven(hn::BitCast(D16(), odd), hn::BitCast(D16(), hn::ShiftRight<16>(even)));
  }
  static Both load_bf16(const uint16_t* array, int64_t i) {
    return from_upper(hn::LoadU(D16(), array + i));
  }
  static Both load_split(const uint16_t* weight, const uint16_t* residual, int64_t i) {
    const hn::RebindToSigned<D16> di16;
    const auto lower = hn::LoadU(D16(), residual + i);
    // join_master's upper halves: one less where the residual's top bit is set.
    const auto borrow = hn::BitCast(D16(), hn::ShiftRight<15>(hn::BitCast(di16, lower)));
    const V32 upper32 = hn::BitCast(D32(), hn::Add(hn::LoadU(D16(), weight + i), borrow));
    const V32 lower32 = hn::BitCast(D32(), lower);
    const V32 even_lower = hn::And(lower32, hn::Set(D32(), 0xffffU));
    const V32 odd_upper = hn::And(upper32, hn::Set(D32(), 0xffff0000U));
    return {hn::BitCast(D(), hn::Or(hn::ShiftLeft<16>(upper32), even_lower)),
            hn::BitCast(D(), hn::Or(odd_upper, hn::ShiftRight<16>(lower32)))};
  }
  template <bool streams>
  static void store_upper(V32 even, V32 odd, uint16_t* array, int64_t i) {
    store<streams>(upper(even, odd), D16(), array + i);
  }
  template <bool streams>
  static void store_split(V even, V odd, uint16_t* weight, uint16_t* residual, int64_t i) {
    const V32 e = hn::BitCast(D32(), even);
    const V32 o = hn::BitCast(D32(), odd);
    const V32 half = hn::Set(D32(), 0x8000U);
    store_upper<streams>(hn::Add(e, half), hn::Add(o, half), weight, i);
    store<streams>(hn::OddEven(hn::BitCast(D16(), hn::ShiftLeft<16>(o)), hn::BitCast(D16(), e)),
                   D16(), residual + i);
  }
};

/// The random bits of consecutive vectors of pairs, from element `first` of the chunk.
class PairsOfBits {
 public:
  PairsOfBits(RoundingKey key, int64_t first)
      : key_(hn::Set(P::D32(), key.second)),
        advance_(hn::Set(P::D32(), kWeyl * static_cast<uint32_t>(hn::Lanes(P::D16())))) {
    const P::D32 d32;
    const auto index =
        hn::Add(hn::ShiftLeft<1>(hn::Iota(d32, 0U)), hn::Set(d32, static_cast<uint32_t>(first)));
    even_ = hn::Add(hn::Mul(index, hn::Set(d32, kWeyl)), hn::Set(d32, key.first));
  }
  struct Both {
    hn::Vec<Pairs::D32> even, odd;
  };
  HWY_INLINE Both next() {
    const P::D32 d32;
    const auto odd = hn::Add(even_, hn::Set(d32, kWeyl));
    const Both bits{mixed_bits(d32, even_, key_), mixed_bits(d32, odd, key_)};
    even_ = hn::Add(even_, advance_);
    return bits;
  }

 private:
  using P = Pairs;
  hn::Vec<P::D32> key_, advance_, even_;
};

/// The part of a run that is whole vectors of pairs, from arrays that are all bf16.
template <bool streams>
int64_t update_all_bf16(const Shard& shard, int64_t begin, int64_t end, const StepConstants& step,
                        float decay, const Moments& moments) {
  using P = Pairs;
  const P::D d;
  const P::D32 d32;
  const auto lanes = static_cast<int64_t>(hn::Lanes(P::D16()));
  const Constants<P::D> constants(d, step, decay);
  const auto* gradient = static_cast<const uint16_t*>(shard.gradient);
  const auto* weight = static_cast<const uint16_t*>(shard.weight);
  const uint16_t* residual = shard.residual;
  const auto* moment1 = static_cast<const uint16_t*>(moments.in1) - moments.origin;
  const auto* moment2 = static_cast<const uint16_t*>(moments.in2) - moments.origin;
  auto* weight_out = static_cast<uint16_t*>(shard.weight_out);
  uint16_t* residual_out = shard.residual_out;
  auto* moment1_out = static_cast<uint16_t*>(moments.out1) - moments.origin;
  auto* moment2_out = static_cast<uint16_t*>(moments.out2) - moments.origin;
  const auto lower = hn::Set(d32, 0xffffU);
  const auto add = [&](P::V value, P::V32 random) {
    return hn::Add(hn::BitCast(d32, value), random);
  };

  PairsOfBits bits(moments.key, begin % kChunkElements);
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    prefetch_after(gradient + i);
    prefetch_after(weight + i);
    prefetch_after(residual + i);
    prefetch_after(moment1 + i);
    prefetch_after(moment2 + i);
    const P::Both g = P::load_bf16(gradient, i);
    const P::Both master = P::load_split(weight, residual, i);
    const P::Both m = P::load_bf16(moment1, i);
    const P::Both v = P::load_bf16(moment2, i);
    const auto even = update_vector(d, master.even, m.even, v.even, g.even, constants);
    const auto odd = update_vector(d, master.odd, m.odd, v.odd, g.odd, constants);
    P::store_split<streams>(even.master, odd.master, weight_out, residual_out, i);
    const PairsOfBits::Both random = bits.next();
    P::store_upper<streams>(add(even.moment1, hn::ShiftRight<16>(random.even)),
                            add(odd.moment1, hn::ShiftRight<16>(random.odd)), moment1_out, i);
    P::store_upper<streams>(add(even.moment2, hn::And(random.even, lower)),
                            add(odd.moment2, hn::And(random.odd, lower)), moment2_out, i);
  }
  return i;
}

/// A whole block of a kInt8 shard with bf16 weights and gradients, 16-bit lanes for all that 16
/// bits can hold.
inline void update_int8_pairs(const Shard& shard, const StepConstants& step, float decay,
                              const Int8Block& block) {
  using P = Pairs;
  const P::D d;
  const P::D32 d32;
  const P::D16 d16;
  const hn::RebindToSigned<P::D> di32;
  const hn::Rebind<uint8_t, P::D16> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const Constants<P::D> constants(d, step, decay);
  const auto* gradient = static_cast<const uint16_t*>(shard.gradient) + block.first;
  const auto* weight = static_cast<const uint16_t*>(shard.weight) + block.first;
  const uint16_t* residual = shard.residual + block.first;
  auto* weight_out = static_cast<uint16_t*>(shard.weight_out) + block.first;
  uint16_t* residual_out = shard.residual_out + block.first;
  const uint8_t* const codes1 = block.codes1;
  const uint8_t* const codes2 = block.codes2;
  HWY_ALIGN float moment1[kMomentBlock];  // of every two vectors the even elements, then the odd
  HWY_ALIGN float root2[kMomentBlock];
  const auto sign32 = hn::Set(d32, 0x80000000U);
  const auto with_sign_of = [&](P::V value, P::V32 magnitude) {
    return hn::BitCast(d, hn::Or(magnitude, hn::And(hn::BitCast(d32, value), sign32)));
  };
  const auto magnitude_of = [&](P::V value) {
    return hn::BitCast(di32, hn::AndNot(sign32, hn::BitCast(d32, value)));
  };

  for (int64_t k = 0; k < kMomentBlock; k += 64) {
    prefetch_after(codes1 + k);
    prefetch_after(codes2 + k);
  }
  auto largest1 = hn::Zero(di32);
  auto largest2 = hn::Zero(di32);
  {
    const P::V32 f0_1 = hn::Set(d32, block.base1);
    const auto f0_2 = hn::BitCast(d, hn::Set(d32, block.base2));
    const auto upper1 = hn::Set(d16, static_cast<uint16_t>(block.base1 >> 16));
    const auto upper2 = hn::Set(d16, static_cast<uint16_t>(block.base2 >> 16));
    for (int64_t k = 0; k < kMomentBlock; k += 2 * lanes) {
      prefetch_after(gradient + k);
      prefetch_after(weight + k);
      prefetch_after(residual + k);
      const P::Both g = P::load_bf16(gradient, k);
      const P::Both master = P::load_split(weight, residual, k);
      // The sign is put on f(c), so f(0) has to be taken away with the same sign.
      const auto code1 = hn::PromoteTo(d16, hn::LoadU(d8, codes1 + k));
      const auto above1 = hn::Add(
          hn::ShiftLeft<kInt8Shift1 - 16>(hn::And(code1, hn::Set(d16, uint16_t{0x7f}))), upper1);
      const auto sign1 = hn::And(hn::ShiftLeft<8>(code1), hn::Set(d16, uint16_t{0x8000}));
      const P::Both f1 = P::from_upper(hn::Or(above1, sign1));
      const auto m_of = [&](P::V f) { return hn::Sub(f, with_sign_of(f, f0_1)); };
      const auto code2 = hn::PromoteTo(d16, hn::LoadU(d8, codes2 + k));
      const P::Both f2 = P::from_upper(hn::Add(hn::ShiftLeft<kInt8Shift2 - 16>(code2), upper2));
      const auto v_of = [&](P::V f) {
        const auto root = hn::Sub(f, f0_2);
        return hn::Mul(root, root);
      };
      const auto even =
          update_vector(d, master.even, m_of(f1.even), v_of(f2.even), g.even, constants);
      const auto odd = update_vector(d, master.odd, m_of(f1.odd), v_of(f2.odd), g.odd, constants);
      P::store_split<false>(even.master, odd.master, weight_out, residual_out, k);
      hn::Store(even.moment1, d, moment1 + k);
      hn::Store(odd.moment1, d, moment1 + k + lanes);
      hn::Store(even.root, d, root2 + k);
      hn::Store(odd.root, d, root2 + k + lanes);
      largest1 = hn::Max(largest1, hn::Max(magnitude_of(even.moment1), magnitude_of(odd.moment1)));
      largest2 =
          hn::Max(largest2, hn::Max(hn::BitCast(di32, even.root), hn::BitCast(di32, odd.root)));
    }
  }
  const auto largest = [&](hn::Vec<hn::RebindToSigned<P::D>> lane_largest) {
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di32, lane_largest)));
  };
  const uint8_t scale1 = int8_scale(kInt8Shift1, largest(largest1));
  const uint8_t scale2 = int8_scale(kInt8Shift2, largest(largest2));
  *block.scale1_out = scale1;
  *block.scale2_out = scale2;
  const P::V32 f0_1 = hn::Set(d32, int8_base(scale1));
  const auto f0_2 = hn::BitCast(d, hn::Set(d32, int8_base(scale2)));
  // Copies: a store of bytes might change what a reference refers to, for all the compiler knows.
  uint8_t* const codes1_out = block.codes1_out;
  uint8_t* const codes2_out = block.codes2_out;
  PairsOfBits bits(block.key, block.in_chunk);
  const auto base1 = hn::Set(d16, static_cast<uint16_t>(int8_base(scale1) >> kInt8Shift1));
  const auto base2 = hn::Set(d16, static_cast<uint16_t>(int8_base(scale2) >> kInt8Shift2));
  for (int64_t k = 0; k < kMomentBlock; k += 2 * lanes) {
    const PairsOfBits::Both random = bits.next();
    const auto rounded1 = [&](int64_t at, P::V32 added) {
      const P::V value = hn::Load(d, moment1 + at);
      const auto above = hn::Add(value, with_sign_of(value, f0_1));
      return hn::Add(hn::BitCast(d32, above), hn::ShiftRight<32 - kInt8Shift1>(added));
    };
    const auto halves1 = P::upper(rounded1(k, random.even), rounded1(k + lanes, random.odd));
    const auto code1 = hn::Sub(
        hn::ShiftRight<kInt8Shift1 - 16>(hn::And(halves1, hn::Set(d16, uint16_t{0x7fff}))), base1);
    const auto sign1 = hn::And(hn::ShiftRight<8>(halves1), hn::Set(d16, uint16_t{0x80}));
    hn::StoreU(hn::TruncateTo(d8, hn::Or(code1, sign1)), d8, codes1_out + k);

    const auto rounded2 = [&](int64_t at, P::V32 added) {
      const auto above = hn::Add(hn::Load(d, root2 + at), f0_2);
      return hn::Add(hn::BitCast(d32, above),
                     hn::And(added, hn::Set(d32, (1U << kInt8Shift2) - 1)));
    };
    const auto halves2 = P::upper(rounded2(k, random.even), rounded2(k + lanes, random.odd));
    const auto code2 = hn::Sub(hn::ShiftRight<kInt8Shift2 - 16>(halves2), base2);
    hn::StoreU(hn::TruncateTo(d8, hn::Max(code2, hn::Set(d16, uint16_t{1}))), d8, codes2_out + k);
  }
}

#endif

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_CPU_ADAM_PAIRS_INL_H_
