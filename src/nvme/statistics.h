// What a drive counts about itself. All numbers only grow while a drive is open: what happened in a
// step is the difference of two snapshots.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace strata::nvme {

/// What bytes are for; an index into DriveStatistics.
enum class Traffic : uint8_t {
  kWeight,
  kResidual,
  kMoment1,
  kMoment2,
  kGradient,
  kBoundary,
  kOther
};
inline constexpr size_t kTrafficKinds = 7;

/// Durations in buckets that are a eighth of an octave wide, 1 us and below in the first: a
/// percentile is at most 12.5% above the true one.
class LatencyHistogram {
 public:
  static constexpr size_t kBuckets = 256;  // up to over an hour; longer ones count in the last

  [[nodiscard]] static size_t bucket_of(uint64_t nanoseconds) noexcept;
  /// The largest duration that belongs to the bucket, in seconds.
  [[nodiscard]] static double upper_bound_s(size_t bucket) noexcept;

  [[nodiscard]] uint64_t count() const noexcept;
  /// The duration that `quantile` (0 to 1) of all stay within; 0 where there are none.
  [[nodiscard]] double percentile_s(double quantile) const noexcept;
  [[nodiscard]] double max_s() const noexcept { return percentile_s(1); }
  /// What came after the earlier snapshot of the same histogram.
  [[nodiscard]] LatencyHistogram since(const LatencyHistogram& earlier) const noexcept;

  std::array<uint64_t, kBuckets> counts{};
};

struct TrafficBytes {
  uint64_t read = 0;
  uint64_t written = 0;
};

struct DriveStatistics {
  std::array<TrafficBytes, kTrafficKinds> bytes{};  // by Traffic; blocks that ended well
  uint64_t blocks = 0;     // transfers handed to the kernel, repeated ones included
  uint64_t repeats = 0;    // of these: the rest of a short one, or again after EINTR or EAGAIN
  uint64_t errors = 0;     // requests that failed
  uint64_t depth_sum = 0;  // transfers in flight, added up over `blocks`, each just after its start
  uint64_t depth_max = 0;
  // From a block's first start to its end, repeats included.
  LatencyHistogram read_latency;
  LatencyHistogram write_latency;
  LatencyHistogram sync_latency;

  [[nodiscard]] TrafficBytes total() const noexcept;
  [[nodiscard]] double mean_depth() const noexcept {
    return blocks == 0 ? 0 : static_cast<double>(depth_sum) / static_cast<double>(blocks);
  }
  /// What came after the earlier snapshot of the same drive. depth_max stays that of all.
  [[nodiscard]] DriveStatistics since(const DriveStatistics& earlier) const noexcept;
};

}  // namespace strata::nvme
