// What a plan takes up and how long it takes, without building it: the sum of what its units add,
// each found once from the plans of a few units. Bytes are those of the plan where inner units are
// alike; seconds are near the simulated ones and never far above, and serve to say which of many
// placements are worth being simulated.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "pipeline/planner.h"

namespace strata::pipeline {

struct Estimate {
  std::array<int64_t, kTiers.size()> bytes{};
  double seconds = 0;  // of an average step
};

class Estimator {
 public:
  /// The references must outlive this.
  Estimator(const UnitModel& model, const gpu::Operators& operators, const MachineProfile& profile,
            const StepShape& shape, const UnitCosts* measured);

  [[nodiscard]] Estimate estimate(const Placement& placement);
  /// Tasks of the small plans built so far: what the estimates have cost.
  [[nodiscard]] int64_t tasks_built() const noexcept { return tasks_built_; }

 private:
  /// Sums over a plan, or what a unit adds to them.
  struct Load {
    std::array<int64_t, kTiers.size()> bytes{};
    // Until the last loss, after it, and in the replay.
    std::array<std::array<double, kLanes>, 3> seconds{};
    void add(const Load& other, int times);
  };
  using Key = std::vector<int64_t>;

  [[nodiscard]] Load load_of(const Placement& placement);
  /// What one more inner unit like it adds.
  [[nodiscard]] Load inner_load(const Placement& policy, const UnitPlacement& unit);
  [[nodiscard]] Load difference_of_one(Placement policy, const UnitPlacement& unit);
  /// Likewise of all but its activations, which rest on the device.
  const Load& state_load(const Placement& policy, UnitPlacement unit);
  /// What its activations add to that.
  const Load& activation_load(const Placement& policy, SavedActivations saved);
  /// What is there besides inner units; `kinds`: those of the placement's inner units.
  const Load& rest_load(const Placement& placement, std::span<const UnitPlacement> kinds);
  [[nodiscard]] double seconds(const Load& load) const;

  const UnitModel& model_;
  const gpu::Operators& operators_;
  const MachineProfile& profile_;
  StepShape shape_;
  const UnitCosts* measured_;
  LaneSharing sharing_;
  int representative_ = 0;  // of the inner units: the largest
  std::map<Key, Load> state_, activations_, rest_;
  int64_t tasks_built_ = 0;
};

}  // namespace strata::pipeline
