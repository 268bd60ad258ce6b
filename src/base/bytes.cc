#include "base/bytes.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "base/error.h"

namespace strata {

size_t parse_bytes(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, double>, 13> kUnits{{{"", 1},
                                                                        {"B", 1},
                                                                        {"KiB", 0x1p10},
                                                                        {"MiB", 0x1p20},
                                                                        {"GiB", 0x1p30},
                                                                        {"TiB", 0x1p40},
                                                                        {"KB", 1e3},
                                                                        {"kB", 1e3},
                                                                        {"MB", 1e6},
                                                                        {"GB", 1e9},
                                                                        {"TB", 1e12},
                                                                        {"PiB", 0x1p50},
                                                                        {"PB", 1e15}}};
  double amount = 0;
  const auto [end, code] =
      std::from_chars(text.data(), text.data() + text.size(), amount, std::chars_format::fixed);
  std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  if (code == std::errc{} && std::isfinite(amount) && amount >= 0) {
    for (const auto& [name, factor] : kUnits) {
      if (unit == name && amount * factor < 0x1p63) return static_cast<size_t>(amount * factor);
    }
  }
  throw usage_error(fmt::format(
      "'{}' is not an amount of memory; write a number and a unit, such as 512MiB or 24GiB", text));
}

std::string format_bytes(size_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  double amount = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (amount >= 1024 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", amount, kUnits[unit]);
}

}  // namespace strata
