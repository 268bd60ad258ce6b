// What sharding gives in bytes, in closed form: what the ledger and the graphs of a plan must come
// to for each rank (docs/ranks.md). Pure functions; any thread.
//
// Everything is of one rank, in an optimizer step in layer-major order: nothing depends on the
// number of micro-batches.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "pipeline/placement.h"
#include "pipeline/sharding.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

struct RankedModel {
  std::span<const UnitSpec> units;
  RankLayout ranks{};
  DType dtype = DType::kBf16;  // of weights
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;
};

/// [kind]: bytes at rest, on whichever tiers, of all units: state_bytes of shard_elements each,
/// padding included. Gradients are those that are kept from backward to the update.
[[nodiscard]] std::array<size_t, kStateKinds> state_at_rest_bytes(const RankedModel& model);

/// Bytes of a unit's whole weight when gathered: that of all ranks' shards, padding included.
[[nodiscard]] size_t gathered_weight_bytes(const RankedModel& model, size_t unit);

/// What each rank keeps of whole weights on the device: all of them where
/// RankLayout::keeps_whole_weights() of more than one rank, else nothing. Shards that rest on the
/// device are then places in these; those that rest elsewhere are there besides.
[[nodiscard]] size_t kept_whole_weight_bytes(const RankedModel& model);

/// So many inner units, the last of forward, are still in their slots on the device when backward
/// begins with them, in plans with so many slots for weights.
[[nodiscard]] int found_in_slots(const RankedModel& model, int slots);

/// How often a unit's weight is gathered in a step, where nothing but its sharding decides: once if
/// it is kept, else in forward and, where backward reads it, again. The last unit's two passes are
/// one, and a tied head finds the first unit's weight where forward left it. `found`: of
/// found_in_slots.
[[nodiscard]] int gathers_of_unit(const RankedModel& model, size_t unit, int found);

/// Bytes that the rank sends, as comm::collective_bytes counts them.
struct CollectiveTraffic {
  size_t gather_bytes = 0;      // all-gathers of weights within the shard group
  size_t scatter_bytes = 0;     // reduce-scatters of gradients within it
  size_t all_reduce_bytes = 0;  // all-reduces of gradients (of a rank's part) over replicas
  size_t scalar_bytes = 0;      // the all-gather of the loss and a norm a unit over all ranks

  [[nodiscard]] size_t total_bytes() const noexcept {
    return gather_bytes + scatter_bytes + all_reduce_bytes + scalar_bytes;
  }
  friend bool operator==(const CollectiveTraffic&, const CollectiveTraffic&) = default;
};
[[nodiscard]] CollectiveTraffic collective_traffic(const RankedModel& model, int found);

}  // namespace strata::pipeline
