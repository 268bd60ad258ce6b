// One direction of a connection between host and device memory, with a speed limit.
#pragma once

#include <chrono>
#include <cstddef>
#include <mutex>

namespace strata::gpu::host {

/// Thread-safe; copies that are begun at the same time share the link first come, first served.
class HostLink {
 public:
  /// 0: no limit. Throws a usage error for other values below 1 and values that are not finite.
  explicit HostLink(double bytes_per_second);

  /// Blocks until copied, and no less than size / speed after both the call and the end of the
  /// copies begun before. Sleeps where it must wait; the data arrives little by little.
  void copy(void* destination, const void* source, size_t size_bytes);

 private:
  using Clock = std::chrono::steady_clock;

  [[nodiscard]] Clock::duration duration_of(size_t size_bytes) const;

  double bytes_per_second_;
  size_t piece_bytes_;
  std::mutex mutex_;
  Clock::time_point free_from_{};  // when the link has carried all that was begun
};

}  // namespace strata::gpu::host
