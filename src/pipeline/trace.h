// Timelines for people: as a trace that Perfetto and chrome://tracing show, and as one line a lane.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

#include "pipeline/plan.h"
#include "pipeline/timeline.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// Writes the Trace Event format (JSON), replacing the file atomically. The measured and, unless
/// null, the predicted timeline of `graph`, one of the plan's, are two processes, whose threads are
/// the lanes. A lane with more than one task under way at a time has a thread for each. Times are
/// in nanoseconds since the step's begin. Each task is a complete event with unit, micro-batch,
/// part, bytes and GB/s where it has them.
void write_trace(const std::filesystem::path& path, const Plan& plan, const StepGraph& graph,
                 std::span<const UnitSpec> units, const Timeline& measured,
                 const Timeline* predicted = nullptr);

struct LaneSummary {
  struct Row {
    int64_t tasks = 0;
    size_t moved_bytes = 0;
    /// With at least one task of the lane under way. What a disk task waits for other disk lanes
    /// once it has begun is in here.
    double busy_s = 0;
  };
  std::array<Row, kLanes> lanes{};
  double drives_busy_s = 0;  // with at least one task of any disk lane
  double seconds = 0;

  [[nodiscard]] const Row& of(Lane lane) const noexcept { return lanes[static_cast<size_t>(lane)]; }
};

[[nodiscard]] LaneSummary summarize(const StepGraph& graph, const Timeline& timeline);

}  // namespace strata::pipeline
