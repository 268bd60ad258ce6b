// Seconds of each task of a plan on a machine: what the simulator plays. Pure functions; any
// thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "pipeline/machine_profile.h"
#include "pipeline/plan.h"
#include "pipeline/timeline.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// Units whose calls take the same time: all between the first and the last.
enum class UnitClass : uint8_t { kFirst, kInner, kLast };
inline constexpr size_t kUnitClasses = 3;
/// Of a model of `units` units; a model's only unit is its last.
[[nodiscard]] constexpr UnitClass class_of(int unit, size_t units) noexcept {
  if (unit + 1 == static_cast<int>(units)) return UnitClass::kLast;
  return unit == 0 ? UnitClass::kFirst : UnitClass::kInner;
}

/// Measured seconds of tasks of the compute lane, launch included, in place of computed ones.
class UnitCosts {
 public:
  /// `tokens`: of the micro-batch that was measured.
  explicit UnitCosts(int64_t tokens) : tokens_(tokens) {}

  /// One call of a unit of that class. The level counts for kForward and kBackward; others are set
  /// at kNone. kLoss is with backward.
  void set(UnitClass unit, TaskKind kind, SavedActivations level, double seconds);
  /// Nothing where it was not measured.
  [[nodiscard]] std::optional<double> seconds(UnitClass unit, TaskKind kind,
                                              SavedActivations level) const;
  [[nodiscard]] int64_t tokens() const noexcept { return tokens_; }

 private:
  static constexpr size_t kLevels = 3;
  std::array<std::array<std::array<double, kLevels>, kTaskKinds>, kUnitClasses> seconds_{};
  int64_t tokens_;
};

/// Of each task of `graph`, one of the plan's:
///  - links: latency + bytes / speed of the direction; drives: bytes / speed of all together;
///  - collectives: collective_seconds of the groups that the plan's ranks form where they fill
///  nodes
///    in order, by the profile or what with_assumed_links takes its links for;
///  - optimizer: bytes of memory / speed of host or device memory;
///  - forward, backward, loss: launch + FLOPs / speed of products + other bytes / speed of device
///    memory, documents counted as of full length;
///  - finished gradients: launch + bytes / speed of device memory, 4 read and 2 (fp32: 4) written a
///    parameter of the rank's shard; where gradients are rounded before they are summed over ranks,
///    6 more of the whole unit to round, and of the shard to widen.
/// Where `measured` has a unit's class and task, its figure holds. For a level or a number of
/// tokens that was not measured, the nearest measured level's figure is taken times the ratio of
/// the computed ones.
/// Throws a usage error that names the profile if the plan uses drives and the profile has none.
[[nodiscard]] std::vector<double> task_seconds(const Plan& plan, const StepGraph& graph,
                                               const UnitModel& model,
                                               const MachineProfile& profile,
                                               const UnitCosts* measured = nullptr);

/// `graph` simulated with those.
[[nodiscard]] Timeline predict(const Plan& plan, const StepGraph& graph, const UnitModel& model,
                               const MachineProfile& profile, const UnitCosts* measured = nullptr);

}  // namespace strata::pipeline
