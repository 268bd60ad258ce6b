// bfloat16 and the split fp32 master.
#pragma once

#include <bit>
#include <cstdint>

namespace strata {

/// The upper 16 bits of an IEEE-754 binary32 value. Storage only: arithmetic is done in float.
struct Bf16 {
  uint16_t bits;
  friend constexpr bool operator==(Bf16, Bf16) = default;
};

[[nodiscard]] constexpr float to_float(Bf16 value) noexcept {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even; every NaN becomes a quiet NaN of the same sign.
[[nodiscard]] constexpr Bf16 to_bf16(float value) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return {static_cast<uint16_t>((bits >> 16) | 0x40U)};
  return {static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16)};
}

/// An fp32 master parameter as the bf16 weight that compute reads and the 16 bits that complete it.
struct SplitMaster {
  Bf16 weight;
  uint16_t residual;
  friend constexpr bool operator==(SplitMaster, SplitMaster) = default;
};

/// `weight` is the upper half of `master` rounded half away from zero (an integer addition of
/// 0x8000, modulo 2^32), `residual` its lower half as it is. Lossless for all 2^32 bit patterns.
/// Finite values of at least 0x7f7f8000 round to an infinite weight, as any rounding would.
[[nodiscard]] constexpr SplitMaster split_master(float master) noexcept {
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  return {{static_cast<uint16_t>((bits + 0x8000U) >> 16)}, static_cast<uint16_t>(bits & 0xffffU)};
}

/// The inverse of split_master: a residual with its top bit set says that the weight was rounded
/// up.
[[nodiscard]] constexpr float join_master(SplitMaster split) noexcept {
  const uint32_t upper = split.weight.bits - static_cast<uint32_t>(split.residual >> 15);
  return std::bit_cast<float>((upper << 16) | split.residual);
}

}  // namespace strata
