#include "pipeline/cluster_advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/bytes.h"

namespace strata::pipeline {
namespace {

std::optional<size_t> first_of(const std::vector<RankForecast>& all, auto&& is_it) {
  const auto found = std::find_if(all.begin(), all.end(), is_it);
  if (found == all.end()) return std::nullopt;
  return static_cast<size_t>(found - all.begin());
}

/// What one unit works on is divided by no sharding.
void ask_memory_of_a_unit(const ClusterFigures& f, ClusterAdvice& advice) {
  const size_t least = f.least_unit_bytes + f.least_activation_bytes;
  if (least <= f.device_bytes) return;
  const auto parts = static_cast<size_t>(
      std::ceil(static_cast<double>(least) / static_cast<double>(f.device_bytes)));
  advice.needs.push_back(
      {Need::kTensorParallel,
       fmt::format("the largest unit's whole weight and gradient take {} and the activations of "
                   "one sequence {}, {} together where a device has {}, and no sharding divides "
                   "what a unit works on: it would have to be cut over {} devices at least",
                   format_bytes(f.least_unit_bytes), format_bytes(f.least_activation_bytes),
                   format_bytes(least), format_bytes(f.device_bytes), parts)});
}

void ask_ranks_for_state(const ClusterFigures& f, ClusterAdvice& advice) {
  if (advice.least || f.state_budget_bytes == 0) return;
  const auto needed = static_cast<int64_t>(
      std::ceil(static_cast<double>(f.state_bytes) / static_cast<double>(f.state_budget_bytes)));
  if (needed <= f.ranks) return;
  advice.needs.push_back(
      {Need::kMoreRanks,
       fmt::format("the state takes {} and a rank's tiers have room for {} of it: {} ranks at "
                   "least with full_shard, or more memory for each",
                   format_bytes(f.state_bytes), format_bytes(f.state_budget_bytes), needed)});
}

void ask_sequences(const ClusterFigures& f, ClusterAdvice& advice) {
  if (f.sequences >= f.ranks) return;
  advice.needs.push_back(
      {Need::kFewerRanks,
       fmt::format("a step has {} sequences for {} ranks, and a rank works on one at least: take "
                   "{} ranks or more sequences, or let {} ranks share each by tensor parallelism",
                   f.sequences, f.ranks, f.sequences,
                   (f.ranks + f.sequences - 1) / std::max<int64_t>(f.sequences, 1))});
}

/// Whether links and not compute bound the fastest plan, and what would change that.
void ask_tokens(const ClusterFigures& f, ClusterAdvice& advice) {
  if (!advice.fastest) return;
  const RankForecast& best = f.shardings[*advice.fastest];
  if (best.collective_s <= best.compute_s || best.compute_s <= 0) return;
  const double times = best.collective_s / best.compute_s;
  advice.needs.push_back(
      {Need::kMoreTokens,
       fmt::format("with {} tokens a rank and step, {} has the links between ranks at work for "
                   "{:.3g} s and compute for {:.3g} s; from about {:.0f} tokens a rank ({:.1f} "
                   "times as many) compute bounds",
                   best.tokens, name_of(best.ranks.sharding), best.collective_s, best.compute_s,
                   std::ceil(times * static_cast<double>(best.tokens)), times)});
  const int nodes = (f.ranks + f.ranks_per_node - 1) / f.ranks_per_node;
  if (f.ranks_per_node > 1) {
    advice.needs.push_back(
        {Need::kTensorParallel,
         fmt::format("where the batch may not grow: the {} ranks of a node as one by tensor "
                     "parallelism work on {} tokens together, and {} instead of {} ranks divide "
                     "the state",
                     f.ranks_per_node, best.tokens * f.ranks_per_node, nodes, f.ranks)});
  }
  if (nodes < 2 || nodes > f.units) return;
  // Stages are nodes: all tokens pass each, divided among its ranks, there and back.
  const auto boundaries =
      2 * static_cast<double>(nodes) *
      static_cast<double>(best.tokens * static_cast<int64_t>(f.boundary_bytes_per_token));
  if (boundaries >= static_cast<double>(best.collective_bytes)) return;
  advice.needs.push_back(
      {Need::kPipelineParallel,
       fmt::format("{} nodes as stages would send {} of boundaries a rank and step instead of the "
                   "{} of weights and gradients that {} sends",
                   nodes, format_bytes(static_cast<size_t>(boundaries)),
                   format_bytes(best.collective_bytes), name_of(best.ranks.sharding))});
}

}  // namespace

std::string_view name_of(Need need) noexcept {
  constexpr std::array<std::string_view, 5> names{"tensor parallelism", "pipeline parallelism",
                                                  "more tokens", "more ranks", "fewer ranks"};
  return names[static_cast<size_t>(need)];
}

ClusterAdvice advise_on_cluster(const ClusterFigures& figures) {
  const std::vector<RankForecast>& all = figures.shardings;
  ClusterAdvice advice;
  advice.least = first_of(all, [](const RankForecast& one) { return one.fits; });
  advice.least_without_offload =
      first_of(all, [](const RankForecast& one) { return one.fits && one.state_on_device; });
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].fits) continue;
    if (!advice.fastest || all[i].tokens_per_s() > all[*advice.fastest].tokens_per_s()) {
      advice.fastest = i;
    }
  }
  ask_memory_of_a_unit(figures, advice);
  ask_ranks_for_state(figures, advice);
  ask_sequences(figures, advice);
  ask_tokens(figures, advice);
  return advice;
}

}  // namespace strata::pipeline
