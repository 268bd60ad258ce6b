// The vector loops, compiled once for each SIMD target of Highway. No include guard of the usual
// kind: Highway flips it between targets.
#if defined(STRATA_CPU_ADAM_ADAM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef STRATA_CPU_ADAM_ADAM_INL_H_
#undef STRATA_CPU_ADAM_ADAM_INL_H_
#else
#define STRATA_CPU_ADAM_ADAM_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "cpu_adam/definition.h"
#include "cpu_adam/elements-inl.h"
#include "cpu_adam/moments.h"
#include "cpu_adam/pairs-inl.h"
#include "cpu_adam/segments.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <DType weight_dtype, DType gradient_dtype, MomentFormat format>
HWY_INLINE void prefetch_run(const Shard& shard, const Moments& moments, int64_t i) {
  const auto after = [](const void* array, int64_t bytes) {
    prefetch_after(static_cast<const char*>(array) + bytes);
  };
  constexpr auto kBytesOf = [](DType dtype) { return dtype == DType::kF32 ? int64_t{4} : 2; };
  after(shard.gradient, i * kBytesOf(gradient_dtype));
  after(shard.weight, i * kBytesOf(weight_dtype));
  if constexpr (weight_dtype == DType::kBf16) after(shard.residual, 2 * i);
  if constexpr (format != MomentFormat::kInt8) {
    constexpr int64_t kMomentBytes = format == MomentFormat::kF32 ? 4 : 2;
    after(moments.in1, (i - moments.origin) * kMomentBytes);
    after(moments.in2, (i - moments.origin) * kMomentBytes);
  }
}

/// Whether a run's results can go past the caches: into other arrays, all of them aligned. Then
/// they should (docs/adam.md); in place they are in the caches already. Two moments in kF32 or
/// kBf16.
inline bool can_stream(const Shard& shard, const Moments& moments, int64_t begin) {
  const auto aligned = [begin](const void* array, size_t element_bytes, size_t alignment) {
    return (reinterpret_cast<uintptr_t>(array) + static_cast<size_t>(begin) * element_bytes) %
               alignment ==
           0;
  };
  const size_t vector = hn::Lanes(hn::ScalableTag<uint8_t>());
  const bool all_bf16 = shard.moment_format == MomentFormat::kBf16;
  if (shard.weight == shard.weight_out || shard.moment1 == shard.moment1_out) return false;
  if (all_bf16 && (shard.weight_dtype != DType::kBf16 || shard.gradient_dtype != DType::kBf16)) {
    return false;
  }
  // A narrow vector's half is less than what can be streamed.
  if (vector < 32) return false;
  const size_t moment_bytes = all_bf16 ? 2 : 4;
  const size_t half = all_bf16 ? vector : vector / 2;
  const bool split = shard.weight_dtype == DType::kBf16;
  return aligned(shard.weight_out, split ? 2 : 4, split ? half : vector) &&
         (!split || aligned(shard.residual_out, 2, half)) &&
         aligned(moments.out1, moment_bytes, vector) && aligned(moments.out2, moment_bytes, vector);
}

template <DType weight_dtype, DType gradient_dtype, MomentFormat format, bool streams>
void update_run(const Shard& shard, int64_t begin, int64_t end, const StepConstants& step,
                float decay, const Moments& moments) {
  using D = hn::ScalableTag<float>;
  const D d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = begin;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (weight_dtype == DType::kBf16 && gradient_dtype == DType::kBf16 &&
                format == MomentFormat::kBf16) {
    i = update_all_bf16<streams>(shard, begin, end, step, decay, moments);
  }
#endif
  // Of bf16 moments only what is left over by vectors of pairs comes here.
  constexpr bool kStreams = streams && format == MomentFormat::kF32;
  const Constants<D> constants(d, step, decay);
  for (; i + lanes <= end; i += lanes) {
    const int64_t k = i - moments.origin;
    const auto updated =
        update_vector(d, load_master<weight_dtype>(d, shard, i),
                      load_moment1<format>(d, moments, k), load_moment2<format>(d, moments, k),
                      load_as_float<gradient_dtype>(d, shard.gradient, i), constants);
    store_master<weight_dtype, kStreams>(d, updated.master, shard, i);
    store_moments<format, kStreams>(d, updated, moments, k);
  }
  if (i < end) update_rest<format>(shard, i, end, step, decay, moments);
}

/// Encodes a whole block from floats, in the elements' order.
inline void encode_int8_block(const float* moment1, const float* root2, const Int8Block& block) {
  using D = hn::ScalableTag<float>;
  const D d;
  const hn::RebindToSigned<D> di32;
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<uint8_t, D> d8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto largest1 = hn::Zero(di32);
  auto largest2 = hn::Zero(di32);
  for (int64_t k = 0; k < kMomentBlock; k += lanes) {
    largest1 = hn::Max(largest1, hn::BitCast(di32, hn::Abs(hn::Load(d, moment1 + k))));
    largest2 = hn::Max(largest2, hn::BitCast(di32, hn::Load(d, root2 + k)));
  }
  const auto largest = [&](hn::Vec<decltype(di32)> lane_largest) {
    return static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di32, lane_largest)));
  };
  *block.scale1_out = int8_scale(kInt8Shift1, largest(largest1));
  *block.scale2_out = int8_scale(kInt8Shift2, largest(largest2));
  const auto base1 = hn::Set(d32, int8_base(*block.scale1_out));
  const auto base2 = hn::Set(d32, int8_base(*block.scale2_out));
  for (int64_t k = 0; k < kMomentBlock; k += lanes) {
    const auto index = hn::Iota(d32, static_cast<uint32_t>(block.in_chunk + k));
    const auto random = rounding_bits(d32, index, block.key);
    const auto value1 = hn::Load(d, moment1 + k);
    const auto above1 = hn::BitCast(d32, hn::Add(hn::Abs(value1), hn::BitCast(d, base1)));
    const auto rounded1 = hn::Add(above1, hn::ShiftRight<32 - kInt8Shift1>(random));
    const auto code1 =
        hn::Sub(hn::ShiftRight<kInt8Shift1>(rounded1), hn::ShiftRight<kInt8Shift1>(base1));
    const auto sign1 = hn::And(hn::ShiftRight<24>(hn::BitCast(d32, value1)), hn::Set(d32, 0x80U));
    hn::StoreU(hn::TruncateTo(d8, hn::Or(code1, sign1)), d8, block.codes1_out + k);

    const auto above2 = hn::BitCast(d32, hn::Add(hn::Load(d, root2 + k), hn::BitCast(d, base2)));
    const auto rounded2 = hn::Add(above2, hn::And(random, hn::Set(d32, (1U << kInt8Shift2) - 1)));
    const auto code2 =
        hn::Sub(hn::ShiftRight<kInt8Shift2>(rounded2), hn::ShiftRight<kInt8Shift2>(base2));
    hn::StoreU(hn::TruncateTo(d8, hn::Max(code2, hn::Set(d32, 1U))), d8, block.codes2_out + k);
  }
}

template <DType weight_dtype, DType gradient_dtype>
void update_int8_chunk(const Shard& shard, int64_t begin, int64_t end,
                       const StepConstants& constants, RoundingKey key, SegmentCursor& segments) {
  const Int8Chunk at = int8_chunk(shard.count, begin / kChunkElements);
  const auto* in1 = static_cast<const uint8_t*>(shard.moment1);
  const auto* in2 = static_cast<const uint8_t*>(shard.moment2);
  auto* out1 = static_cast<uint8_t*>(shard.moment1_out);
  auto* out2 = static_cast<uint8_t*>(shard.moment2_out);

  int64_t first = begin;
  for (; first + kMomentBlock <= end; first += kMomentBlock) {
    const auto offset = static_cast<size_t>(first - begin);
    const size_t codes = at.codes_bytes + offset;
    const size_t scale = at.scales_bytes + offset / kMomentBlock;
    const Int8Block block{.codes1 = in1 + codes,
                          .codes2 = in2 + codes,
                          .codes1_out = out1 + codes,
                          .codes2_out = out2 + codes,
                          .scale1_out = out1 + scale,
                          .scale2_out = out2 + scale,
                          .base1 = int8_base(in1[scale]),
                          .base2 = int8_base(in2[scale]),
                          .key = key,
                          .first = first,
                          .in_chunk = first - begin};
    HWY_ALIGN float moment1[kMomentBlock];
    HWY_ALIGN float root2[kMomentBlock];
    bool encoded = false;
    segments.for_each_run(first, first + kMomentBlock, [&](int64_t from, int64_t to, float decay) {
#if HWY_TARGET != HWY_SCALAR
      if constexpr (weight_dtype == DType::kBf16 && gradient_dtype == DType::kBf16) {
        if (to - from == kMomentBlock) {
          update_int8_pairs(shard, constants, decay, block);
          encoded = true;
          return;
        }
      }
#endif
      const Moments moments{.in1 = block.codes1,
                            .in2 = block.codes2,
                            .out1 = moment1,
                            .out2 = root2,
                            .origin = first,
                            .key = key,
                            .base1 = block.base1,
                            .base2 = block.base2};
      update_run<weight_dtype, gradient_dtype, MomentFormat::kInt8, false>(
          shard, from, to, constants, decay, moments);
    });
    if (!encoded) encode_int8_block(moment1, root2, block);
  }
  if (first < end) update_blocks(shard, first, end, constants, segments);
}

template <DType weight_dtype, DType gradient_dtype>
void update_chunk_as(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                     SegmentCursor& segments) {
  const int64_t chunk = begin / kChunkElements;
  const RoundingKey key =
      rounding_key(shard.seed, shard.step, shard.first_chunk + static_cast<uint64_t>(chunk));
  if (shard.moment_format == MomentFormat::kInt8) {
    update_int8_chunk<weight_dtype, gradient_dtype>(shard, begin, end, constants, key, segments);
    return;
  }
  const Moments moments{.in1 = shard.moment1,
                        .in2 = shard.moment2,
                        .out1 = shard.moment1_out,
                        .out2 = shard.moment2_out,
                        .origin = 0,
                        .key = key,
                        .base1 = 0,
                        .base2 = 0};
  const auto run_as = [&]<MomentFormat format>() {
    bool streamed = false;
    segments.for_each_run(begin, end, [&](int64_t from, int64_t to, float decay) {
#if HWY_TARGET != HWY_SCALAR
      if (can_stream(shard, moments, from)) {
        update_run<weight_dtype, gradient_dtype, format, true>(shard, from, to, constants, decay,
                                                               moments);
        streamed = true;
        return;
      }
#endif
      update_run<weight_dtype, gradient_dtype, format, false>(shard, from, to, constants, decay,
                                                              moments);
    });
    // Such stores are not ordered with those by which threads tell each other that they are done.
    if (streamed) hwy::FlushStream();
  };
  if (shard.moment_format == MomentFormat::kF32) {
    run_as.template operator()<MomentFormat::kF32>();
  } else {
    run_as.template operator()<MomentFormat::kBf16>();
  }
}

/// update_blocks over [begin, end), which lie in one chunk, to the same bits.
inline void update_chunk_vectors(const Shard& shard, int64_t begin, int64_t end,
                                 const StepConstants& constants, SegmentCursor& segments) {
  constexpr DType kBf16 = DType::kBf16;
  constexpr DType kF32 = DType::kF32;
  const bool bf16_gradient = shard.gradient_dtype == kBf16;
  if (shard.weight_dtype == kBf16) {
    if (bf16_gradient) return update_chunk_as<kBf16, kBf16>(shard, begin, end, constants, segments);
    return update_chunk_as<kBf16, kF32>(shard, begin, end, constants, segments);
  }
  if (bf16_gradient) return update_chunk_as<kF32, kBf16>(shard, begin, end, constants, segments);
  return update_chunk_as<kF32, kF32>(shard, begin, end, constants, segments);
}

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // STRATA_CPU_ADAM_ADAM_INL_H_
