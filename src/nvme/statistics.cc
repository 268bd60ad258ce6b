#include "nvme/statistics.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace strata::nvme {
namespace {

constexpr unsigned kStepBits = 3;  // eight buckets an octave
constexpr uint64_t kSteps = uint64_t{1} << kStepBits;
constexpr unsigned kFirstOctave = 10;  // 2^10 ns are the first bucket's

}  // namespace

size_t LatencyHistogram::bucket_of(uint64_t nanoseconds) noexcept {
  if (nanoseconds < (uint64_t{1} << kFirstOctave)) return 0;
  const auto octave = static_cast<unsigned>(std::bit_width(nanoseconds)) - 1;
  const uint64_t step = (nanoseconds >> (octave - kStepBits)) - kSteps;
  const uint64_t bucket = 1 + (octave - kFirstOctave) * kSteps + step;
  return static_cast<size_t>(std::min<uint64_t>(bucket, kBuckets - 1));
}

double LatencyHistogram::upper_bound_s(size_t bucket) noexcept {
  if (bucket == 0) return std::ldexp(1e-9, kFirstOctave);
  const auto octave = static_cast<int>(kFirstOctave + (bucket - 1) / kSteps);
  const auto step = static_cast<double>((bucket - 1) % kSteps + 1);
  return std::ldexp(1e-9 * (1 + step / kSteps), octave);
}

uint64_t LatencyHistogram::count() const noexcept {
  uint64_t sum = 0;
  for (const uint64_t count : counts) sum += count;
  return sum;
}

double LatencyHistogram::percentile_s(double quantile) const noexcept {
  const uint64_t all = count();
  if (all == 0) return 0;
  const double wanted = std::max(1.0, std::ceil(quantile * static_cast<double>(all)));
  uint64_t within = 0;
  size_t bucket = 0;
  for (; bucket < kBuckets; ++bucket) {
    within += counts[bucket];
    if (static_cast<double>(within) >= wanted) break;
  }
  return upper_bound_s(std::min(bucket, kBuckets - 1));
}

LatencyHistogram LatencyHistogram::since(const LatencyHistogram& earlier) const noexcept {
  LatencyHistogram difference;
  for (size_t i = 0; i < kBuckets; ++i) difference.counts[i] = counts[i] - earlier.counts[i];
  return difference;
}

TrafficBytes DriveStatistics::total() const noexcept {
  TrafficBytes sum;
  for (const TrafficBytes& kind : bytes) {
    sum.read += kind.read;
    sum.written += kind.written;
  }
  return sum;
}

DriveStatistics DriveStatistics::since(const DriveStatistics& earlier) const noexcept {
  DriveStatistics difference = *this;
  for (size_t i = 0; i < kTrafficKinds; ++i) {
    difference.bytes[i].read -= earlier.bytes[i].read;
    difference.bytes[i].written -= earlier.bytes[i].written;
  }
  difference.blocks -= earlier.blocks;
  difference.repeats -= earlier.repeats;
  difference.errors -= earlier.errors;
  difference.depth_sum -= earlier.depth_sum;
  difference.read_latency = read_latency.since(earlier.read_latency);
  difference.write_latency = write_latency.since(earlier.write_latency);
  difference.sync_latency = sync_latency.since(earlier.sync_latency);
  return difference;
}

}  // namespace strata::nvme
