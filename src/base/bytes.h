// Amounts of memory: alignment, and the text form "24GiB".
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace strata {

inline constexpr size_t kKiB = size_t{1} << 10;
inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;

/// Rounds `value` up to a multiple of `alignment` (a power of two).
[[nodiscard]] constexpr size_t align_up(size_t value, size_t alignment) noexcept {
  return (value + alignment - 1) & ~(alignment - 1);
}

/// Reads "512MiB", "24GiB", "1.5GiB", "800MB" (decimal), "4096" or "4096B". Fractions are rounded
/// down to whole bytes. Throws a usage error that quotes the text for anything else, for negative
/// amounts and for amounts over 2^63 - 1.
[[nodiscard]] size_t parse_bytes(std::string_view text);

/// "24.0 GiB", "1.5 MiB", "312 B": binary units, one decimal.
[[nodiscard]] std::string format_bytes(size_t bytes);

}  // namespace strata
