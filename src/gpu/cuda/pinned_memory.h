// Host memory that the GPU copies from and to by itself.
#pragma once

#include <cstddef>
#include <utility>

#include "gpu/mapped_memory.h"

namespace strata::gpu::cuda {

struct RegistrationTraits {
  using Type = void*;
  static constexpr Type invalid() noexcept { return nullptr; }
  static void close(Type address) noexcept;
};

/// Exact, zeroed and page-aligned; registered for all devices of the process. Must be freed before
/// its device goes, and after all copies of it have ended.
class PinnedMemory {
 public:
  /// Blocks while all its pages are brought into memory; null for size 0. Where they cannot be
  /// registered, tries out how much can (seconds for large memory) and throws an Error of kind
  /// kDoesNotFit that says so and what may limit it.
  [[nodiscard]] static PinnedMemory allocate(size_t size_bytes);

  [[nodiscard]] void* address() const noexcept { return mapping_.get().address; }

 private:
  PinnedMemory(UniqueMapping mapping, UniqueHandle<RegistrationTraits> registration)
      : mapping_(std::move(mapping)), registration_(std::move(registration)) {}

  UniqueMapping mapping_;
  UniqueHandle<RegistrationTraits> registration_;  // ends before the mapping
};

}  // namespace strata::gpu::cuda
