// One vector of elements: the update, and how each array is loaded, decoded, rounded and stored.
#if defined(STRATA_CPU_ADAM_ELEMENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_ELEMENTS_INL_H_
#undef STRATA_CPU_ADAM_ELEMENTS_INL_H_
#else
#define STRATA_CPU_ADAM_ELEMENTS_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>

#include "cpu_adam/definition.h"
#include "cpu_adam/fused-inl.h"
#include "cpu_adam/moments.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
struct Constants {
  Constants(D d, const StepConstants& constants, float run_decay)
      : gradient_scale(hn::Set(d, constants.gradient_scale)),
        one_minus_beta1(hn::Set(d, constants.one_minus_beta1)),
        one_minus_beta2(hn::Set(d, constants.one_minus_beta2)),
        step_size(hn::Set(d, constants.step_size)),
        epsilon(hn::Set(d, constants.epsilon)),
        decay(hn::Set(d, run_decay)) {}
  hn::Vec<D> gradient_scale, one_minus_beta1, one_minus_beta2, step_size, epsilon, decay;
};

template <class D>
struct Elements {
  hn::Vec<D> master, moment1, moment2, root;  // root: of the new moment2
};

/// update_element for a vector of them.
template <class D>
HWY_INLINE Elements<D> update_vector(D d, hn::Vec<D> master, hn::Vec<D> moment1, hn::Vec<D> moment2,
                                     hn::Vec<D> gradient, const Constants<D>& constants) {
  const auto scaled = hn::Mul(gradient, constants.gradient_scale);
  const auto bound = hn::Set(d, kGradientBound);
  const auto g = hn::Min(hn::Max(scaled, hn::Neg(bound)), bound);
  const auto m = fused(d, constants.one_minus_beta1, hn::Sub(g, moment1), moment1);
  const auto t = fused_minus(d, g, g, moment2);
  const auto v = fused(d, constants.one_minus_beta2, t, moment2);
  const auto root = hn::Sqrt(v);
  const auto q = hn::Div(m, hn::Add(root, constants.epsilon));
  const auto x = fused(d, constants.step_size, q, hn::Mul(constants.decay, master));
  return {hn::Sub(master, x), m, v, root};
}

/// How far ahead of its use each array is asked for: measured (docs/adam.md).
inline constexpr int64_t kPrefetchBytes = 1024;

/// Asks for the bytes that are kPrefetchBytes after this one. Reaching past the end is harmless.
HWY_INLINE void prefetch_after(const void* address) {
  const auto ahead = reinterpret_cast<uintptr_t>(address) + static_cast<uintptr_t>(kPrefetchBytes);
  hwy::Prefetch(reinterpret_cast<const char*>(ahead));
}

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

/// Past the caches, where `streams` says so and the address is a multiple of the vector's size.
template <bool streams, class D, class T>
HWY_INLINE void store(hn::Vec<D> v, D d, T* address) {
  if constexpr (streams) {
    hn::Stream(v, d, address);
  } else {
    hn::StoreU(v, d, address);
  }
}

template <DType dtype, bool streams, class D>
HWY_INLINE void store_master(D d, hn::Vec<D> master, const Shard& shard, int64_t i) {
  if constexpr (dtype == DType::kF32) {
    store<streams>(master, d, static_cast<float*>(shard.weight_out) + i);
  } else {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto bits = hn::BitCast(d32, master);
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Set(d32, 0x8000U)));
    store<streams>(hn::TruncateTo(d16, rounded), d16, static_cast<uint16_t*>(shard.weight_out) + i);
    store<streams>(hn::TruncateTo(d16, bits), d16, shard.residual_out + i);
  }
}

/// rounding_bits in two halves: the Weyl sequence, which a loop goes on with by addition, and what
/// mixes it.
inline constexpr uint32_t kWeyl = 0x9e3779b9U;

template <class D32>
HWY_INLINE hn::Vec<D32> mixed_bits(D32 d32, hn::Vec<D32> x, hn::Vec<D32> second_key) {
  x = hn::Xor(x, hn::ShiftRight<16>(x));
  x = hn::Mul(x, hn::Set(d32, 0x85ebca6bU));
  return hn::Xor(hn::Xor(x, second_key), hn::ShiftRight<15>(x));
}

template <class D32>
HWY_INLINE hn::Vec<D32> rounding_bits(D32 d32, hn::Vec<D32> index, RoundingKey key) {
  const auto x = hn::Add(hn::Mul(index, hn::Set(d32, kWeyl)), hn::Set(d32, key.first));
  return mixed_bits(d32, x, hn::Set(d32, key.second));
}

/// One run of elements that share a decay, with the moments as arrays of the chunk or, for kInt8,
/// the block: element `origin` of the shard is their first.
struct Moments {
  const void* in1;
  const void* in2;
  void* out1;  // for kInt8: floats, moment1 and the root of moment2
  void* out2;
  int64_t origin;
  RoundingKey key;
  uint32_t base1, base2;  // kInt8's
};

/// decode_moment1 and decode_moment2 of vectors of codes.
template <class D>
HWY_INLINE hn::Vec<D> decode_moment1(D d, hn::Vec<hn::RebindToUnsigned<D>> code, uint32_t base) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits =
      hn::Add(hn::ShiftLeft<kInt8Shift1>(hn::And(code, hn::Set(d32, 0x7fU))), hn::Set(d32, base));
  const auto magnitude = hn::Sub(hn::BitCast(d, bits), hn::BitCast(d, hn::Set(d32, base)));
  const auto sign = hn::ShiftLeft<24>(hn::And(code, hn::Set(d32, 0x80U)));
  return hn::Or(magnitude, hn::BitCast(d, sign));
}

template <class D>
HWY_INLINE hn::Vec<D> decode_moment2(D d, hn::Vec<hn::RebindToUnsigned<D>> code, uint32_t base) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::Add(hn::ShiftLeft<kInt8Shift2>(code), hn::Set(d32, base));
  const auto root = hn::Sub(hn::BitCast(d, bits), hn::BitCast(d, hn::Set(d32, base)));
  return hn::Mul(root, root);
}

template <class D>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<D>> load_codes(D /*d*/, const void* codes, int64_t i) {
  const hn::Rebind<uint8_t, D> d8;
  return hn::PromoteTo(hn::RebindToUnsigned<D>(),
                       hn::LoadU(d8, static_cast<const uint8_t*>(codes) + i));
}

template <MomentFormat format, class D>
HWY_INLINE hn::Vec<D> load_moment1(D d, const Moments& moments, int64_t i) {
  if constexpr (format == MomentFormat::kInt8) {
    return decode_moment1(d, load_codes(d, moments.in1, i), moments.base1);
  } else {
    constexpr DType kType = format == MomentFormat::kF32 ? DType::kF32 : DType::kBf16;
    return load_as_float<kType>(d, moments.in1, i);
  }
}

template <MomentFormat format, class D>
HWY_INLINE hn::Vec<D> load_moment2(D d, const Moments& moments, int64_t i) {
  if constexpr (format == MomentFormat::kInt8) {
    return decode_moment2(d, load_codes(d, moments.in2, i), moments.base2);
  } else {
    constexpr DType kType = format == MomentFormat::kF32 ? DType::kF32 : DType::kBf16;
    return load_as_float<kType>(d, moments.in2, i);
  }
}

template <MomentFormat format, bool streams, class D>
HWY_INLINE void store_moments(D d, const Elements<D>& elements, const Moments& moments, int64_t i) {
  if constexpr (format == MomentFormat::kBf16) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::RebindToUnsigned<D> d32;
    const auto index = hn::Iota(d32, static_cast<uint32_t>((moments.origin + i) % kChunkElements));
    const auto random = rounding_bits(d32, index, moments.key);
    const auto store_rounded = [&](hn::Vec<D> value, hn::Vec<decltype(d32)> bits, void* out) {
      const auto sum = hn::Add(hn::BitCast(d32, value), bits);
      hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(sum)), d16,
                 static_cast<uint16_t*>(out) + i);
    };
    store_rounded(elements.moment1, hn::ShiftRight<16>(random), moments.out1);
    store_rounded(elements.moment2, hn::And(random, hn::Set(d32, 0xffffU)), moments.out2);
  } else {
    store<streams>(elements.moment1, d, static_cast<float*>(moments.out1) + i);
    store<streams>(format == MomentFormat::kInt8 ? elements.root : elements.moment2, d,
                   static_cast<float*>(moments.out2) + i);
  }
}

/// The elements of a run that do not fill a vector.
template <MomentFormat format>
void update_rest(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                 float decay, const Moments& moments) {
  float m[kMomentBlock];
  float v[kMomentBlock];
  const auto size = static_cast<size_t>(end - begin);
  load_elements(false, shard.count, format, shard.moment1, begin, {m, size});
  load_elements(true, shard.count, format, shard.moment2, begin, {v, size});
  update_elements(shard, begin, end, constants, decay, m, v);
  if constexpr (format == MomentFormat::kInt8) {
    for (size_t k = 0; k < size; ++k) {
      static_cast<float*>(moments.out1)[begin - moments.origin + static_cast<int64_t>(k)] = m[k];
      static_cast<float*>(moments.out2)[begin - moments.origin + static_cast<int64_t>(k)] =
          std::sqrt(v[k]);
    }
  } else {
    store_block(false, shard.count, format, shard.moment1_out, begin, {m, size}, &moments.key);
    store_block(true, shard.count, format, shard.moment2_out, begin, {v, size}, &moments.key);
  }
}

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_CPU_ADAM_ELEMENTS_INL_H_
