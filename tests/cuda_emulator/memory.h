// Memory with guards: filled with 0xff (a NaN in every float format), fenced by zones that
// AddressSanitizer knows and that are compared without it, then by pages that fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace strata::gpu::cuda::emulator {

class GuardedMemory {
 public:
  /// Memory whose address is `offset_bytes` past a page's begin. Throws std::bad_alloc.
  GuardedMemory(size_t size_bytes, size_t offset_bytes);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }
  /// Makes the contents NaN again.
  void fill_with_pattern();
  /// Whether nobody wrote into the zones.
  [[nodiscard]] bool intact() const;

 private:
  std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::byte* zone_begin_ = nullptr;
  std::byte* zone_end_ = nullptr;
  std::byte* data_ = nullptr;
  size_t size_bytes_ = 0;
};

struct MemoryRange {
  const std::byte* begin;
  size_t size_bytes;
};

/// What kernels may touch at one moment, ordered by address.
class AccessibleRanges {
 public:
  explicit AccessibleRanges(std::vector<MemoryRange> ranges) : ranges_(std::move(ranges)) {}
  /// The range that holds these bytes, or `kNone`. `guess` is looked at first.
  static constexpr size_t kNone = SIZE_MAX;
  [[nodiscard]] size_t find(const void* pointer, size_t size_bytes, size_t guess = 0) const;

 private:
  std::vector<MemoryRange> ranges_;
};

/// Ranges of which none overlaps another.
class RangeMap {
 public:
  enum class Overlap : uint8_t { kNone, kInside, kPartial };

  void add(const void* begin, size_t size_bytes);
  /// Removes the range that begins there; 0 when there is none.
  size_t remove(const void* begin);
  /// How the bytes lie to the ranges; kInside: within a single one.
  [[nodiscard]] Overlap overlap(const void* begin, size_t size_bytes) const;
  [[nodiscard]] const std::map<uintptr_t, size_t>& ranges() const { return ranges_; }

 private:
  std::map<uintptr_t, size_t> ranges_;
};

}  // namespace strata::gpu::cuda::emulator
