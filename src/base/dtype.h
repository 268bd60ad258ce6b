// Element types of tensors in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace strata {

enum class DType : uint8_t { kBf16, kF32 };

[[nodiscard]] constexpr size_t size_of(DType dtype) noexcept {
  return dtype == DType::kBf16 ? 2 : 4;
}

[[nodiscard]] constexpr std::string_view name_of(DType dtype) noexcept {
  return dtype == DType::kBf16 ? "bf16" : "fp32";
}

}  // namespace strata
