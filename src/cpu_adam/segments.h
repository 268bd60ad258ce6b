// Walking a shard's segment table in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "cpu_adam/shard.h"

namespace strata::cpu_adam {

/// Finds the runs of elements that share one decay. Ranges asked for must ascend.
class SegmentCursor {
 public:
  SegmentCursor(std::span<const Segment> segments, float decay) noexcept
      : segments_(segments), decay_(decay) {}

  /// Calls run(begin, end, decay) for the pieces of [begin, end) that lie in one segment each.
  template <class Run>
  void for_each_run(int64_t begin, int64_t end, const Run& run) {
    while (begin < end && next_ < segments_.size()) {
      const Segment& segment = segments_[next_];
      const int64_t segment_end = segment_begin_ + segment.count;
      if (begin < segment_end) {
        const int64_t run_end = std::min(end, segment_end);
        run(begin, run_end, segment.decay ? decay_ : 0.0F);
        begin = run_end;
      }
      if (end < segment_end) return;
      segment_begin_ = segment_end;
      ++next_;
    }
  }

 private:
  std::span<const Segment> segments_;
  float decay_;
  size_t next_ = 0;
  int64_t segment_begin_ = 0;
};

}  // namespace strata::cpu_adam
