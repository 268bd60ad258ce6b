// A plan: placement, step graphs, and the exact bytes of every buffer. One builder makes it from a
// model, a shape and a placement.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bytes.h"
#include "pipeline/step_graph.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// How a rank's shard of a unit is cut into parts, and where they lie.
struct PartGeometry {
  int64_t parameter_count = 0;  // of the shard, padding included: with one rank the unit's
  int64_t part_elements = 0;    // of all but the last
  int parts = 1;

  [[nodiscard]] int64_t first(int part) const noexcept { return part * part_elements; }
  [[nodiscard]] int64_t elements(int part) const noexcept {
    return part + 1 < parts ? part_elements : parameter_count - first(part);
  }
};

/// Where everything lies that the graphs name.
struct Buffers {
  std::vector<Buffer> all;
  std::vector<std::array<BufferId, kStateKinds>> home;  // [unit][kind]
  /// [unit]: the second buffer of a weight in host memory whose update is speculated: the new
  /// weight is written there, and when it holds, the two change roles.
  std::vector<BufferId> weight_shadow;
  std::vector<BufferId> batch, staged_batch;  // [micro-batch], device and host
  std::vector<BufferId> boundary_gradient;    // [micro-batch]
  std::vector<StateSlot> state_slots;         // host
  /// Host: one of those through which weights alone pass from NVMe, gradients alone to it.
  BufferId weight_part_slot = kNoBuffer, gradient_part_slot = kNoBuffer;
  BufferId workspace = kNoBuffer, constants = kNoBuffer;
  BufferId logits = kNoBuffer;   // [vocabulary] fp32, where there is no training
  BufferId staging = kNoBuffer;  // host: through which device-homed state is read and written
  BufferId rounded_gradient = kNoBuffer;  // what is summed over ranks, where that is not fp32
  /// Doubles: loss_sum, then one sum of squares a unit; on the host those of all ranks.
  BufferId scalars = kNoBuffer, all_scalars = kNoBuffer, host_scalars = kNoBuffer;
};

struct Plan {
  StepShape shape;
  Placement placement;
  DType dtype = DType::kBf16;
  std::vector<PartGeometry> parts;  // [unit]
  /// What has one checksum in the store. Parts begin at multiples of it in their record.
  size_t store_chunk_bytes = 0;
  Buffers buffers;
  /// Of the arenas; on NVMe: of the records' slots.
  std::array<size_t, kTiers.size()> tier_bytes{};
  StepGraph train;     // the deferred updates, forward, backward, the speculated updates
  StepGraph update;    // the deferred updates alone
  StepGraph replay;    // the speculated updates again, from the old state
  StepGraph evaluate;  // forward and loss

  [[nodiscard]] size_t bytes(Tier tier) const noexcept {
    return tier_bytes[static_cast<size_t>(tier)];
  }
  /// Bytes of one tier by purpose, padding of each buffer included.
  [[nodiscard]] std::array<size_t, kPurposes> bytes_by_purpose(Tier tier) const;

  [[nodiscard]] const Buffer& buffer(BufferId id) const {
    return buffers.all[static_cast<size_t>(id)];
  }
  [[nodiscard]] BufferId home(int unit, StateKind kind) const {
    return buffers.home[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
  }
  /// Parameters of a unit with all ranks' padding: what is gathered and reduced.
  [[nodiscard]] int64_t whole_elements(int unit) const {
    return parts[static_cast<size_t>(unit)].parameter_count * placement.ranks.shard_ranks;
  }
  /// Whether the device holds a unit's whole weight all the time, and its shard is a place in that.
  [[nodiscard]] bool is_home_whole(int unit) const {
    return placement.ranks.keeps_whole_weights() && placement.ranks.shard_ranks > 1 &&
           placement.units[static_cast<size_t>(unit)].weight == Tier::kDevice;
  }
  /// Bytes of one part of a unit's state in memory, and where it begins in the unit's.
  [[nodiscard]] size_t part_bytes(int unit, StateKind kind, int part) const;
  [[nodiscard]] size_t part_offset_bytes(int unit, StateKind kind, int part) const;
  /// Bytes from the beginning of one part to that of the next in the unit's record on NVMe.
  [[nodiscard]] size_t record_stride_bytes(int unit, StateKind kind) const;
};

/// What a task moves over its lane: link and disk lanes, and the optimizer's bytes of memory for
/// kAdam; 0 for compute.
[[nodiscard]] inline size_t moved_bytes(const Plan& /*plan*/, const Task& task) noexcept {
  return task.moved_bytes;
}

/// State of device-homed units is read and written in pieces of this size.
inline constexpr size_t kStagingBytes = size_t{1} << 20;

/// What a buffer takes up in its arena. The gap behind state keeps arrays that the optimizer walks
/// together, whose sizes tend to be multiples of large powers of two, from meeting in the same sets
/// of the caches, which costs it nearly half its speed (docs/adam.md).
inline constexpr size_t kStateGap = 3 * 4096 + 7 * kBufferAlignment;
[[nodiscard]] size_t occupied_bytes(const Buffer& buffer) noexcept;

/// Layer-major step: each unit's weight comes once a pass, meets every micro-batch, and goes.
/// Throws a usage error where the placement's parts do not go together.
[[nodiscard]] Plan build_plan(const UnitModel& model, const gpu::Operators& operators,
                              const StepShape& shape, const Placement& placement);

}  // namespace strata::pipeline
