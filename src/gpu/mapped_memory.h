// Host memory of arenas: mapped exactly, zeroed, and given back as a whole.
#pragma once

#include <cstddef>

#include "base/unique_handle.h"

namespace strata::gpu {

struct Mapping {
  void* address = nullptr;
  size_t size_bytes = 0;  // whole pages
  friend bool operator==(const Mapping&, const Mapping&) = default;
};

struct MappingTraits {
  using Type = Mapping;
  static constexpr Mapping invalid() noexcept { return {}; }
  static void close(const Mapping& mapping) noexcept;
};
using UniqueMapping = UniqueHandle<MappingTraits>;

/// Page-aligned zeroed memory that takes up room only where it is touched; null for size 0. Throws
/// an Error of kind kDoesNotFit that names the `purpose` ("host").
[[nodiscard]] UniqueMapping map_memory(size_t size_bytes, const char* purpose);

}  // namespace strata::gpu
