// The files of profiles/, built into the library.
#pragma once

#include <span>
#include <string_view>

namespace strata::pipeline {

struct ShippedProfile {
  std::string_view name;
  std::string_view json;
};

/// In alphabetical order.
[[nodiscard]] std::span<const ShippedProfile> shipped_profile_files() noexcept;

}  // namespace strata::pipeline
