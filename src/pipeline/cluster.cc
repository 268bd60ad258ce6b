#include "pipeline/cluster.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "pipeline/collective_cost.h"
#include "pipeline/rank_formulas.h"
#include "pipeline/simulator.h"

namespace strata::pipeline {
namespace {

/// Ranks of a group of hybrid_shard.
int group_of(const ClusterRequest& request, const MachineProfile& profile) {
  if (request.ranks == 1) return 1;
  if (request.shard_group > 0) return request.shard_group;
  return std::min(ranks_per_node_of(profile), request.ranks);
}

/// Of one sequence on one rank of full_shard with all that can be elsewhere in host memory: what
/// the device must hold at least.
Plan smallest_plan(const UnitModel& model, const gpu::Operators& operators,
                   const ClusterRequest& request) {
  const StepShape& shape = request.rank.shape;
  const int64_t sequences = std::max<int64_t>(shape.max_sequences, 1);
  const StepShape one{.micro_batches = 1, .tokens = shape.tokens / sequences, .max_sequences = 1};
  Placement placement = Placement::all_on(Tier::kHost, model.units().size(), 1);
  placement.boundaries = placement.saved_activations = Tier::kHost;
  placement.activation_slots = placement.host_slots = 1;
  placement.ranks = RankLayout::of(Sharding::kFullShard, request.ranks, 1, request.reduce_dtype);
  placement.moments = request.rank.moments;
  return build_plan(model, operators, one, placement);
}

size_t sum_of(const Plan& plan, Tier tier, std::initializer_list<Purpose> purposes) {
  const auto sums = plan.bytes_by_purpose(tier);
  return std::accumulate(
      purposes.begin(), purposes.end(), size_t{0},
      [&](size_t sum, Purpose purpose) { return sum + sums[static_cast<size_t>(purpose)]; });
}

}  // namespace

RankLayout layout_of(const ClusterRequest& request, const MachineProfile& profile) {
  const int group =
      request.sharding == Sharding::kHybridShard ? group_of(request, profile) : request.ranks;
  const RankLayout layout =
      RankLayout::of(request.sharding, request.ranks, group, request.reduce_dtype);
  if (request.ranks > 1) {  // that the links are known, before minutes of planning
    const int on_node = ranks_per_node_of(profile);
    (void)collective_seconds(comm::Collective::kAllGather, 0, world_shape(layout, on_node),
                             profile);
  }
  return layout;
}

PlanRequest rank_request(const ClusterRequest& request, const MachineProfile& profile) {
  PlanRequest rank = request.rank;
  rank.ranks = layout_of(request, profile);
  if (request.sequences == 0) return rank;
  if (request.sequences % request.ranks != 0) {
    throw usage_error(
        fmt::format("{} sequences a step cannot be divided among {} ranks; choose a multiple",
                    request.sequences, request.ranks));
  }
  const int64_t share = request.sequences / request.ranks;
  const int64_t asked = std::max<int64_t>(rank.shape.max_sequences, 1);
  int64_t micro_batch = std::min(asked, share);
  while (share % micro_batch != 0) --micro_batch;
  rank.shape.tokens = rank.shape.tokens / asked * micro_batch;
  rank.shape.max_sequences = micro_batch;
  rank.shape.micro_batches = share / micro_batch;
  return rank;
}

RankForecast forecast_of(const Foretold& foretold) {
  const Plan& plan = foretold.plan;
  RankForecast forecast{.ranks = plan.placement.ranks,
                        .fits = true,
                        .tier_bytes = plan.tier_bytes,
                        .tokens = plan.shape.micro_batches * plan.shape.tokens,
                        .step_s = foretold.step_s,
                        .compute_s = foretold.timeline.busy_s(plan.train, Lane::kCompute),
                        .collective_s = foretold.timeline.busy_s(plan.train, Lane::kCollective)};
  const auto& units = plan.placement.units;
  forecast.state_on_device = std::all_of(
      units.begin(), units.end(), [](const auto& unit) { return unit.optimizer == Tier::kDevice; });
  for (const Task& task : plan.train) {
    if (task.lane == Lane::kCollective) forecast.collective_bytes += task.moved_bytes;
  }
  return forecast;
}

RankForecast forecast(const UnitModel& model, const gpu::Operators& operators,
                      const MachineProfile& profile, const ClusterRequest& request) {
  RankForecast none{.ranks = layout_of(request, profile)};
  if (request.sequences > 0 && request.sequences < request.ranks) {
    none.why_not = fmt::format("fewer sequences a step ({}) than ranks", request.sequences);
    return none;
  }
  try {
    return forecast_of(choose_plan(model, operators, profile, rank_request(request, profile)));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDoesNotFit) throw;
    none.why_not = error.what();
  }
  return none;
}

std::vector<RankForecast> forecast_scaling(const UnitModel& model, const gpu::Operators& operators,
                                           const MachineProfile& profile, ClusterRequest request,
                                           int most) {
  std::vector<RankForecast> all;
  const int group = request.shard_group > 0 ? request.shard_group : ranks_per_node_of(profile);
  for (int64_t ranks = 1; ranks <= most; ranks *= 2) {
    request.ranks = static_cast<int>(ranks);
    request.shard_group = std::gcd(group, request.ranks);
    all.push_back(forecast(model, operators, profile, request));
  }
  return all;
}

double scaling_efficiency(const std::vector<RankForecast>& all, size_t index) {
  const auto first =
      std::find_if(all.begin(), all.end(), [](const RankForecast& one) { return one.fits; });
  if (first == all.end() || !all[index].fits) return 0;
  return all[index].tokens_per_s() / first->tokens_per_s();
}

ClusterFigures cluster_figures(const UnitModel& model, const gpu::Operators& operators,
                               const MachineProfile& profile, const ClusterRequest& request) {
  const StepShape& shape = request.rank.shape;
  ClusterFigures figures{
      .ranks = request.ranks,
      .ranks_per_node = ranks_per_node_of(profile),
      .sequences = request.sequences > 0
                       ? request.sequences
                       : shape.micro_batches * shape.max_sequences * request.ranks,
      .units = static_cast<int>(model.units().size()),
      .device_bytes = request.rank.budget.device_bytes,
      .boundary_bytes_per_token = model.boundary_bytes(shape.tokens) /
                                  static_cast<size_t>(std::max<int64_t>(shape.tokens, 1))};
  const Plan smallest = smallest_plan(model, operators, request);
  figures.least_unit_bytes =
      sum_of(smallest, Tier::kDevice, {Purpose::kSlots, Purpose::kAccumulators});
  figures.least_activation_bytes = smallest.bytes(Tier::kDevice) - figures.least_unit_bytes;
  const auto state = state_at_rest_bytes(
      {.units = model.units(), .dtype = model.dtype(), .moments = request.rank.moments});
  figures.state_bytes = std::accumulate(state.begin(), state.end(), size_t{0});
  const size_t state_on_host = sum_of(
      smallest, Tier::kHost, {Purpose::kWeights, Purpose::kGradients, Purpose::kOptimizerState});
  size_t budget = request.rank.budget.nvme_bytes;
  for (const auto& [tier, other] :
       {std::pair(Tier::kDevice, smallest.bytes(Tier::kDevice)),
        std::pair(Tier::kHost, smallest.bytes(Tier::kHost) - state_on_host)}) {
    const size_t allowed = request.rank.budget.bytes(tier);
    budget += allowed > other ? allowed - other : 0;
  }
  figures.state_budget_bytes = budget;
  for (const Sharding sharding : {Sharding::kNoShard, Sharding::kShardOptimizer,
                                  Sharding::kHybridShard, Sharding::kFullShard}) {
    ClusterRequest one = request;
    one.sharding = sharding;
    if (sharding == Sharding::kHybridShard) {
      const int group = group_of(request, profile);
      if (group < 2 || group >= request.ranks || request.ranks % group != 0) continue;
    }
    figures.shardings.push_back(forecast(model, operators, profile, one));
  }
  return figures;
}

}  // namespace strata::pipeline
