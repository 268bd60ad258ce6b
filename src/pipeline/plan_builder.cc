// Builds plans: first every buffer, then the graphs that name them.

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "comm/communicator.h"
#include "pipeline/batch_layout.h"
#include "pipeline/plan.h"
#include "pipeline/pool.h"

namespace strata::pipeline {
namespace {

constexpr int kGroups = 3;
constexpr std::array kOptimizerKinds{StateKind::kResidual, StateKind::kMoment1,
                                     StateKind::kMoment2};

/// A weight on its way to the device.
struct Arrival {
  int unit = -1;
  BufferId buffer = kNoBuffer;
  std::optional<size_t> slot{};  // of its group's pool, held
  int next_part = 0;             // whose upload is to be added next
  bool is_gathered = true;       // from all ranks of the shard group
};

/// An activation on the device.
struct Activation {
  BufferId buffer = kNoBuffer;
  std::optional<size_t> slot{};  // of its pool, held
};

class PlanBuilder {
 public:
  PlanBuilder(const UnitModel& model, const gpu::Operators& operators, const StepShape& shape,
              const Placement& placement)
      : model_(model), units_(model.units()), operators_(operators) {
    STRATA_CHECK(units_.size() >= 2, "a model has at least an input unit and a loss unit");
    check(placement, units_.size());
    plan_.shape = shape;
    plan_.placement = placement;
    plan_.dtype = model.dtype();
  }

  Plan build() {
    cut_into_parts();
    make_state();
    make_device_slots();
    make_host_slots();
    make_boundaries();
    make_saved_activations();
    make_batches_and_workspace();
    assign_offsets();
    if (training()) {
      plan_.train = build_step(true);
      plan_.update = build_update();
      plan_.replay = build_replay();
    }
    plan_.evaluate = build_step(false);
    return std::move(plan_);
  }

 private:
  [[nodiscard]] bool training() const { return plan_.placement.training; }
  [[nodiscard]] int last_unit() const { return static_cast<int>(units_.size()) - 1; }
  [[nodiscard]] int micro_batches() const { return static_cast<int>(plan_.shape.micro_batches); }
  [[nodiscard]] const UnitSpec& spec(int unit) const { return units_[static_cast<size_t>(unit)]; }
  [[nodiscard]] const UnitPlacement& at(int unit) const {
    return plan_.placement.units[static_cast<size_t>(unit)];
  }
  [[nodiscard]] const RankLayout& ranks() const { return plan_.placement.ranks; }
  [[nodiscard]] bool is_sharded() const { return ranks().shard_ranks > 1; }
  /// Parameters of this rank's shard, and of all ranks' together.
  [[nodiscard]] size_t shard_parameters(int unit) const {
    return static_cast<size_t>(plan_.parts[static_cast<size_t>(unit)].parameter_count);
  }
  [[nodiscard]] size_t whole_parameters(int unit) const {
    return static_cast<size_t>(plan_.whole_elements(unit));
  }
  /// Whether compute reads a copy of the weight, not its home.
  [[nodiscard]] bool is_brought(int unit) const {
    return at(unit).weight != Tier::kDevice || (is_sharded() && !plan_.is_home_whole(unit));
  }
  [[nodiscard]] int parts(int unit) const { return plan_.parts[static_cast<size_t>(unit)].parts; }
  [[nodiscard]] BufferId home(int unit, StateKind kind) const { return plan_.home(unit, kind); }
  [[nodiscard]] Tier home_tier(int unit, StateKind kind) const {
    if (kind == StateKind::kWeight) return at(unit).weight;
    return kind == StateKind::kGradient ? at(unit).gradient : at(unit).optimizer;
  }
  [[nodiscard]] bool speculated(int unit) const {
    return training() && at(unit).update == Update::kSpeculated;
  }
  /// Gradients that no replay will ask for end with their part's update.
  [[nodiscard]] bool keeps_gradient(int unit) const {
    return training() && (plan_.placement.clipping || !speculated(unit));
  }

  BufferId add_buffer(Buffer buffer) {
    plan_.buffers.all.push_back(std::move(buffer));
    return static_cast<BufferId>(plan_.buffers.all.size()) - 1;
  }
  BufferId add_buffer(std::string name, Tier tier, Purpose purpose, size_t size_bytes) {
    return add_buffer(
        {.name = std::move(name), .tier = tier, .purpose = purpose, .size_bytes = size_bytes});
  }

  // --- Buffers ------------------------------------------------------------------------------

  void cut_into_parts() {
    int64_t largest = 0;  // part that drives move
    for (int unit = 0; unit <= last_unit(); ++unit) {
      const int64_t count =
          shard_elements(spec(unit).parameter_count, ranks().shard_ranks, plan_.placement.moments);
      const int64_t asked = plan_.placement.part_elements;
      PartGeometry geometry{.parameter_count = count, .part_elements = count};
      if (at(unit).weight != Tier::kDevice && asked > 0 && asked < count) {
        geometry.part_elements = asked;
        geometry.parts = static_cast<int>((count + asked - 1) / asked);
      }
      if (at(unit).optimizer == Tier::kNvme || at(unit).weight == Tier::kNvme) {
        largest = std::max(largest, geometry.part_elements);
      }
      plan_.parts.push_back(geometry);
    }
    // The smallest arrays of a part have two bytes a parameter.
    plan_.store_chunk_bytes =
        std::clamp(std::bit_floor(static_cast<size_t>(2 * largest)), kDriveAlignment, kMiB);
  }

  void make_state() {
    for (int unit = 0; unit <= last_unit(); ++unit) {
      auto& homes = plan_.buffers.home.emplace_back();
      homes.fill(kNoBuffer);
      BufferId shadow = kNoBuffer;
      for (size_t k = 0; k < kStateKinds; ++k) {
        const auto kind = static_cast<StateKind>(k);
        if (!training() && kind != StateKind::kWeight) continue;
        if (kind == StateKind::kGradient && !keeps_gradient(unit)) continue;
        const bool is_whole = kind == StateKind::kWeight && plan_.is_home_whole(unit);
        const size_t count = is_whole ? whole_parameters(unit) : shard_parameters(unit);
        const size_t bytes =
            state_bytes(kind, static_cast<int64_t>(count), plan_.dtype, plan_.placement.moments);
        if (bytes == 0) continue;
        Buffer buffer{.name = fmt::format("{}.{}", spec(unit).name, name_of(kind)),
                      .tier = home_tier(unit, kind),
                      .purpose = kind == StateKind::kWeight     ? Purpose::kWeights
                                 : kind == StateKind::kGradient ? Purpose::kGradients
                                                                : Purpose::kOptimizerState,
                      .size_bytes = bytes,
                      .parts = parts(unit)};
        if (buffer.tier == Tier::kNvme) {
          const int last = parts(unit) - 1;
          buffer.size_bytes = static_cast<size_t>(last) * plan_.record_stride_bytes(unit, kind) +
                              plan_.part_bytes(unit, kind, last);
          buffer.two_slots = speculated(unit) && kind != StateKind::kGradient;
        } else if (kind == StateKind::kWeight && buffer.tier == Tier::kHost && speculated(unit)) {
          Buffer other = buffer;
          other.name += " (shadow)";
          shadow = add_buffer(std::move(other));
        }
        homes[k] = add_buffer(std::move(buffer));
      }
      plan_.buffers.weight_shadow.push_back(shadow);
    }
  }

  /// Units of one group take turns in the same slots: the blocks in one group; the first and last
  /// unit, which are never needed together, in another; a tied head and what it shares apart. Where
  /// memory is so short that there is one slot, all share that, but for a tied head.
  [[nodiscard]] int group_of(int unit) const {
    if (unit != 0 && unit != last_unit()) return 0;
    if (spec(last_unit()).shared_unit == 0) return unit == 0 ? 1 : 2;
    return plan_.placement.slots == 1 ? 0 : 1;
  }

  void make_device_slots() {
    std::array<size_t, kGroups> largest_weight{}, largest_gradient{};
    std::array<int, kGroups> most_parts{};
    size_t accumulator = 0;
    for (int unit = 0; unit <= last_unit(); ++unit) {
      const auto group = static_cast<size_t>(group_of(unit));
      const auto raise = [](size_t& largest, size_t count) { largest = std::max(largest, count); };
      most_parts[group] = std::max(most_parts[group], parts(unit));
      BufferId resident = kNoBuffer;
      if (is_brought(unit) && (at(unit).resident_weight || ranks().keeps_whole_weights())) {
        resident = add_buffer({.name = fmt::format("{}.weight (resident)", spec(unit).name),
                               .tier = Tier::kDevice,
                               .purpose = Purpose::kSlots,
                               .size_bytes = whole_parameters(unit) * size_of(plan_.dtype),
                               .parts = parts(unit)});
      } else if (is_brought(unit)) {
        raise(largest_weight[group], whole_parameters(unit));
      }
      resident_.push_back(resident);
      if (at(unit).gradient != Tier::kDevice) {
        raise(largest_gradient[group], shard_parameters(unit));
      }
      if (!is_shared(unit)) raise(accumulator, whole_parameters(unit));
    }
    for (size_t group = 0; group < kGroups; ++group) {
      const auto make = [&](std::string_view what, size_t count, Pool& pool) {
        const int slots = count == 0 ? 0 : group == 0 ? plan_.placement.slots : 1;
        for (int i = 0; i < slots; ++i) {
          pool.add(add_buffer({.name = fmt::format("{} slot {}.{}", what, group, i),
                               .tier = Tier::kDevice,
                               .purpose = Purpose::kSlots,
                               .size_bytes = count * size_of(plan_.dtype),
                               .parts = most_parts[group]}));
        }
      };
      make("weight", largest_weight[group], weight_pools_[group]);
      if (training()) make("gradient", largest_gradient[group], gradient_pools_[group]);
    }
    if (!training()) return;
    // Two where one is summed over ranks while backward goes on with the next.
    const int accumulators = ranks().ranks > 1 ? 2 : 1;
    for (int i = 0; i < accumulators; ++i) {
      accumulators_.push_back(add_buffer(fmt::format("gradient accumulator {}", i), Tier::kDevice,
                                         Purpose::kAccumulators, accumulator * sizeof(float)));
    }
    if (rounds_before_reduction()) {
      size_t largest = 0;
      for (int unit = 0; unit <= last_unit(); ++unit) {
        largest = std::max(largest, whole_parameters(unit));
      }
      plan_.buffers.rounded_gradient =
          add_buffer("rounded gradient", Tier::kDevice, Purpose::kAccumulators,
                     largest * size_of(ranks().reduce_dtype));
    }
    for (int unit = 0; unit <= last_unit(); ++unit) {
      shared_accumulator_.push_back(
          is_shared(unit)
              ? add_buffer(fmt::format("{} gradient accumulator", spec(unit).name), Tier::kDevice,
                           Purpose::kAccumulators, whole_parameters(unit) * sizeof(float))
              : kNoBuffer);
    }
  }

  [[nodiscard]] bool rounds_before_reduction() const {
    return ranks().ranks > 1 && ranks().reduce_dtype != DType::kF32;
  }

  /// Its gradient gathers from several units, so it stays on the device through the whole backward.
  [[nodiscard]] bool is_shared(int unit) const {
    return std::any_of(units_.begin(), units_.end(),
                       [&](const UnitSpec& other) { return other.shared_unit == unit; });
  }

  /// Memory for one part of a kind, of whichever unit has most to move between host and NVMe.
  [[nodiscard]] size_t slot_bytes(StateKind kind, bool (PlanBuilder::*passes)(int) const) const {
    size_t most = 0;
    for (int unit = 0; unit <= last_unit(); ++unit) {
      if ((this->*passes)(unit)) most = std::max(most, plan_.record_stride_bytes(unit, kind));
    }
    return most;
  }
  [[nodiscard]] bool optimizer_on_nvme(int unit) const {
    return training() && at(unit).optimizer == Tier::kNvme;
  }
  [[nodiscard]] bool weight_on_nvme(int unit) const { return at(unit).weight == Tier::kNvme; }
  [[nodiscard]] bool updates_weight_on_nvme(int unit) const {
    return optimizer_on_nvme(unit) && weight_on_nvme(unit);
  }
  /// Gradients that pass through host memory on their way to NVMe or to a speculated update.
  [[nodiscard]] bool gradient_passes(int unit) const {
    return training() && at(unit).gradient != Tier::kDevice &&
           (at(unit).gradient == Tier::kNvme || !keeps_gradient(unit));
  }
  /// Gradients that the optimizer reads back from NVMe.
  [[nodiscard]] bool gradient_returns(int unit) const {
    return training() && at(unit).gradient == Tier::kNvme && keeps_gradient(unit);
  }

  BufferId add_host_slot(std::string name, size_t size_bytes) {
    if (size_bytes == 0) return kNoBuffer;
    return add_buffer({.name = std::move(name),
                       .tier = Tier::kHost,
                       .purpose = Purpose::kSlots,
                       .size_bytes = align_up(size_bytes, kDriveAlignment),
                       .alignment_bytes = kDriveAlignment});
  }

  void make_host_slots() {
    std::array<size_t, kStateKinds> bytes{};
    for (const StateKind kind : kOptimizerKinds) {
      bytes[static_cast<size_t>(kind)] = slot_bytes(kind, &PlanBuilder::optimizer_on_nvme);
    }
    bytes[static_cast<size_t>(StateKind::kWeight)] =
        slot_bytes(StateKind::kWeight, &PlanBuilder::updates_weight_on_nvme);
    bytes[static_cast<size_t>(StateKind::kGradient)] =
        slot_bytes(StateKind::kGradient, &PlanBuilder::gradient_returns);
    const size_t weight = slot_bytes(StateKind::kWeight, &PlanBuilder::weight_on_nvme);
    const size_t gradient = slot_bytes(StateKind::kGradient, &PlanBuilder::gradient_passes);
    for (int i = 0; i < plan_.placement.host_slots; ++i) {
      StateSlot slot;
      bool any = false;
      for (size_t k = 0; k < kStateKinds; ++k) {
        slot[k] = add_host_slot(
            fmt::format("state slot {}.{}", i, name_of(static_cast<StateKind>(k))), bytes[k]);
        any = any || slot[k] != kNoBuffer;
      }
      if (any) {
        plan_.buffers.state_slots.push_back(slot);
        state_pool_.add(static_cast<BufferId>(plan_.buffers.state_slots.size()) - 1);
      }
      if (weight > 0) {
        plan_.buffers.weight_part_slot =
            add_host_slot(fmt::format("weight part slot {}", i), weight);
        weight_part_pool_.add(plan_.buffers.weight_part_slot);
      }
      if (gradient > 0) {
        plan_.buffers.gradient_part_slot =
            add_host_slot(fmt::format("gradient part slot {}", i), gradient);
        gradient_part_pool_.add(plan_.buffers.gradient_part_slot);
      }
    }
  }

  /// Where boundaries rest in this plan: without a backward pass nothing has to rest.
  [[nodiscard]] Tier boundary_tier() const {
    return training() ? plan_.placement.boundaries : Tier::kDevice;
  }
  /// Whether the boundary after a unit is read again in backward: the loss unit does both at once.
  [[nodiscard]] bool boundary_returns(int unit) const { return unit < last_unit() - 1; }

  void make_boundaries() {
    const size_t bytes = model_.boundary_bytes(plan_.shape.tokens);
    const Tier tier = boundary_tier();
    boundary_home_.resize(units_.size());
    for (int unit = 0; unit < last_unit(); ++unit) {
      for (int m = 0; m < micro_batches(); ++m) {
        BufferId id = kNoBuffer;
        if (tier != Tier::kDevice) {
          if (boundary_returns(unit)) {
            id = add_buffer(fmt::format("boundary {}.{}", unit, m), tier, Purpose::kBoundaries,
                            bytes);
          }
        } else if (training() || unit < 2) {
          id =
              add_buffer(fmt::format("boundary {}.{}", unit, m), tier, Purpose::kBoundaries, bytes);
        } else {
          // Without a backward pass only two generations of boundaries are alive.
          id = boundary_home_[static_cast<size_t>(unit - 2)][static_cast<size_t>(m)];
        }
        boundary_home_[static_cast<size_t>(unit)].push_back(id);
      }
    }
    if (tier == Tier::kDevice) return;
    for (int i = 0; i < micro_batches() + plan_.placement.activation_slots; ++i) {
      boundary_pool_.add(add_buffer(fmt::format("boundary slot {}", i), Tier::kDevice,
                                    Purpose::kBoundaries, bytes));
    }
    if (tier != Tier::kNvme) return;
    for (int i = 0; i < plan_.placement.host_slots; ++i) {
      boundary_host_pool_.add(add_host_slot(fmt::format("boundary host slot {}", i), bytes));
    }
  }

  [[nodiscard]] size_t saved_bytes(int unit) const {
    return training() ? model_.saved_bytes(unit, at(unit).saved, plan_.shape.tokens) : 0;
  }

  void make_saved_activations() {
    const Tier tier = plan_.placement.saved_activations;
    saved_home_.resize(units_.size());
    size_t most = 0;
    for (int unit = 0; unit <= last_unit(); ++unit) {
      const size_t bytes = saved_bytes(unit);
      most = std::max(most, bytes);
      for (int m = 0; m < micro_batches(); ++m) {
        saved_home_[static_cast<size_t>(unit)].push_back(
            bytes == 0 ? kNoBuffer
                       : add_buffer(fmt::format("saved {}.{}", unit, m), tier,
                                    Purpose::kSavedActivations, bytes));
      }
    }
    if (tier == Tier::kDevice || most == 0) return;
    for (int i = 0; i < plan_.placement.activation_slots; ++i) {
      saved_pool_.add(add_buffer(fmt::format("saved slot {}", i), Tier::kDevice,
                                 Purpose::kSavedActivations, most));
    }
    if (tier != Tier::kNvme) return;
    for (int i = 0; i < plan_.placement.host_slots; ++i) {
      saved_host_pool_.add(add_host_slot(fmt::format("saved host slot {}", i), most));
    }
  }

  void make_batches_and_workspace() {
    const StepShape& shape = plan_.shape;
    Buffers& b = plan_.buffers;
    const size_t batch = batch_layout(shape).size_bytes;
    for (int m = 0; m < micro_batches(); ++m) {
      if (training()) {
        b.boundary_gradient.push_back(add_buffer(fmt::format("boundary gradient {}", m),
                                                 Tier::kDevice, Purpose::kBoundaries,
                                                 model_.boundary_bytes(shape.tokens)));
      }
      b.batch.push_back(
          add_buffer(fmt::format("batch {}", m), Tier::kDevice, Purpose::kBatches, batch));
      b.staged_batch.push_back(
          add_buffer(fmt::format("staged batch {}", m), Tier::kHost, Purpose::kBatches, batch));
    }
    size_t workspace = 0;
    for (const Pass pass : {Pass::kForward, Pass::kBackward, Pass::kLoss, Pass::kLossAndBackward}) {
      const bool backward = pass == Pass::kBackward || pass == Pass::kLossAndBackward;
      if (backward && !training()) continue;
      workspace = std::max(workspace, model_.workspace_bytes(pass, shape, operators_));
    }
    if (training()) {
      for (int unit = 0; unit <= last_unit(); ++unit) {
        const auto count = static_cast<int64_t>(shard_parameters(unit));
        workspace = std::max(workspace, operators_.finish_gradient_scratch_bytes({.count = count}));
      }
    }
    b.workspace = add_buffer("workspace", Tier::kDevice, Purpose::kWorkspace, workspace);
    b.constants =
        add_buffer("constants", Tier::kDevice, Purpose::kConstants, model_.constants_bytes());
    if (!training()) {
      b.logits = add_buffer("logits", Tier::kDevice, Purpose::kWorkspace,
                            static_cast<size_t>(model_.vocabulary()) * sizeof(float));
    }
    b.staging = add_buffer("staging", Tier::kHost, Purpose::kBatches, kStagingBytes);
    const size_t scalars = (1 + units_.size()) * sizeof(double);
    b.scalars = add_buffer("scalars", Tier::kDevice, Purpose::kBatches, scalars);
    const auto all = scalars * static_cast<size_t>(ranks().ranks);
    b.all_scalars = ranks().ranks > 1
                        ? add_buffer("scalars of all ranks", Tier::kDevice, Purpose::kBatches, all)
                        : b.scalars;
    b.host_scalars = add_buffer("host scalars", Tier::kHost, Purpose::kBatches, all);
  }

  /// What drives read and write comes first: its sizes are multiples of its alignment, so that no
  /// padding is needed that the ledger would not see.
  void assign_offsets() {
    for (const size_t alignment : {kDriveAlignment, kBufferAlignment}) {
      for (Buffer& buffer : plan_.buffers.all) {
        if (buffer.alignment_bytes != alignment) continue;
        size_t& end = plan_.tier_bytes[static_cast<size_t>(buffer.tier)];
        buffer.offset_bytes = end;
        end += occupied_bytes(buffer);
      }
    }
  }

  // --- Graphs -------------------------------------------------------------------------------

  /// Begins to bring a unit's weight, if a slot is free, or finds it there.
  std::optional<Arrival> begin_arrival(int unit) {
    const auto u = static_cast<size_t>(unit);
    Arrival arrival{.unit = unit};
    if (plan_.is_home_whole(unit) || resident_[u] != kNoBuffer) {
      arrival.buffer = resident_[u] != kNoBuffer ? resident_[u] : home(unit, StateKind::kWeight);
      arrival.next_part = arrived_[u] || plan_.is_home_whole(unit) ? parts(unit) : 0;
      arrival.is_gathered = arrived_[u] || !is_sharded();
      arrived_[u] = true;
      return arrival;
    }
    if (!is_brought(unit)) {
      arrival.buffer = home(unit, StateKind::kWeight);
      arrival.next_part = parts(unit);
      return arrival;
    }
    Pool& pool = weight_pools_[static_cast<size_t>(group_of(unit))];
    if (const auto slot = pool.find(unit)) {
      pool.hold(*slot);
      arrival.slot = slot;
      arrival.next_part = parts(unit);
    } else if (pool.has_free()) {
      arrival.slot = pool.take(unit);
      arrival.is_gathered = !is_sharded();
    } else {
      return std::nullopt;
    }
    arrival.buffer = pool.buffer(*arrival.slot);
    return arrival;
  }

  /// Adds the uploads of its parts before `end`, and behind the last of them the gather; `update`
  /// runs the deferred update of each first.
  void bring_parts(GraphBuilder& graph, Arrival& arrival, int end, bool update) {
    const int unit = arrival.unit;
    const bool from_device = at(unit).weight == Tier::kDevice;
    for (; arrival.next_part < std::min(end, parts(unit)); ++arrival.next_part) {
      if (from_device) continue;
      const int part = arrival.next_part;
      BufferId source = home(unit, StateKind::kWeight);
      int source_part = part;
      if (update) {
        const StateSlot* slot = add_update(graph, unit, part, false);
        if (weight_on_nvme(unit)) {
          source = (*slot)[static_cast<size_t>(StateKind::kWeight)];
          source_part = Use::kWhole;
        }
      } else if (weight_on_nvme(unit)) {
        const size_t slot = weight_part_pool_.take(Pool::kNothing);
        source = weight_part_pool_.buffer(slot);
        source_part = Use::kWhole;
        StateSlot into = no_slot();
        into[static_cast<size_t>(StateKind::kWeight)] = source;
        add_state_move(graph, TaskKind::kReadState, Lane::kReadWeight, unit, part,
                       kind_bit(StateKind::kWeight), into, false);
        weight_part_pool_.release(slot);
      }
      graph.add({.kind = TaskKind::kUploadWeight,
                 .lane = Lane::kUpload,
                 .unit = unit,
                 .part = part,
                 .weight = arrival.buffer,
                 .source = source,
                 .moved_bytes = plan_.part_bytes(unit, StateKind::kWeight, part),
                 .reads = {{source, source_part}},
                 .writes = {{arrival.buffer, part}}});
    }
    if (arrival.is_gathered || arrival.next_part < parts(unit)) return;
    arrival.is_gathered = true;
    // From this rank's place in the whole, or where the shard rests.
    const BufferId source = from_device ? home(unit, StateKind::kWeight) : arrival.buffer;
    const size_t size_bytes = whole_parameters(unit) * size_of(plan_.dtype);
    graph.add({.kind = TaskKind::kGatherWeight,
               .lane = Lane::kCollective,
               .unit = unit,
               .weight = arrival.buffer,
               .source = source,
               .moved_bytes = comm::collective_bytes(comm::Collective::kAllGather, size_bytes,
                                                     ranks().shard_ranks),
               .reads = {{source}},
               .writes = {{arrival.buffer}}});
  }

  /// In forward: all of a weight, after its deferred update where there is one.
  void finish_arrival(GraphBuilder& graph, Arrival& arrival, bool training_pass) {
    const int unit = arrival.unit;
    const bool update = training_pass && !speculated(unit);
    if (update && at(unit).optimizer == Tier::kDevice) add_update(graph, unit, 0, false);
    bring_parts(graph, arrival, parts(unit), update);
  }

  void end_use(const Arrival& arrival) {
    if (arrival.slot) {
      weight_pools_[static_cast<size_t>(group_of(arrival.unit))].release(*arrival.slot);
    }
  }

  static StateSlot no_slot() {
    StateSlot slot;
    slot.fill(kNoBuffer);
    return slot;
  }

  /// Between a unit's records and a slot.
  void add_state_move(GraphBuilder& graph, TaskKind kind, Lane lane, int unit, int part,
                      KindSet kinds, const StateSlot& slot, bool speculated) {
    Task task{.kind = kind,
              .lane = lane,
              .unit = unit,
              .part = part,
              .kinds = kinds,
              .slot = slot,
              .speculated = speculated};
    for (size_t k = 0; k < kStateKinds; ++k) {
      const auto state = static_cast<StateKind>(k);
      if (!contains(kinds, state)) continue;
      const Use record{home(unit, state), part};
      const Use memory{slot[k]};
      const bool is_read = kind == TaskKind::kReadState;
      task.reads.push_back(is_read ? record : memory);
      // What is speculated leaves what is committed as it was, for those who still read it.
      if (is_read || !speculated) task.writes.push_back(is_read ? memory : record);
      task.moved_bytes += plan_.part_bytes(unit, state, part);
    }
    graph.add(std::move(task));
  }

  [[nodiscard]] KindSet updated_on_nvme(int unit) const {
    KindSet kinds = 0;
    for (const StateKind kind :
         {StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1, StateKind::kMoment2}) {
      if (home(unit, kind) != kNoBuffer && home_tier(unit, kind) == Tier::kNvme) {
        kinds = static_cast<KindSet>(kinds | kind_bit(kind));
      }
    }
    return kinds;
  }

  /// The optimizer's step on one part, with its reads and writes on NVMe. `gradient_slot`: where a
  /// gradient that has just arrived lies, if not at home. Returns the slot it worked in, if any.
  const StateSlot* add_update(GraphBuilder& graph, int unit, int part, bool speculated,
                              BufferId gradient_slot = kNoBuffer) {
    Task task{.kind = TaskKind::kAdam,
              .lane = at(unit).optimizer == Tier::kDevice ? Lane::kCompute : Lane::kCpu,
              .unit = unit,
              .part = part,
              .slot = no_slot(),
              .speculated = speculated};
    const StateSlot* slot = nullptr;
    std::optional<size_t> held;
    const KindSet on_nvme = updated_on_nvme(unit);
    if (on_nvme != 0) {
      held = state_pool_.take(Pool::kNothing);
      slot = &plan_.buffers.state_slots[static_cast<size_t>(state_pool_.buffer(*held))];
      KindSet kinds = on_nvme;
      const bool fetch_gradient = gradient_slot == kNoBuffer && gradient_returns(unit);
      if (fetch_gradient) kinds = static_cast<KindSet>(kinds | kind_bit(StateKind::kGradient));
      add_state_move(graph, TaskKind::kReadState, Lane::kReadState, unit, part, kinds, *slot,
                     speculated);
      for (size_t k = 0; k < kStateKinds; ++k) {
        if (contains(kinds, static_cast<StateKind>(k))) task.slot[k] = (*slot)[k];
      }
    }
    if (gradient_slot != kNoBuffer) {
      task.slot[static_cast<size_t>(StateKind::kGradient)] = gradient_slot;
    }
    for (size_t k = 0; k < kStateKinds; ++k) {
      const auto kind = static_cast<StateKind>(k);
      const bool read_only = kind == StateKind::kGradient;
      const bool in_slot = task.slot[k] != kNoBuffer;
      if (!in_slot && home(unit, kind) == kNoBuffer) continue;
      const Use use = in_slot ? Use{task.slot[k]} : Use{home(unit, kind), part};
      const size_t bytes = plan_.part_bytes(unit, kind, part);
      task.moved_bytes += read_only ? bytes : 2 * bytes;
      if (read_only) {
        task.reads.push_back(use);
      } else if (!in_slot && speculated) {
        task.reads.push_back(use);
        task.writes.push_back({plan_.buffers.weight_shadow[static_cast<size_t>(unit)], part});
      } else {
        task.writes.push_back(use);
      }
    }
    graph.add(std::move(task));
    if (on_nvme != 0) {
      add_state_move(graph, TaskKind::kWriteState, Lane::kWrite, unit, part, on_nvme, *slot,
                     speculated);
      state_pool_.release(*held);
    }
    return slot;
  }

  [[nodiscard]] BufferId accumulator_of(int unit) const {
    const BufferId own = shared_accumulator_[static_cast<size_t>(unit)];
    if (own != kNoBuffer) return own;
    return accumulators_[static_cast<size_t>(unit) % accumulators_.size()];
  }

  /// A unit's backward is complete. Its gradient is summed over ranks while the next unit's
  /// backward runs, and finished behind that: compute does not wait for what ranks send.
  void end_backward(GraphBuilder& graph, int unit) {
    if (ranks().ranks == 1) {
      add_finished_gradient(graph, unit);
      return;
    }
    finish_reduced(graph);
    add_reduction(graph, unit);
    reduced_ = unit;
  }
  void finish_reduced(GraphBuilder& graph) {
    if (reduced_) add_finished_gradient(graph, *reduced_);
    reduced_.reset();
  }

  /// Sums what backward has accumulated over ranks; finish_gradient then reads this rank's shard.
  void add_reduction(GraphBuilder& graph, int unit) {
    const BufferId accumulator = accumulator_of(unit);
    BufferId summed = accumulator;
    const DType dtype = ranks().reduce_dtype;
    if (rounds_before_reduction()) {
      summed = plan_.buffers.rounded_gradient;
      graph.add({.kind = TaskKind::kRoundGradient,
                 .unit = unit,
                 .accumulator = accumulator,
                 .destination = summed,
                 .writes = {{accumulator}, {summed}}});
    }
    using comm::Collective;
    const size_t shard_bytes = shard_parameters(unit) * size_of(dtype);
    const size_t moved =
        comm::collective_bytes(Collective::kReduceScatter, whole_parameters(unit) * size_of(dtype),
                               ranks().shard_ranks) +
        comm::collective_bytes(Collective::kAllReduce, shard_bytes, ranks().replicas());
    graph.add({.kind = TaskKind::kReduceGradient,
               .lane = Lane::kCollective,
               .unit = unit,
               .accumulator = summed,
               .moved_bytes = moved,
               .writes = {{summed}}});
  }

  void add_finished_gradient(GraphBuilder& graph, int unit) {
    const bool leaves = at(unit).gradient != Tier::kDevice;
    Pool& pool = gradient_pools_[static_cast<size_t>(group_of(unit))];
    std::optional<size_t> held;
    BufferId gradient = home(unit, StateKind::kGradient);
    if (leaves) {
      held = pool.take(Pool::kNothing);
      gradient = pool.buffer(*held);
    }
    const BufferId accumulator = accumulator_of(unit);
    Task finish{.kind = TaskKind::kFinishGradient,
                .lane = Lane::kCompute,
                .unit = unit,
                .accumulator = accumulator,
                .gradient = gradient,
                .reads = {{accumulator}},
                .writes = {{gradient}, {plan_.buffers.workspace}, {plan_.buffers.scalars}}};
    if (rounds_before_reduction()) {
      finish.source = plan_.buffers.rounded_gradient;
      finish.reads = {{finish.source}};
      finish.writes.push_back({accumulator});
    }
    graph.add(std::move(finish));
    if (!leaves) return;
    for (int part = 0; part < parts(unit); ++part) {
      const bool passes = gradient_passes(unit);
      std::optional<size_t> host_slot;
      BufferId destination = home(unit, StateKind::kGradient);
      if (passes) {
        host_slot = gradient_part_pool_.take(Pool::kNothing);
        destination = gradient_part_pool_.buffer(*host_slot);
      }
      graph.add({.kind = TaskKind::kDownloadGradient,
                 .lane = Lane::kDownload,
                 .unit = unit,
                 .part = part,
                 .gradient = gradient,
                 .destination = destination,
                 .moved_bytes = plan_.part_bytes(unit, StateKind::kGradient, part),
                 .reads = {{gradient, part}},
                 .writes = {{destination, passes ? Use::kWhole : part}}});
      if (gradient_returns(unit)) {
        StateSlot from = no_slot();
        from[static_cast<size_t>(StateKind::kGradient)] = destination;
        add_state_move(graph, TaskKind::kWriteState, Lane::kWrite, unit, part,
                       kind_bit(StateKind::kGradient), from, false);
      }
      if (speculated(unit)) {
        add_update(graph, unit, part, true, passes ? destination : kNoBuffer);
      }
      if (host_slot) gradient_part_pool_.release(*host_slot);
    }
    pool.release(*held);
  }

  /// Where forward puts an activation.
  static Activation new_activation(BufferId home, Pool& pool, int64_t key) {
    if (pool.size() == 0) return {.buffer = home};
    const size_t slot = pool.take(key);
    return {.buffer = pool.buffer(slot), .slot = slot};
  }

  /// From the device to the activation's home, if it has one elsewhere.
  void send_home(GraphBuilder& graph, const Activation& activation, BufferId home, Pool& host_pool,
                 int unit, int m, size_t bytes) {
    if (!activation.slot || home == kNoBuffer) return;
    const bool to_nvme = plan_.buffer(home).tier == Tier::kNvme;
    std::optional<size_t> held;
    BufferId destination = home;
    if (to_nvme) {
      held = host_pool.take(Pool::kNothing);
      destination = host_pool.buffer(*held);
    }
    graph.add({.kind = TaskKind::kDownloadActivation,
               .lane = Lane::kDownload,
               .unit = unit,
               .micro_batch = m,
               .source = activation.buffer,
               .destination = destination,
               .moved_bytes = bytes,
               .reads = {{activation.buffer}},
               .writes = {{destination}}});
    if (!to_nvme) return;
    graph.add({.kind = TaskKind::kWriteActivation,
               .lane = Lane::kWrite,
               .unit = unit,
               .micro_batch = m,
               .source = destination,
               .destination = home,
               .moved_bytes = bytes,
               .reads = {{destination}},
               .writes = {{home}}});
    host_pool.release(*held);
  }

  /// The activation on the device again.
  Activation bring(GraphBuilder& graph, BufferId home, Pool& pool, Pool& host_pool, int64_t key,
                   int unit, int m, size_t bytes) {
    if (home == kNoBuffer) return {};
    if (pool.size() == 0) return {.buffer = home};
    if (const auto slot = pool.find(key)) {
      pool.hold(*slot);
      return {.buffer = pool.buffer(*slot), .slot = slot};
    }
    const size_t slot = pool.take(key);
    const bool from_nvme = plan_.buffer(home).tier == Tier::kNvme;
    std::optional<size_t> held;
    BufferId source = home;
    if (from_nvme) {
      held = host_pool.take(Pool::kNothing);
      source = host_pool.buffer(*held);
      graph.add({.kind = TaskKind::kReadActivation,
                 .lane = Lane::kReadWeight,
                 .unit = unit,
                 .micro_batch = m,
                 .source = home,
                 .destination = source,
                 .moved_bytes = bytes,
                 .reads = {{home}},
                 .writes = {{source}}});
    }
    graph.add({.kind = TaskKind::kUploadActivation,
               .lane = Lane::kUpload,
               .unit = unit,
               .micro_batch = m,
               .source = source,
               .destination = pool.buffer(slot),
               .moved_bytes = bytes,
               .reads = {{source}},
               .writes = {{pool.buffer(slot)}}});
    if (held) host_pool.release(*held);
    return {.buffer = pool.buffer(slot), .slot = slot};
  }

  static void release(const Activation& activation, Pool& pool) {
    if (activation.slot) pool.release(*activation.slot);
  }

  [[nodiscard]] int64_t key_of(int unit, int m) const {
    return static_cast<int64_t>(unit) * micro_batches() + m;
  }

  void add_forward(GraphBuilder& graph, int unit, const Arrival& weight, bool training_pass) {
    const Buffers& b = plan_.buffers;
    const auto u = static_cast<size_t>(unit);
    for (int m = 0; m < micro_batches(); ++m) {
      const auto i = static_cast<size_t>(m);
      const Activation output =
          new_activation(boundary_home_[u][i], boundary_pool_, key_of(unit, m));
      Task task{.kind = TaskKind::kForward,
                .unit = unit,
                .micro_batch = m,
                .weight = weight.buffer,
                .output = output.buffer,
                .reads = {{weight.buffer}, {b.batch[i]}, {b.constants}},
                .writes = {{output.buffer}, {b.workspace}}};
      if (unit > 0) {
        task.input = boundary_[i].buffer;
        task.reads.push_back({task.input});
      }
      Activation saved;
      if (training_pass && saved_bytes(unit) > 0) {
        saved = new_activation(saved_home_[u][i], saved_pool_, key_of(unit, m));
        task.saved = saved.buffer;
        task.level = at(unit).saved;
        task.writes.push_back({saved.buffer});
      }
      graph.add(std::move(task));
      if (training_pass && boundary_returns(unit)) {
        send_home(graph, output, boundary_home_[u][i], boundary_host_pool_, unit, m,
                  model_.boundary_bytes(plan_.shape.tokens));
      }
      if (training_pass) {
        send_home(graph, saved, saved_home_[u][i], saved_host_pool_, unit, m, saved_bytes(unit));
      }
      release(saved, saved_pool_);
      release(boundary_[i], boundary_pool_);
      boundary_[i] = output;
    }
  }

  void add_loss(GraphBuilder& graph, const Arrival& weight, const Arrival& shared_weight,
                bool backward) {
    const Buffers& b = plan_.buffers;
    const int unit = last_unit();
    const int shared = spec(unit).shared_unit;
    for (int m = 0; m < micro_batches(); ++m) {
      const auto i = static_cast<size_t>(m);
      Task task{.kind = TaskKind::kLoss,
                .unit = unit,
                .micro_batch = m,
                .weight = weight.buffer,
                .shared_weight = shared_weight.buffer,
                .input = boundary_[i].buffer,
                .with_backward = backward,
                .reads = {{weight.buffer}, {b.batch[i]}, {b.constants}, {boundary_[i].buffer}},
                .writes = {{b.workspace}, {b.scalars}}};
      if (shared >= 0) task.reads.push_back({shared_weight.buffer});
      if (backward) {
        task.accumulator = accumulator_of(unit);
        task.accumulate = m > 0;
        task.writes.push_back({task.accumulator});
        task.writes.push_back({b.boundary_gradient[i]});
        if (shared >= 0) {
          task.shared_accumulator = accumulator_of(shared);
          task.accumulate_shared = m > 0;
          task.writes.push_back({task.shared_accumulator});
        }
      }
      graph.add(std::move(task));
      release(boundary_[i], boundary_pool_);
      boundary_[i] = {};
    }
  }

  void add_backward(GraphBuilder& graph) {
    const Buffers& b = plan_.buffers;
    const int shared = spec(last_unit()).shared_unit;
    std::optional<Arrival> ahead;  // the next unit's weight
    for (int unit = last_unit() - 1; unit >= 0; --unit) {
      const auto u = static_cast<size_t>(unit);
      Arrival weight;
      if (spec(unit).backward_reads_weight) {
        weight = ahead ? *ahead : *begin_arrival(unit);
        bring_parts(graph, weight, parts(unit), false);
      }
      ahead.reset();
      const int next = unit - 1;
      if (next >= 0 && spec(next).backward_reads_weight) ahead = begin_arrival(next);
      for (int m = 0; m < micro_batches(); ++m) {
        const auto i = static_cast<size_t>(m);
        Activation input;
        if (unit > 0) {
          input = bring(graph, boundary_home_[u - 1][i], boundary_pool_, boundary_host_pool_,
                        key_of(next, m), next, m, model_.boundary_bytes(plan_.shape.tokens));
        }
        const Activation saved = bring(graph, saved_home_[u][i], saved_pool_, saved_host_pool_,
                                       key_of(unit, m), unit, m, saved_bytes(unit));
        // The next weight comes between the activations of this unit, so that neither waits for
        // all of the other.
        if (ahead) bring_parts(graph, *ahead, parts(next) * (m + 1) / micro_batches(), false);
        Task task{.kind = TaskKind::kBackward,
                  .unit = unit,
                  .micro_batch = m,
                  .weight = weight.buffer,
                  .accumulator = accumulator_of(unit),
                  .input = input.buffer,
                  .saved = saved.buffer,
                  .level = saved.buffer == kNoBuffer ? SavedActivations::kNone : at(unit).saved,
                  .accumulate = m > 0 || unit == shared,
                  .reads = {{b.batch[i]}, {b.constants}},
                  .writes = {{accumulator_of(unit)}, {b.boundary_gradient[i]}, {b.workspace}}};
        if (weight.buffer != kNoBuffer) task.reads.push_back({weight.buffer});
        if (input.buffer != kNoBuffer) task.reads.push_back({input.buffer});
        if (saved.buffer != kNoBuffer) task.writes.push_back({saved.buffer});
        graph.add(std::move(task));
        release(input, boundary_pool_);
        release(saved, saved_pool_);
      }
      end_use(weight);
      end_backward(graph, unit);
    }
    finish_reduced(graph);
  }

  void forget() {
    for (Pool& pool : weight_pools_) pool.forget();
    for (Pool& pool : gradient_pools_) pool.forget();
    for (Pool* pool : {&state_pool_, &weight_part_pool_, &gradient_part_pool_, &boundary_pool_,
                       &boundary_host_pool_, &saved_pool_, &saved_host_pool_}) {
      pool->forget();
    }
    arrived_.assign(units_.size(), false);
    boundary_.assign(static_cast<size_t>(micro_batches()), {});
  }

  /// Forward and loss; in training the deferred updates ahead of each unit, and backward.
  StepGraph build_step(bool training_pass) {
    forget();
    const Buffers& b = plan_.buffers;
    GraphBuilder graph(b.all);
    graph.add({.kind = TaskKind::kClearScalars, .writes = {{b.scalars}}});
    for (int m = 0; m < micro_batches(); ++m) {
      const auto i = static_cast<size_t>(m);
      graph.add({.kind = TaskKind::kUploadBatch,
                 .lane = Lane::kUpload,
                 .micro_batch = m,
                 .moved_bytes = batch_layout(plan_.shape).size_bytes,
                 .reads = {{b.staged_batch[i]}},
                 .writes = {{b.batch[i]}}});
    }
    std::optional<Arrival> ahead;  // the next unit's weight
    for (int unit = 0; unit <= last_unit(); ++unit) {
      Arrival weight = ahead ? *ahead : *begin_arrival(unit);
      if (!ahead) finish_arrival(graph, weight, training_pass);
      ahead.reset();
      // Ranks send each other what compute has just updated: with it behind this unit's forward
      // pass, the next one would wait for both.
      if (is_sharded() && unit < last_unit()) ahead = begin_arrival(unit + 1);
      if (ahead) finish_arrival(graph, *ahead, training_pass);
      if (unit < last_unit()) {
        add_forward(graph, unit, weight, training_pass);
        end_use(weight);
        continue;
      }
      const int shared = spec(unit).shared_unit;
      Arrival shared_weight;
      if (shared >= 0) {
        shared_weight = *begin_arrival(shared);
        bring_parts(graph, shared_weight, parts(shared), false);
      }
      add_loss(graph, weight, shared_weight, training_pass);
      end_use(weight);
      if (shared >= 0) end_use(shared_weight);
    }
    if (training_pass) {
      end_backward(graph, last_unit());
      add_backward(graph);
    }
    if (ranks().ranks > 1) {
      graph.add(
          {.kind = TaskKind::kGatherScalars,
           .lane = Lane::kCollective,
           .moved_bytes = comm::collective_bytes(
               comm::Collective::kAllGather, plan_.buffer(b.all_scalars).size_bytes, ranks().ranks),
           .reads = {{b.scalars}},
           .writes = {{b.all_scalars}}});
    }
    graph.add({.kind = TaskKind::kDownloadScalars,
               .lane = Lane::kDownload,
               .moved_bytes = plan_.buffer(b.all_scalars).size_bytes,
               .reads = {{b.all_scalars}},
               .writes = {{b.host_scalars}}});
    return graph.take();
  }

  StepGraph build_update() {
    forget();
    GraphBuilder graph(plan_.buffers.all);
    for (int unit = 0; unit <= last_unit(); ++unit) {
      if (speculated(unit)) continue;
      for (int part = 0; part < parts(unit); ++part) add_update(graph, unit, part, false);
    }
    return graph.take();
  }

  StepGraph build_replay() {
    forget();
    GraphBuilder graph(plan_.buffers.all);
    for (int unit = 0; unit <= last_unit(); ++unit) {
      if (!speculated(unit) || !keeps_gradient(unit)) continue;
      for (int part = 0; part < parts(unit); ++part) add_update(graph, unit, part, true);
    }
    return graph.take();
  }

  const UnitModel& model_;
  std::span<const UnitSpec> units_;
  const gpu::Operators& operators_;
  Plan plan_;
  // Device slots, by group of units.
  std::array<Pool, kGroups> weight_pools_, gradient_pools_;
  std::vector<BufferId> resident_;  // [unit]
  std::vector<bool> arrived_;       // [unit]: in this graph, where the whole weight then stays
  // Host slots between NVMe and the rest. state_pool_ holds indices of Buffers::state_slots.
  Pool state_pool_, weight_part_pool_, gradient_part_pool_;
  std::vector<std::vector<BufferId>> boundary_home_, saved_home_;  // [unit][micro-batch]
  Pool boundary_pool_, boundary_host_pool_, saved_pool_, saved_host_pool_;
  std::vector<Activation> boundary_;          // [micro-batch]: the one that forward has come to
  std::vector<BufferId> accumulators_;        // units take turns
  std::optional<int> reduced_;                // the unit whose gradient is being summed over ranks
  std::vector<BufferId> shared_accumulator_;  // [unit]
};

}  // namespace

Plan build_plan(const UnitModel& model, const gpu::Operators& operators, const StepShape& shape,
                const Placement& placement) {
  return PlanBuilder(model, operators, shape, placement).build();
}

}  // namespace strata::pipeline
