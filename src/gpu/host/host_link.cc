#include "gpu/host/host_link.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"

namespace strata::gpu::host {
namespace {

double checked_speed(double bytes_per_second) {
  if (bytes_per_second == 0 || (bytes_per_second >= 1 && std::isfinite(bytes_per_second))) {
    return bytes_per_second;
  }
  throw usage_error(
      "the speed limit of a link must be 0 (none) or at least 1 byte per second, not " +
      std::to_string(bytes_per_second));
}

/// A millisecond's worth, so that the sleeps are long against the cost of waking up.
size_t piece_bytes(double bytes_per_second) {
  return static_cast<size_t>(std::clamp(bytes_per_second / 1000, 4.0 * kKiB, 1.0 * kMiB));
}

}  // namespace

HostLink::HostLink(double bytes_per_second)
    : bytes_per_second_(checked_speed(bytes_per_second)),
      piece_bytes_(piece_bytes(bytes_per_second)) {}

HostLink::Clock::duration HostLink::duration_of(size_t size_bytes) const {
  const std::chrono::duration<double> seconds(static_cast<double>(size_bytes) / bytes_per_second_);
  return std::chrono::ceil<Clock::duration>(seconds);
}

void HostLink::copy(void* destination, const void* source, size_t size_bytes) {
  if (size_bytes == 0) return;
  if (bytes_per_second_ == 0) {
    std::memcpy(destination, source, size_bytes);
    return;
  }
  Clock::time_point begin;
  {
    const std::lock_guard lock(mutex_);
    begin = std::max(Clock::now(), free_from_);
    free_from_ = begin + duration_of(size_bytes);
  }
  std::this_thread::sleep_until(begin);
  // Each piece has its time from the beginning of the copy: waking late once delays nothing later.
  for (size_t done = 0; done < size_bytes;) {
    const size_t piece = std::min(piece_bytes_, size_bytes - done);
    std::memcpy(static_cast<std::byte*>(destination) + done,
                static_cast<const std::byte*>(source) + done, piece);
    done += piece;
    std::this_thread::sleep_until(begin + duration_of(done));
  }
}

}  // namespace strata::gpu::host
