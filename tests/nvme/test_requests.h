// What tests of drives share: aligned memory, patterns, and waiting for many requests.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "nvme/aligned_buffer.h"
#include "nvme/drive.h"

namespace strata::nvme {

/// Zeroed memory as every drive takes it.
class PageBuffer {
 public:
  explicit PageBuffer(size_t size_bytes) : buffer_(size_bytes, Drive::kMinAlignmentBytes) {}
  [[nodiscard]] std::byte* data() const noexcept { return buffer_.data(); }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return buffer_.bytes(); }
  [[nodiscard]] std::span<std::byte> span(size_t offset, size_t size) const {
    return span().subspan(offset, size);
  }

 private:
  AlignedBuffer buffer_;
};

inline void fill_random(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (size_t at = 0; at < bytes.size(); at += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + at, &word, std::min(sizeof word, bytes.size() - at));
  }
}

inline bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

/// Gathers results from a drive's thread.
class Results {
 public:
  [[nodiscard]] CompletionSink sink() noexcept { return {&Results::keep, this}; }

  /// Blocks until there are this many.
  void wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    grown_.wait(lock, [&] { return results_.size() >= count; });
  }
  [[nodiscard]] std::vector<Result> all() const {
    const std::lock_guard lock(mutex_);
    return results_;
  }
  [[nodiscard]] size_t count() const { return all().size(); }
  [[nodiscard]] std::map<uint64_t, int> errors_by_tag() const {
    std::map<uint64_t, int> errors;
    for (const Result& result : all()) errors[result.tag] = result.error;
    return errors;
  }

 private:
  static void keep(void* context, const Result& result) noexcept {
    auto* results = static_cast<Results*>(context);
    const std::lock_guard lock(results->mutex_);
    results->results_.push_back(result);
    results->grown_.notify_all();
  }

  mutable std::mutex mutex_;
  std::condition_variable grown_;
  std::vector<Result> results_;
};

}  // namespace strata::nvme
