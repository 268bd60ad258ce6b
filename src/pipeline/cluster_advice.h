// Which sharding is enough for a model on a cluster, which is fastest, and where sharding alone
// does not do: what tensor or pipeline parallelism, other batches or other links would have to
// give. Pure functions of figures (pipeline/cluster.h finds them); any thread.
//
// Strata itself has neither tensor nor pipeline parallelism; this says when a model needs them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/placement.h"
#include "pipeline/sharding.h"

namespace strata::pipeline {

/// What one sharding of a model on a cluster comes to, for each rank.
struct RankForecast {
  RankLayout ranks{};
  /// Whether a plan within the budgets was found; the rest of what is here but `why_not` is 0
  /// without.
  bool fits = false;
  std::string why_not{};         // the refusal
  bool state_on_device = false;  // all of it, so that nothing is offloaded
  std::array<size_t, kTiers.size()> tier_bytes{};
  size_t collective_bytes = 0;  // sent by the rank in a step
  int64_t tokens = 0;           // of one rank in a step
  double step_s = 0;
  double compute_s = 0;     // with the compute lane at work
  double collective_s = 0;  // with the collective lane at work

  /// Of one rank.
  [[nodiscard]] double tokens_per_s() const noexcept {
    return step_s > 0 ? static_cast<double>(tokens) / step_s : 0;
  }
  [[nodiscard]] double all_tokens_per_s() const noexcept { return ranks.ranks * tokens_per_s(); }
};

struct ClusterFigures {
  int ranks = 1;
  int ranks_per_node = 1;
  int64_t sequences = 0;    // of all ranks in a step
  int units = 0;            // of the model: a pipeline has no more stages
  size_t device_bytes = 0;  // allowed
  // What a rank's device must hold at once, however much is sharded or offloaded (of one sequence):
  size_t least_unit_bytes = 0;        // a unit's whole weight, gradient and accumulator
  size_t least_activation_bytes = 0;  // workspace and boundaries
  size_t boundary_bytes_per_token = 0;
  size_t state_bytes = 0;                 // of the model, not divided
  size_t state_budget_bytes = 0;          // of all tiers of a rank, less what is no state
  std::vector<RankForecast> shardings{};  // from the least divided to the most
};

enum class Need : uint8_t {
  kTensorParallel,
  kPipelineParallel,
  kMoreTokens,
  kMoreRanks,
  kFewerRanks,
};
[[nodiscard]] std::string_view name_of(Need need) noexcept;

struct ClusterNeed {
  Need need = Need::kMoreTokens;
  std::string reason;  // a sentence with its numbers
};

struct ClusterAdvice {
  /// Indices of ClusterFigures::shardings. Least: the first that fits; without offload: the first
  /// that fits with all state on the device; fastest by tokens per second.
  std::optional<size_t> least, least_without_offload, fastest;
  std::vector<ClusterNeed> needs;  // may be empty
};

[[nodiscard]] ClusterAdvice advise_on_cluster(const ClusterFigures& figures);

}  // namespace strata::pipeline
