// The formats in which Adam's moments rest between steps, one element at a time: what every vector
// and device implementation must equal bit for bit. docs/adam.md says why they are as they are.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/bf16.h"
#include "base/random.h"

namespace strata::cpu_adam {

// Constants go to std::min and std::max as copies: in a CUDA kernel a reference to one leads
// nowhere, and the compiler makes a trap of it without a word.

/// kF32 is exact. The others round stochastically: unbiased, and the same for the same (seed, step,
/// element), whatever the thread count.
enum class MomentFormat : uint8_t {
  kF32,
  kBf16,
  /// Eight-bit floating-point codes with one power-of-two scale for each block of kMomentBlock
  /// elements: moment1 as sign, 4 bits of exponent and 3 of fraction; of moment2 the root, as 4
  /// bits of exponent and 4 of fraction.
  kInt8,
};

inline constexpr std::array kMomentFormats{MomentFormat::kF32, MomentFormat::kBf16,
                                           MomentFormat::kInt8};
[[nodiscard]] constexpr std::string_view name_of(MomentFormat format) noexcept {
  return format == MomentFormat::kF32 ? "fp32" : format == MomentFormat::kBf16 ? "bf16" : "int8";
}

/// Work and random numbers come in chunks of so many elements.
inline constexpr int64_t kChunkElements = 32768;
inline constexpr int64_t kMomentBlock = 256;
static_assert(kChunkElements % kMomentBlock == 0);

/// Bytes of one moment of `count` elements. Each chunk is contiguous; in kInt8 its codes come
/// first, padded to whole blocks, then a scale of one byte for each block, padded to 64 bytes in
/// all.
[[nodiscard]] constexpr size_t moment_bytes(MomentFormat format, int64_t count) noexcept {
  if (format == MomentFormat::kF32) return static_cast<size_t>(count) * 4;
  if (format == MomentFormat::kBf16) return static_cast<size_t>(count) * 2;
  const auto chunk_bytes = [](int64_t elements) {
    const int64_t blocks = (elements + kMomentBlock - 1) / kMomentBlock;
    return (blocks * (kMomentBlock + 1) + 63) / 64 * 64;
  };
  const int64_t chunks = count / kChunkElements;
  return static_cast<size_t>(chunks * chunk_bytes(kChunkElements) +
                             chunk_bytes(count % kChunkElements));
}

/// Where in a kInt8 moment a chunk's codes and scales begin. `count` is the whole moment's.
struct Int8Chunk {
  size_t codes_bytes, scales_bytes;
};
[[nodiscard]] constexpr Int8Chunk int8_chunk(int64_t count, int64_t chunk) noexcept {
  const int64_t elements = std::min(int64_t{kChunkElements}, count - chunk * kChunkElements);
  const size_t begin = moment_bytes(MomentFormat::kInt8, chunk * kChunkElements);
  const int64_t blocks = (elements + kMomentBlock - 1) / kMomentBlock;
  return {begin, begin + static_cast<size_t>(blocks * kMomentBlock)};
}

/// The randomness of one chunk in one step.
struct RoundingKey {
  uint32_t first, second;
};

/// `chunk` counts over all parameters, so that no two share their random numbers.
[[nodiscard]] constexpr RoundingKey rounding_key(uint64_t seed, int64_t step,
                                                 uint64_t chunk) noexcept {
  const auto words = philox4x32(seed, static_cast<uint64_t>(step), chunk);
  return {words[0], words[1]};
}

/// 32 random bits of element `index` of a chunk: a Weyl sequence from the first key, through one
/// multiplication between two xor-shifts (a shortened finalizer of MurmurHash3), and the second
/// key. moment1 rounds by the uppermost of them, moment2 by the lowest.
[[nodiscard]] constexpr uint32_t rounding_bits(RoundingKey key, uint32_t index) noexcept {
  uint32_t x = index * 0x9e3779b9U + key.first;
  x ^= x >> 16;
  x *= 0x85ebca6bU;
  return x ^ (x >> 15) ^ key.second;
}

/// Random bits with which all roundings are to nearest, halves away from zero.
inline constexpr uint32_t kNearest1 = 0x80000000U;  // of moment1
inline constexpr uint32_t kNearest2Bf16 = 0x8000;   // of moment2
inline constexpr uint32_t kNearest2Int8 = 0x40000;

[[nodiscard]] constexpr uint16_t to_bf16_moment1(float value, uint32_t random) noexcept {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + (random >> 16)) >> 16);
}
[[nodiscard]] constexpr uint16_t to_bf16_moment2(float value, uint32_t random) noexcept {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + (random & 0xffffU)) >> 16);
}

/// A kInt8 code c stands for the magnitude f(c) - f(0), where f(c) is the float whose bits are the
/// scale's base + (c << shift): a fraction of 23 - shift bits above an exponent, which becomes
/// linear towards zero.
inline constexpr int kInt8Shift1 = 20;  // moment1: 7 bits of code beside the sign
inline constexpr int kInt8Shift2 = 19;  // the root of moment2: 8 bits of code
/// Binades from the largest code down to f(0).
inline constexpr int kInt8Binades = 15;
/// The smallest scale: above it, no code's magnitude or square is subnormal.
inline constexpr uint32_t kInt8SmallestScale = 83;

/// The scale of a block whose largest magnitude, below 2^126, has these fp32 bits: the biased
/// exponent of its largest code, such that the magnitude plus f(0) does not exceed it.
[[nodiscard]] constexpr uint8_t int8_scale(int shift, uint32_t largest_bits) noexcept {
  constexpr uint32_t kTwiceF0 = 1U
                                << (23 - kInt8Binades + 1);  // in units of the largest's last place
  return static_cast<uint8_t>(
      std::max((largest_bits + (1U << shift) + kTwiceF0) >> 23, uint32_t{kInt8SmallestScale}));
}

/// The bits of f(0). The scale 0 of cleared memory is the smallest.
[[nodiscard]] constexpr uint32_t int8_base(uint8_t scale) noexcept {
  return (std::max(uint32_t{scale}, uint32_t{kInt8SmallestScale}) - uint32_t{kInt8Binades}) << 23;
}

[[nodiscard]] constexpr uint8_t encode_moment1(float value, uint32_t base,
                                               uint32_t random) noexcept {
  const auto bits = std::bit_cast<uint32_t>(value);
  const float above = std::bit_cast<float>(bits & 0x7fffffffU) + std::bit_cast<float>(base);
  const uint32_t rounded = std::bit_cast<uint32_t>(above) + (random >> (32 - kInt8Shift1));
  const uint32_t code = (rounded >> kInt8Shift1) - (base >> kInt8Shift1);
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80U));
}

[[nodiscard]] constexpr float decode_moment1(uint8_t code, uint32_t base) noexcept {
  const uint32_t bits = base + ((code & 0x7fU) << kInt8Shift1);
  const float magnitude = std::bit_cast<float>(bits) - std::bit_cast<float>(base);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}

/// `root` is the root of moment2. It never becomes code 0: a vanished denominator would make a huge
/// update of a tiny moment1.
[[nodiscard]] constexpr uint8_t encode_moment2(float root, uint32_t base,
                                               uint32_t random) noexcept {
  const float above = root + std::bit_cast<float>(base);
  const uint32_t rounded = std::bit_cast<uint32_t>(above) + (random & ((1U << kInt8Shift2) - 1));
  return static_cast<uint8_t>(std::max((rounded >> kInt8Shift2) - (base >> kInt8Shift2), 1U));
}

[[nodiscard]] constexpr float decode_moment2(uint8_t code, uint32_t base) noexcept {
  const uint32_t bits = base + (uint32_t{code} << kInt8Shift2);
  const float root = std::bit_cast<float>(bits) - std::bit_cast<float>(base);
  return root * root;
}

}  // namespace strata::cpu_adam
