#include "cpu_adam/definition.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace strata::cpu_adam {
namespace {

using Block = std::array<float, kMomentBlock>;

float load_gradient(const Shard& shard, int64_t i) noexcept {
  if (shard.gradient_dtype == DType::kF32) return static_cast<const float*>(shard.gradient)[i];
  return to_float(Bf16{static_cast<const uint16_t*>(shard.gradient)[i]});
}

float load_master(const Shard& shard, int64_t i) noexcept {
  if (shard.weight_dtype == DType::kF32) return static_cast<const float*>(shard.weight)[i];
  const Bf16 weight{static_cast<const uint16_t*>(shard.weight)[i]};
  return join_master({weight, shard.residual[i]});
}

void store_master(const Shard& shard, int64_t i, float master) noexcept {
  if (shard.weight_dtype == DType::kF32) {
    static_cast<float*>(shard.weight_out)[i] = master;
    return;
  }
  const SplitMaster split = split_master(master);
  static_cast<uint16_t*>(shard.weight_out)[i] = split.weight.bits;
  shard.residual_out[i] = split.residual;
}

RoundingKey key_of(const Shard& shard, int64_t chunk) noexcept {
  return rounding_key(shard.seed, shard.step, shard.first_chunk + static_cast<uint64_t>(chunk));
}

}  // namespace

void load_elements(bool second, int64_t count, MomentFormat format, const void* moment,
                   int64_t begin, std::span<float> out) noexcept {
  const auto decode = [second](uint8_t code, uint32_t base) {
    return second ? decode_moment2(code, base) : decode_moment1(code, base);
  };
  const auto* bytes = static_cast<const uint8_t*>(moment);
  for (size_t k = 0; k < out.size(); ++k) {
    const int64_t i = begin + static_cast<int64_t>(k);
    switch (format) {
      case MomentFormat::kF32:
        out[k] = static_cast<const float*>(moment)[i];
        break;
      case MomentFormat::kBf16:
        out[k] = to_float(Bf16{static_cast<const uint16_t*>(moment)[i]});
        break;
      case MomentFormat::kInt8: {
        const Int8Chunk chunk = int8_chunk(count, i / kChunkElements);
        const auto in_chunk = static_cast<size_t>(i % kChunkElements);
        const uint8_t scale = bytes[chunk.scales_bytes + in_chunk / kMomentBlock];
        out[k] = decode(bytes[chunk.codes_bytes + in_chunk], int8_base(scale));
        break;
      }
    }
  }
}

void store_block(bool second, int64_t count, MomentFormat format, void* moment, int64_t begin,
                 std::span<const float> values, const RoundingKey* key) noexcept {
  const auto random = [&](size_t k) {
    if (key == nullptr) {
      if (!second) return kNearest1;
      return format == MomentFormat::kBf16 ? kNearest2Bf16 : kNearest2Int8;
    }
    return rounding_bits(*key,
                         static_cast<uint32_t>(begin % kChunkElements) + static_cast<uint32_t>(k));
  };
  if (format == MomentFormat::kF32) {
    std::copy(values.begin(), values.end(), static_cast<float*>(moment) + begin);
    return;
  }
  if (format == MomentFormat::kBf16) {
    auto* out = static_cast<uint16_t*>(moment) + begin;
    for (size_t k = 0; k < values.size(); ++k) {
      out[k] =
          second ? to_bf16_moment2(values[k], random(k)) : to_bf16_moment1(values[k], random(k));
    }
    return;
  }
  uint32_t largest = 0;
  Block magnitudes;
  for (size_t k = 0; k < values.size(); ++k) {
    magnitudes[k] = second ? std::sqrt(values[k]) : values[k];
    largest = std::max(largest, std::bit_cast<uint32_t>(magnitudes[k]) & 0x7fffffffU);
  }
  uint8_t scale = int8_scale(second ? kInt8Shift2 : kInt8Shift1, largest);
  if (key == nullptr && scale > kInt8SmallestScale) {
    // A largest value that is the last code of the next smaller scale came from there: only with
    // that scale are all codes what they were.
    const uint32_t smaller = int8_base(static_cast<uint8_t>(scale - 1));
    const float last =
        second ? std::sqrt(decode_moment2(0xff, smaller)) : decode_moment1(0x7f, smaller);
    if (std::bit_cast<uint32_t>(last) == largest) --scale;
  }
  const uint32_t base = int8_base(scale);
  const Int8Chunk chunk = int8_chunk(count, begin / kChunkElements);
  const auto in_chunk = static_cast<size_t>(begin % kChunkElements);
  auto* bytes = static_cast<uint8_t*>(moment);
  bytes[chunk.scales_bytes + in_chunk / kMomentBlock] = scale;
  uint8_t* codes = bytes + chunk.codes_bytes + in_chunk;
  for (size_t k = 0; k < values.size(); ++k) {
    codes[k] = second ? encode_moment2(magnitudes[k], base, random(k))
                      : encode_moment1(magnitudes[k], base, random(k));
  }
}

void update_elements(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                     float decay, float* moment1, float* moment2) noexcept {
  for (int64_t i = begin; i < end; ++i) {
    float& m = moment1[i - begin];
    float& v = moment2[i - begin];
    const Element updated =
        update_element({load_master(shard, i), m, v}, load_gradient(shard, i), constants, decay);
    store_master(shard, i, updated.master);
    m = updated.moment1;
    v = updated.moment2;
  }
}

void update_blocks(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                   SegmentCursor& segments) noexcept {
  const MomentFormat format = shard.moment_format;
  const RoundingKey key = key_of(shard, begin / kChunkElements);
  for (int64_t block = begin; block < end; block += kMomentBlock) {
    const int64_t block_end = std::min(block + kMomentBlock, end);
    const auto size = static_cast<size_t>(block_end - block);
    Block m;
    Block v;
    load_elements(false, shard.count, format, shard.moment1, block, std::span(m).first(size));
    load_elements(true, shard.count, format, shard.moment2, block, std::span(v).first(size));
    segments.for_each_run(block, block_end, [&](int64_t run_begin, int64_t run_end, float decay) {
      update_elements(shard, run_begin, run_end, constants, decay, &m[run_begin - block],
                      &v[run_begin - block]);
    });
    store_block(false, shard.count, format, shard.moment1_out, block, std::span(m).first(size),
                &key);
    store_block(true, shard.count, format, shard.moment2_out, block, std::span(v).first(size),
                &key);
  }
}

}  // namespace strata::cpu_adam
