// Plays a step graph on lanes of given speeds: when each task will begin and end, which chain of
// tasks the step is as long as, and which lane bounds it. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "pipeline/step_graph.h"
#include "pipeline/timeline.h"

namespace strata::pipeline {

/// What lanes cost each other while they have tasks under way at the same time.
struct LaneSharing {
  /// The speed of upload and of download beside each other, as a part of each one's alone: 1 where
  /// the link's two directions are independent, 1/2 where they share all.
  double both_links = 1;
  /// Likewise of compute and cpu: 1 where the device has processors of its own.
  double compute_with_cpu = 1;
  /// The part of host memory's speed that a lane at work takes up. Where those at work would take
  /// more than 1 together, all that take any slow down alike.
  std::array<double, kLanes> host_memory{};

  friend bool operator==(const LaneSharing&, const LaneSharing&) = default;
};

/// Seconds of each task on an idle machine to the times at which it begins and ends:
///  - A lane begins its tasks in order. All but the disk lanes have one task under way
///    at a time, which begins when the lane is free and all tasks of `after` have ended.
///  - A task of a disk lane may be served when all before it on its lane may and all of its `after`
///    have ended. The three disk lanes share the drives, which serve one task at a time: of
///    kReadWeight before kReadState before kWrite, and of one lane in order. A task that waits for
///    one of a lane before its own goes on later where it stopped.
/// `begin_s` of a disk task is when it is first served; between that and its end the drives may
/// have served others. Tasks must only come after earlier ones of the graph, and seconds be finite
/// and not negative (programmer's errors otherwise). O(tasks + edges); allocates two arrays.
[[nodiscard]] Timeline simulate(const StepGraph& graph, std::span<const double> seconds,
                                const LaneSharing& sharing = {});

/// Why a task of the critical path did not begin earlier.
enum class WaitedFor : uint8_t {
  kNothing,     // it began with the step
  kLane,        // the task before it on its lane
  kDependency,  // a task of its `after`
  kDrives,      // a task of another disk lane that the drives served first
};
[[nodiscard]] std::string_view name_of(WaitedFor waited_for) noexcept;

/// A piece of the critical path: `task` being worked on in [begin_s, end_s]. A disk task that
/// was interrupted on the path appears once for each stretch.
struct PathStep {
  TaskId task = -1;
  double begin_s = 0, end_s = 0;
  WaitedFor waited_for = WaitedFor::kNothing;
  TaskId earlier = -1;  // the task waited for, the step before this one
  /// Between the end of the step before and begin_s, or the step's begin: 0 in a simulated
  /// timeline; in a measured one, what neither lanes nor dependencies explain.
  double gap_s = 0;
};

/// The chain of tasks without slack from the beginning of the step to its end, in order of time:
/// each begins when the one before it ends. Durations and gaps add up to the timeline's seconds.
/// Works on measured timelines too, where the latest end before a task's begin counts as its cause.
/// O(tasks log tasks).
[[nodiscard]] std::vector<PathStep> critical_path(const StepGraph& graph, const Timeline& timeline);

/// Seconds that the path spends on each lane.
[[nodiscard]] std::array<double, kLanes> path_seconds(const StepGraph& graph,
                                                      std::span<const PathStep> path);

/// The lane on which the path spends most: the resource whose speed would shorten the step most.
/// Disk lanes count together, and stand as the one of them with most.
[[nodiscard]] Lane bounding_lane(const StepGraph& graph, std::span<const PathStep> path);

}  // namespace strata::pipeline
