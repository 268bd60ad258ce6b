#include "base/bytes.h"

#include <fmt/format.h>

#include <array>
#include <cstdint>
#include <utility>

#include "base/error.h"

namespace strata {

size_t parse_bytes(std::string_view text) {
  __extension__ using Wide = unsigned __int128;
  constexpr uint64_t kLargest = INT64_MAX;
  constexpr size_t kMostDigits = 18;  // of a fraction: their value times any factor fits in Wide
  constexpr std::array<std::pair<std::string_view, uint64_t>, 13> kUnits{{
      {"", 1},
      {"B", 1},
      {"KiB", uint64_t{1} << 10},
      {"MiB", uint64_t{1} << 20},
      {"GiB", uint64_t{1} << 30},
      {"TiB", uint64_t{1} << 40},
      {"PiB", uint64_t{1} << 50},
      {"KB", 1'000},
      {"kB", 1'000},
      {"MB", 1'000'000},
      {"GB", 1'000'000'000},
      {"TB", 1'000'000'000'000},
      {"PB", 1'000'000'000'000'000},
  }};
  std::string_view rest = text;
  // Takes the leading digits off `rest` and appends them to `value`; gives their number.
  const auto take_digits = [&rest](Wide& value) {
    size_t count = 0;
    for (; count < rest.size() && count <= kMostDigits && rest[count] >= '0' && rest[count] <= '9';
         ++count) {
      value = value * 10 + static_cast<unsigned>(rest[count] - '0');
    }
    rest.remove_prefix(count);
    return count;
  };
  Wide whole = 0;
  Wide fraction = 0;
  Wide fraction_unit = 1;
  bool valid = take_digits(whole) > 0;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    const size_t digits = take_digits(fraction);
    for (size_t i = 0; i < digits; ++i) fraction_unit *= 10;
    valid = valid && digits > 0 && digits <= kMostDigits;
  }
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  for (const auto& [name, factor] : kUnits) {
    if (!valid || rest != name) continue;
    const Wide bytes = whole * factor + fraction * factor / fraction_unit;
    if (bytes <= kLargest) return static_cast<size_t>(bytes);
  }
  throw usage_error(fmt::format(
      "'{}' is not an amount of memory; write a number and a unit, such as 512MiB or 24GiB", text));
}

std::string format_bytes(size_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  double amount = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (amount >= 1023.95 && unit + 1 < kUnits.size()) {
    amount /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", amount, kUnits[unit]);
}

}  // namespace strata
