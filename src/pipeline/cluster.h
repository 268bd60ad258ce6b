// A model on many ranks, foretold: memory, communication and time of each rank under a sharding,
// how that scales with the number of ranks, and the figures from which cluster_advice.h says what
// to choose. Plans anew for each case, as a run would. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/cluster_advice.h"
#include "pipeline/planner.h"

namespace strata::pipeline {

struct ClusterRequest {
  /// Of one rank: budgets, and the shape where `sequences` does not say otherwise. `rank.ranks` is
  /// not read.
  PlanRequest rank{};
  Sharding sharding = Sharding::kFullShard;
  int ranks = 1;
  int shard_group = 0;  // ranks of a group of hybrid_shard; 0: those of a node
  DType reduce_dtype = DType::kF32;
  /// Of one step over all ranks; 0: each rank takes rank.shape, so that a step grows with ranks.
  int64_t sequences = 0;
};

/// Which is the same for every sharding but kHybridShard's group. Throws a usage error where a
/// group does not divide the ranks, or the profile does not know the links that the ranks need.
[[nodiscard]] RankLayout layout_of(const ClusterRequest& request, const MachineProfile& profile);

/// What one rank plans for: the request with its layout and its share of the sequences. That share
/// is cut into micro-batches of the shape's size, or of the largest smaller one that divides it.
/// Throws a usage error where ranks do not divide the sequences.
[[nodiscard]] PlanRequest rank_request(const ClusterRequest& request,
                                       const MachineProfile& profile);

[[nodiscard]] RankForecast forecast_of(const Foretold& foretold);

/// Plans it. What does not fit, or has fewer sequences than ranks, is a forecast that says why;
/// other errors are thrown.
[[nodiscard]] RankForecast forecast(const UnitModel& model, const gpu::Operators& operators,
                                    const MachineProfile& profile, const ClusterRequest& request);

/// For 1, 2, 4, ... up to `most` ranks, each planned anew; groups of kHybridShard are as large as
/// divides the ranks and the group asked for.
[[nodiscard]] std::vector<RankForecast> forecast_scaling(const UnitModel& model,
                                                         const gpu::Operators& operators,
                                                         const MachineProfile& profile,
                                                         ClusterRequest request, int most);
/// Tokens per second and rank over those of the first forecast that fits; 0 where there are none.
[[nodiscard]] double scaling_efficiency(const std::vector<RankForecast>& all, size_t index);

/// For advise_on_cluster: all shardings at the request's number of ranks. hybrid_shard is left out
/// where its group would be all ranks, or does not divide them.
[[nodiscard]] ClusterFigures cluster_figures(const UnitModel& model,
                                             const gpu::Operators& operators,
                                             const MachineProfile& profile,
                                             const ClusterRequest& request);

}  // namespace strata::pipeline
