// Chooses a plan: searches the placements by simulating them on a machine profile. Pure functions;
// any thread. The same input always gives the same plan.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/cost_model.h"
#include "pipeline/machine_profile.h"
#include "pipeline/plan.h"
#include "pipeline/timeline.h"

namespace strata::pipeline {

/// What a plan may take up.
struct Budget {
  size_t device_bytes = 0;
  size_t host_bytes = 0;  // for the plan's arena in host memory
  size_t nvme_bytes = 0;  // 0: no NVMe

  [[nodiscard]] size_t bytes(Tier tier) const noexcept {
    return tier == Tier::kDevice ? device_bytes : tier == Tier::kHost ? host_bytes : nvme_bytes;
  }
};

/// What the planner may not choose, because somebody has chosen it.
struct FixedChoices {
  std::optional<int> slots{};
  std::optional<int> host_slots{};
  std::optional<int64_t> part_elements{};
  std::optional<Tier> boundaries{};
  std::optional<SavedActivations> saved{};  // of all units that can keep any
  std::optional<Tier> saved_activations{};
  /// Where the optimizer's state of all units rests: kDevice and kHost take weight and gradient
  /// along, kNvme leaves the choice of theirs.
  std::optional<Tier> offload{};
};

struct PlanRequest {
  StepShape shape{};
  /// Of one document; only for the error that proposes a smaller micro-batch.
  int64_t sequence_length = 0;
  Budget budget{};
  /// Host memory that is needed beside the plan and not in the budget, for what is said of either.
  size_t host_beside_bytes = 0;
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;
  RankLayout ranks{};  // the budget is one rank's
  bool clipping = true;
  /// Every step can be committed: all that changes rests on NVMe, and is speculated.
  bool durable = false;
  /// false: no optimizer state on the device, which cannot update it in that format of moments.
  bool state_on_device = true;
  FixedChoices fixed{};
};

/// The part of the steps whose gradient's norm is above the limit, so that what was speculated is
/// made again. Assumed: it is the data's and the learning rate's to say. Pretraining clips most of
/// its first steps and few later.
inline constexpr double kAssumedClippedSteps = 0.1;

/// A plan and what it will do in the long run: each step with the updates that the one before left
/// to it.
struct Foretold {
  Plan plan;
  std::vector<double> seconds;  // of each task of plan.train alone
  Timeline timeline;            // of plan.train
  double replay_s = 0;          // of plan.replay, after a step that was clipped
  /// Of an average step: timeline.seconds + kAssumedClippedSteps * replay_s.
  double step_s = 0;
  int simulations = 0;  // that led to it
};

/// The plan within the budget with the shortest average step that the search finds; a thousandth of
/// a second of it is given for each second that drives then write less. So far it is never slower
/// than the plans with the state of all units on one tier that fit.
///
/// Throws a usage error for a request that no plan can answer (NVMe without drives in the profile,
/// durable without NVMe, fixed choices that do not go together), and an Error of kind kDoesNotFit
/// that names the missing bytes of each tier and what would fit.
[[nodiscard]] Foretold choose_plan(const UnitModel& model, const gpu::Operators& operators,
                                   const MachineProfile& profile, const PlanRequest& request,
                                   const UnitCosts* measured = nullptr);

/// A plan of that placement, foretold.
[[nodiscard]] Foretold foretell(Plan plan, const UnitModel& model, const MachineProfile& profile,
                                const UnitCosts* measured = nullptr);

[[nodiscard]] inline double tokens_per_s(const Foretold& foretold) noexcept {
  return static_cast<double>(foretold.plan.shape.micro_batches * foretold.plan.shape.tokens) /
         foretold.step_s;
}

/// What one change of machine or step would give.
struct Advice {
  std::string change;       // "twice the host memory"
  double tokens_per_s = 0;  // then
  double gain = 0;          // more than now
};

/// Each change planned anew and alone: twice the host memory, one more drive of the same kind,
/// twice the tokens a step (as micro-batches), twice the device memory. Changes after which nothing
/// fits, or which do not apply, are left out.
[[nodiscard]] std::vector<Advice> advise(const Foretold& now, const UnitModel& model,
                                         const gpu::Operators& operators,
                                         const MachineProfile& profile, const PlanRequest& request,
                                         const UnitCosts* measured = nullptr);

}  // namespace strata::pipeline
