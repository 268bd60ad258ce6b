// Counter-based random numbers: a value depends on (seed, stream, counter) alone, so results do
// not depend on thread count or order, and the state to save is one number.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace strata {

/// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): four
/// 32-bit words from a 64-bit key and a 128-bit counter.
[[nodiscard]] constexpr std::array<uint32_t, 4> philox4x32(uint64_t key, uint64_t counter_high,
                                                           uint64_t counter_low) noexcept {
  std::array<uint32_t, 4> c{
      static_cast<uint32_t>(counter_low), static_cast<uint32_t>(counter_low >> 32),
      static_cast<uint32_t>(counter_high), static_cast<uint32_t>(counter_high >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53U} * c[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57U} * c[2];
    c = {static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(product0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

/// A sequence of random numbers at (seed, stream), from `counter` on.
class CounterRandom {
 public:
  CounterRandom(uint64_t seed, uint64_t stream, uint64_t counter = 0) noexcept
      : seed_(seed), stream_(stream), counter_(counter) {}

  [[nodiscard]] uint64_t counter() const noexcept { return counter_; }
  [[nodiscard]] uint64_t next_u64() noexcept {
    const auto words = philox4x32(seed_, stream_, counter_++);
    return (uint64_t{words[1]} << 32) | words[0];
  }
  /// Uniform in [0, 1), 53 bits.
  [[nodiscard]] double next_uniform() noexcept {
    return static_cast<double>(next_u64() >> 11) * 0x1p-53;
  }
  /// Uniform in [0, bound) without bias that matters: the 128-bit product of Lemire (2019).
  [[nodiscard]] uint64_t next_below(uint64_t bound) noexcept {
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((Wide{next_u64()} * bound) >> 64);
  }
  /// Standard normal (Box and Muller 1958), one value for each counter.
  [[nodiscard]] double next_normal() noexcept {
    const auto words = philox4x32(seed_, stream_, counter_++);
    const double u =
        (static_cast<double>((uint64_t{words[1]} << 32 | words[0]) >> 11) + 1) * 0x1p-53;
    const double v = static_cast<double>((uint64_t{words[3]} << 32 | words[2]) >> 11) * 0x1p-53;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
  }

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t counter_;
};

}  // namespace strata
