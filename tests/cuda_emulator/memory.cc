#include "cuda_emulator/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>

#include "cuda_emulator/fiber.h"

namespace strata::gpu::cuda::emulator {

namespace {

constexpr int kPattern = 0xff;
constexpr size_t kZoneBytes = 4096;
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kZonesArePoisoned = true;  // They cannot even be read.
#else
constexpr bool kZonesArePoisoned = false;
#endif

bool all_pattern(const std::byte* begin, const std::byte* end) {
  const auto size = static_cast<size_t>(end - begin);
  return size == 0 ||
         (*begin == std::byte{kPattern} && std::memcmp(begin, begin + 1, size - 1) == 0);
}

}  // namespace

GuardedMemory::GuardedMemory(size_t size_bytes, size_t offset_bytes) : size_bytes_(size_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = kZoneBytes + offset_bytes;
  const size_t usable = (before + size_bytes + kZoneBytes + page - 1) / page * page;
  mapping_bytes_ = usable + 2 * page;
  void* mapping =
      mmap(nullptr, mapping_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  zone_begin_ = mapping_ + page;
  zone_end_ = zone_begin_ + usable;
  data_ = zone_begin_ + before;
  if (mprotect(zone_begin_, usable, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapping_, mapping_bytes_);
    throw std::bad_alloc();
  }
  std::memset(zone_begin_, kPattern, usable);
  poison(zone_begin_, before);
  poison(data_ + size_bytes, static_cast<size_t>(zone_end_ - data_) - size_bytes);
}

GuardedMemory::~GuardedMemory() {
  unpoison(zone_begin_, static_cast<size_t>(zone_end_ - zone_begin_));
  munmap(mapping_, mapping_bytes_);
}

void GuardedMemory::fill_with_pattern() { std::memset(data_, kPattern, size_bytes_); }

bool GuardedMemory::intact() const {
  return kZonesArePoisoned ||
         (all_pattern(zone_begin_, data_) && all_pattern(data_ + size_bytes_, zone_end_));
}

size_t AccessibleRanges::find(const void* pointer, size_t size_bytes, size_t guess) const {
  const auto* begin = static_cast<const std::byte*>(pointer);
  const auto holds = [&](const MemoryRange& range) {
    return begin >= range.begin && size_bytes <= range.size_bytes &&
           static_cast<size_t>(begin - range.begin) <= range.size_bytes - size_bytes;
  };
  if (guess < ranges_.size() && holds(ranges_[guess])) return guess;
  auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), begin,
      [](const std::byte* address, const MemoryRange& range) { return address < range.begin; });
  if (after == ranges_.begin() || !holds(*--after)) return kNone;
  return static_cast<size_t>(after - ranges_.begin());
}

void RangeMap::add(const void* begin, size_t size_bytes) {
  ranges_.emplace(reinterpret_cast<uintptr_t>(begin), size_bytes);
}

size_t RangeMap::remove(const void* begin) {
  const auto found = ranges_.find(reinterpret_cast<uintptr_t>(begin));
  if (found == ranges_.end()) return 0;
  const size_t size_bytes = found->second;
  ranges_.erase(found);
  return size_bytes;
}

RangeMap::Overlap RangeMap::overlap(const void* begin, size_t size_bytes) const {
  const auto first = reinterpret_cast<uintptr_t>(begin);
  auto after = ranges_.upper_bound(first);
  if (after != ranges_.begin()) {
    const auto [range, range_bytes] = *std::prev(after);
    if (first - range < range_bytes) {
      return size_bytes <= range_bytes - (first - range) ? Overlap::kInside : Overlap::kPartial;
    }
  }
  return after != ranges_.end() && after->first - first < size_bytes ? Overlap::kPartial
                                                                     : Overlap::kNone;
}

}  // namespace strata::gpu::cuda::emulator
