#include "pipeline/rank_formulas.h"

#include <algorithm>

#include "comm/communicator.h"

namespace strata::pipeline {
namespace {

using comm::Collective;
using comm::collective_bytes;

int64_t shard_of(const RankedModel& model, size_t unit) {
  return shard_elements(model.units[unit].parameter_count, model.ranks.shard_ranks, model.moments);
}

}  // namespace

std::array<size_t, kStateKinds> state_at_rest_bytes(const RankedModel& model) {
  std::array<size_t, kStateKinds> sums{};
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      sums[kind] += state_bytes(static_cast<StateKind>(kind), shard_of(model, unit), model.dtype,
                                model.moments);
    }
  }
  return sums;
}

size_t gathered_weight_bytes(const RankedModel& model, size_t unit) {
  return static_cast<size_t>(shard_of(model, unit) * model.ranks.shard_ranks) *
         size_of(model.dtype);
}

size_t kept_whole_weight_bytes(const RankedModel& model) {
  if (!model.ranks.keeps_whole_weights() || model.ranks.shard_ranks == 1) return 0;
  size_t sum = 0;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    sum += gathered_weight_bytes(model, unit);
  }
  return sum;
}

int found_in_slots(const RankedModel& model, int slots) {
  const bool is_tied = model.units.back().shared_unit == 0;
  if (slots == 1 && !is_tied) return 0;  // all units share it, and the last takes it
  return std::min(slots, static_cast<int>(model.units.size()) - 2);
}

int gathers_of_unit(const RankedModel& model, size_t unit, int found) {
  if (model.ranks.shard_ranks == 1) return 0;
  const size_t last = model.units.size() - 1;
  if (model.ranks.keeps_whole_weights() || unit == last) return 1;
  const bool is_found = unit > 0 && unit + static_cast<size_t>(found) >= last;
  return model.units[unit].backward_reads_weight && !is_found ? 2 : 1;
}

CollectiveTraffic collective_traffic(const RankedModel& model, int found) {
  CollectiveTraffic traffic;
  for (size_t unit = 0; unit < model.units.size(); ++unit) {
    const int64_t shard = shard_of(model, unit);
    const int ranks = model.ranks.shard_ranks;
    traffic.gather_bytes +=
        static_cast<size_t>(gathers_of_unit(model, unit, found)) *
        collective_bytes(Collective::kAllGather, gathered_weight_bytes(model, unit), ranks);
    const size_t reduced = static_cast<size_t>(shard) * size_of(model.ranks.reduce_dtype);
    traffic.scatter_bytes +=
        collective_bytes(Collective::kReduceScatter, reduced * static_cast<size_t>(ranks), ranks);
    traffic.all_reduce_bytes +=
        collective_bytes(Collective::kAllReduce, reduced, model.ranks.replicas());
  }
  const size_t scalars = (1 + model.units.size()) * sizeof(double);
  const int ranks = model.ranks.ranks;
  traffic.scalar_bytes =
      collective_bytes(Collective::kAllGather, scalars * static_cast<size_t>(ranks), ranks);
  return traffic;
}

}  // namespace strata::pipeline
