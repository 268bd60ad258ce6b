#include "pipeline/step_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <optional>

#include "base/bytes.h"
#include "base/error.h"
#include "pipeline/batch_layout.h"

namespace strata::pipeline {
namespace {

/// Adds tasks to a graph and derives their order: a task runs after the last writer of what it
/// reads, and after the last writer and all readers since of what it writes.
class GraphBuilder {
 public:
  explicit GraphBuilder(size_t buffers) : writer_(buffers, -1), readers_(buffers) {}

  void add(Task task) {
    const auto id = static_cast<TaskId>(graph_.size());
    std::array<TaskId, kLanes> latest;
    latest.fill(-1);
    const auto follow = [&](TaskId earlier) {
      if (earlier < 0) return;
      const Lane lane = graph_[static_cast<size_t>(earlier)].lane;
      if (lane == task.lane) return;
      TaskId& last = latest[static_cast<size_t>(lane)];
      last = std::max(last, earlier);
    };
    for (const BufferId buffer : task.reads) follow(writer_[static_cast<size_t>(buffer)]);
    for (const BufferId buffer : task.writes) {
      follow(writer_[static_cast<size_t>(buffer)]);
      for (const TaskId reader : readers_[static_cast<size_t>(buffer)]) follow(reader);
    }
    for (const TaskId earlier : latest) {
      if (earlier >= 0) task.after.push_back(earlier);
    }
    for (const BufferId buffer : task.reads) readers_[static_cast<size_t>(buffer)].push_back(id);
    for (const BufferId buffer : task.writes) {
      writer_[static_cast<size_t>(buffer)] = id;
      readers_[static_cast<size_t>(buffer)].clear();
    }
    graph_.push_back(std::move(task));
  }

  [[nodiscard]] StepGraph take() { return std::move(graph_); }

 private:
  StepGraph graph_;
  std::vector<TaskId> writer_;
  std::vector<std::vector<TaskId>> readers_;
};

/// Slots that a group of units shares; the least recently used one is filled next.
struct Pool {
  std::vector<BufferId> slots;
  std::vector<int> holds;  // unit in each slot, -1 for none
  std::vector<int64_t> used_at;
};

class PlanBuilder {
 public:
  PlanBuilder(const UnitModel& model, const gpu::Operators& operators, const StepShape& shape,
              const Placement& placement)
      : model_(model), units_(model.units()), operators_(operators) {
    STRATA_CHECK(units_.size() >= 2, "a model has at least an input unit and a loss unit");
    STRATA_CHECK(placement.unit_home.size() == units_.size(), "a home for each unit");
    STRATA_CHECK(placement.slots >= 1, "at least one slot");
    plan_.shape = shape;
    plan_.placement = placement;
  }

  Plan build() {
    make_state();
    make_slots();
    make_activations();
    assign_offsets();
    if (training()) {
      plan_.update = build_graph(true, false, false);
      plan_.train = build_graph(true, true, true);
    }
    plan_.evaluate = build_graph(false, true, false);
    return std::move(plan_);
  }

 private:
  [[nodiscard]] bool training() const { return plan_.placement.training; }
  [[nodiscard]] int last_unit() const { return static_cast<int>(units_.size()) - 1; }
  [[nodiscard]] const UnitSpec& spec(int unit) const { return units_[static_cast<size_t>(unit)]; }
  [[nodiscard]] size_t parameters(int unit) const {
    return static_cast<size_t>(spec(unit).parameter_count);
  }
  [[nodiscard]] Tier home_tier(int unit) const {
    return plan_.placement.unit_home[static_cast<size_t>(unit)];
  }
  [[nodiscard]] BufferId home(int unit, StateKind kind) const {
    return plan_.buffers.home[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
  }

  BufferId add_buffer(std::string name, Tier tier, Purpose purpose, size_t size_bytes) {
    plan_.buffers.all.push_back({std::move(name), tier, purpose, size_bytes, 0});
    return static_cast<BufferId>(plan_.buffers.all.size()) - 1;
  }

  void make_state() {
    for (int unit = 0; unit <= last_unit(); ++unit) {
      auto& homes = plan_.buffers.home.emplace_back();
      homes.fill(kNoBuffer);
      for (size_t k = 0; k < kStateKinds; ++k) {
        const auto kind = static_cast<StateKind>(k);
        if (!training() && kind != StateKind::kWeight) continue;
        const size_t bytes = parameters(unit) * state_bytes(kind, model_.dtype());
        if (bytes == 0) continue;
        const Purpose purpose = kind == StateKind::kWeight     ? Purpose::kWeights
                                : kind == StateKind::kGradient ? Purpose::kGradients
                                                               : Purpose::kOptimizerState;
        homes[k] = add_buffer(fmt::format("{}.{}", spec(unit).name, name_of(kind)), home_tier(unit),
                              purpose, bytes);
      }
    }
  }

  /// Units of one group take turns in the same slots: the blocks in one group; the first and last
  /// unit, which are never needed together, in another; a tied head and what it shares apart.
  [[nodiscard]] int group_of(int unit) const {
    if (unit != 0 && unit != last_unit()) return 0;
    if (spec(last_unit()).shared_unit == 0) return unit == 0 ? 1 : 2;
    return 1;
  }

  void make_slots() {
    constexpr int kGroups = 3;
    std::array<size_t, kGroups> largest{};
    size_t accumulator = 0;
    for (int unit = 0; unit <= last_unit(); ++unit) {
      if (home_tier(unit) == Tier::kHost) {
        size_t& group = largest[static_cast<size_t>(group_of(unit))];
        group = std::max(group, parameters(unit));
      }
      if (!is_shared(unit)) accumulator = std::max(accumulator, parameters(unit));
    }
    for (int group = 0; group < kGroups; ++group) {
      const size_t count = largest[static_cast<size_t>(group)];
      const int slots = count == 0 ? 0 : group == 0 ? plan_.placement.slots : 1;
      Pool& weights = weight_pools_.emplace_back();
      Pool& gradients = gradient_pools_.emplace_back();
      for (int i = 0; i < slots; ++i) {
        weights.slots.push_back(
            add_buffer(fmt::format("weight slot {}.{}", group, i), Tier::kDevice, Purpose::kSlots,
                       count * state_bytes(StateKind::kWeight, model_.dtype())));
        if (!training()) continue;
        gradients.slots.push_back(
            add_buffer(fmt::format("gradient slot {}.{}", group, i), Tier::kDevice, Purpose::kSlots,
                       count * state_bytes(StateKind::kGradient, model_.dtype())));
      }
    }
    if (!training()) return;
    accumulator_ = add_buffer("gradient accumulator", Tier::kDevice, Purpose::kAccumulators,
                              accumulator * sizeof(float));
    for (int unit = 0; unit <= last_unit(); ++unit) {
      shared_accumulator_.push_back(
          is_shared(unit)
              ? add_buffer(fmt::format("{} gradient accumulator", spec(unit).name), Tier::kDevice,
                           Purpose::kAccumulators, parameters(unit) * sizeof(float))
              : kNoBuffer);
    }
  }

  /// Its gradient gathers from several units, so it stays on the device through the whole backward.
  [[nodiscard]] bool is_shared(int unit) const {
    return std::any_of(units_.begin(), units_.end(),
                       [&](const UnitSpec& other) { return other.shared_unit == unit; });
  }

  void make_activations() {
    const StepShape& shape = plan_.shape;
    Buffers& b = plan_.buffers;
    const size_t boundary = model_.boundary_bytes(shape.tokens);
    b.boundary.resize(units_.size());
    for (int unit = 0; unit < last_unit(); ++unit) {
      for (int64_t m = 0; m < shape.micro_batches; ++m) {
        // Without a backward pass only two generations of boundaries are alive.
        b.boundary[static_cast<size_t>(unit)].push_back(
            training() || unit < 2
                ? add_buffer(fmt::format("boundary {}.{}", unit, m), Tier::kDevice,
                             Purpose::kBoundaries, boundary)
                : b.boundary[static_cast<size_t>(unit - 2)][static_cast<size_t>(m)]);
      }
    }
    const size_t batch = batch_layout(shape).size_bytes;
    for (int64_t m = 0; m < shape.micro_batches; ++m) {
      if (training()) {
        b.boundary_gradient.push_back(add_buffer(fmt::format("boundary gradient {}", m),
                                                 Tier::kDevice, Purpose::kBoundaries, boundary));
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
      for (const UnitSpec& unit : units_) {
        workspace = std::max(
            workspace, operators_.finish_gradient_scratch_bytes({.count = unit.parameter_count}));
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
    b.host_scalars = add_buffer("host scalars", Tier::kHost, Purpose::kBatches, scalars);
  }

  void assign_offsets() {
    for (Buffer& buffer : plan_.buffers.all) {
      size_t& end = plan_.arena_bytes[static_cast<size_t>(buffer.tier)];
      buffer.offset_bytes = end;
      end += align_up(buffer.size_bytes, kBufferAlignment);
    }
  }

  /// The buffer in which compute finds the unit's weight; adds its upload where it must come first.
  BufferId bring_weight(GraphBuilder& graph, std::vector<Pool>& pools, int unit) {
    if (home_tier(unit) == Tier::kDevice) return home(unit, StateKind::kWeight);
    Pool& pool = pools[static_cast<size_t>(group_of(unit))];
    const auto held = std::find(pool.holds.begin(), pool.holds.end(), unit);
    const size_t slot =
        held != pool.holds.end()
            ? static_cast<size_t>(held - pool.holds.begin())
            : static_cast<size_t>(std::min_element(pool.used_at.begin(), pool.used_at.end()) -
                                  pool.used_at.begin());
    pool.used_at[slot] = ++clock_;
    if (held == pool.holds.end()) {
      pool.holds[slot] = unit;
      graph.add({.kind = TaskKind::kUploadWeight,
                 .lane = Lane::kUpload,
                 .unit = unit,
                 .weight = pool.slots[slot],
                 .reads = {home(unit, StateKind::kWeight)},
                 .writes = {pool.slots[slot]}});
    }
    return pool.slots[slot];
  }

  void add_update(GraphBuilder& graph, int unit) {
    Task task{.kind = TaskKind::kAdam,
              .lane = home_tier(unit) == Tier::kHost ? Lane::kCpu : Lane::kCompute,
              .unit = unit};
    for (size_t k = 0; k < kStateKinds; ++k) {
      const BufferId buffer = home(unit, static_cast<StateKind>(k));
      if (buffer == kNoBuffer) continue;
      auto& uses = static_cast<StateKind>(k) == StateKind::kGradient ? task.reads : task.writes;
      uses.push_back(buffer);
    }
    graph.add(std::move(task));
  }

  void add_finished_gradient(GraphBuilder& graph, std::vector<Pool>& pools, int unit) {
    const bool to_host = home_tier(unit) == Tier::kHost;
    BufferId gradient = home(unit, StateKind::kGradient);
    if (to_host) {
      Pool& pool = pools[static_cast<size_t>(group_of(unit))];
      const auto slot = static_cast<size_t>(
          std::min_element(pool.used_at.begin(), pool.used_at.end()) - pool.used_at.begin());
      pool.used_at[slot] = ++clock_;
      gradient = pool.slots[slot];
    }
    const BufferId accumulator = accumulator_of(unit);
    graph.add({.kind = TaskKind::kFinishGradient,
               .lane = Lane::kCompute,
               .unit = unit,
               .accumulator = accumulator,
               .gradient = gradient,
               .reads = {accumulator},
               .writes = {gradient, plan_.buffers.workspace, plan_.buffers.scalars}});
    if (!to_host) return;
    graph.add({.kind = TaskKind::kDownloadGradient,
               .lane = Lane::kDownload,
               .unit = unit,
               .gradient = gradient,
               .reads = {gradient},
               .writes = {home(unit, StateKind::kGradient)}});
  }

  [[nodiscard]] BufferId accumulator_of(int unit) const {
    const BufferId own = shared_accumulator_[static_cast<size_t>(unit)];
    return own != kNoBuffer ? own : accumulator_;
  }

  static std::vector<Pool> empty(const std::vector<Pool>& pools) {
    std::vector<Pool> fresh = pools;
    for (Pool& pool : fresh) {
      pool.holds.assign(pool.slots.size(), -1);
      pool.used_at.assign(pool.slots.size(), 0);
    }
    return fresh;
  }

  StepGraph build_graph(bool update, bool forward, bool backward) {
    const Buffers& b = plan_.buffers;
    const auto micro_batches = static_cast<int>(plan_.shape.micro_batches);
    GraphBuilder graph(b.all.size());
    std::vector<Pool> weights = empty(weight_pools_);
    std::vector<Pool> gradients = empty(gradient_pools_);
    clock_ = 0;
    if (!forward) {
      for (int unit = 0; unit <= last_unit(); ++unit) add_update(graph, unit);
      return graph.take();
    }

    graph.add({.kind = TaskKind::kClearScalars, .writes = {b.scalars}});
    for (int m = 0; m < micro_batches; ++m) {
      const auto i = static_cast<size_t>(m);
      graph.add({.kind = TaskKind::kUploadBatch,
                 .lane = Lane::kUpload,
                 .micro_batch = m,
                 .reads = {b.staged_batch[i]},
                 .writes = {b.batch[i]}});
    }
    const int shared = spec(last_unit()).shared_unit;
    std::vector<bool> gathered(units_.size(), false);  // whether an accumulator holds something
    for (int unit = 0; unit <= last_unit(); ++unit) {
      const auto u = static_cast<size_t>(unit);
      if (update) add_update(graph, unit);
      const BufferId weight = bring_weight(graph, weights, unit);
      if (unit < last_unit()) {
        for (int m = 0; m < micro_batches; ++m) {
          const auto i = static_cast<size_t>(m);
          Task task{.kind = TaskKind::kForward,
                    .unit = unit,
                    .micro_batch = m,
                    .weight = weight,
                    .reads = {weight, b.batch[i], b.constants},
                    .writes = {b.boundary[u][i], b.workspace}};
          if (unit > 0) task.reads.push_back(b.boundary[u - 1][i]);
          graph.add(std::move(task));
        }
        continue;
      }
      const BufferId shared_weight = shared >= 0 ? bring_weight(graph, weights, shared) : kNoBuffer;
      for (int m = 0; m < micro_batches; ++m) {
        const auto i = static_cast<size_t>(m);
        Task task{.kind = TaskKind::kLoss,
                  .unit = unit,
                  .micro_batch = m,
                  .weight = weight,
                  .shared_weight = shared_weight,
                  .with_backward = backward,
                  .reads = {weight, b.batch[i], b.constants, b.boundary[u - 1][i]},
                  .writes = {b.workspace, b.scalars}};
        if (shared >= 0) task.reads.push_back(shared_weight);
        if (backward) {
          task.accumulator = accumulator_of(unit);
          task.accumulate = m > 0;
          task.writes.push_back(task.accumulator);
          task.writes.push_back(b.boundary_gradient[i]);
          if (shared >= 0) {
            task.shared_accumulator = accumulator_of(shared);
            task.accumulate_shared = m > 0;
            task.writes.push_back(task.shared_accumulator);
            gathered[static_cast<size_t>(shared)] = true;
          }
        }
        graph.add(std::move(task));
      }
    }
    if (backward) {
      add_finished_gradient(graph, gradients, last_unit());
      for (int unit = last_unit() - 1; unit >= 0; --unit) {
        const auto u = static_cast<size_t>(unit);
        const bool reads_weight = spec(unit).backward_reads_weight;
        const BufferId weight = reads_weight ? bring_weight(graph, weights, unit) : kNoBuffer;
        for (int m = 0; m < micro_batches; ++m) {
          const auto i = static_cast<size_t>(m);
          Task task{.kind = TaskKind::kBackward,
                    .unit = unit,
                    .micro_batch = m,
                    .weight = weight,
                    .accumulator = accumulator_of(unit),
                    .accumulate = m > 0 || gathered[u],
                    .reads = {b.batch[i], b.constants},
                    .writes = {accumulator_of(unit), b.boundary_gradient[i], b.workspace}};
          if (reads_weight) task.reads.push_back(weight);
          if (unit > 0) task.reads.push_back(b.boundary[u - 1][i]);
          graph.add(std::move(task));
        }
        add_finished_gradient(graph, gradients, unit);
      }
    }
    graph.add({.kind = TaskKind::kDownloadScalars,
               .lane = Lane::kDownload,
               .reads = {b.scalars},
               .writes = {b.host_scalars}});
    return graph.take();
  }

  const UnitModel& model_;
  std::span<const UnitSpec> units_;
  const gpu::Operators& operators_;
  Plan plan_;
  std::vector<Pool> weight_pools_, gradient_pools_;  // [group]
  BufferId accumulator_ = kNoBuffer;
  std::vector<BufferId> shared_accumulator_;  // [unit]
  int64_t clock_ = 0;
};

}  // namespace

Placement Placement::all_on(Tier tier, size_t units, int slots) {
  return {.unit_home = std::vector<Tier>(units, tier), .slots = slots};
}

Plan build_plan(const UnitModel& model, const gpu::Operators& operators, const StepShape& shape,
                const Placement& placement) {
  return PlanBuilder(model, operators, shape, placement).build();
}

Plan choose_plan(const UnitModel& model, const gpu::Operators& operators, const StepShape& shape,
                 int slots, bool training, size_t device_bytes, size_t host_bytes) {
  const size_t units = model.units().size();
  // The last unit of forward is the first of backward, and the first waits for nothing: units enter
  // the device from both ends.
  std::vector<size_t> order;
  for (size_t i = 0; i < units; ++i) order.push_back(i % 2 == 0 ? units - 1 - i / 2 : i / 2);
  const auto with_resident = [&](size_t resident) {
    Placement placement = Placement::all_on(Tier::kHost, units, slots);
    placement.training = training;
    for (size_t i = 0; i < resident; ++i) placement.unit_home[order[i]] = Tier::kDevice;
    return build_plan(model, operators, shape, placement);
  };
  std::optional<Plan> best;
  size_t least_device = SIZE_MAX;
  size_t host_then = 0;
  for (size_t resident = 0; resident <= units; ++resident) {
    Plan plan = with_resident(resident);
    if (plan.bytes(Tier::kDevice) < least_device) {
      least_device = plan.bytes(Tier::kDevice);
      host_then = plan.bytes(Tier::kHost);
    }
    if (plan.bytes(Tier::kDevice) <= device_bytes && plan.bytes(Tier::kHost) <= host_bytes) {
      best = std::move(plan);
    }
  }
  if (best) return std::move(*best);
  throw Error(ErrorKind::kDoesNotFit,
              fmt::format("the model does not fit: the smallest plan needs {} of device memory and "
                          "{} of host memory, and {} and {} are allowed; lower micro_batch_size or "
                          "sequence_len, or allow more",
                          format_bytes(least_device), format_bytes(host_then),
                          format_bytes(device_bytes), format_bytes(host_bytes)));
}

std::string find_race(const StepGraph& graph, const Buffers& buffers) {
  // before[t] holds all tasks that have ended when t begins: the closure over lane order and
  // `after`.
  constexpr size_t kMaxTasks = 4096;
  STRATA_CHECK(graph.size() <= kMaxTasks, "find_race is for graphs of tests");
  std::vector<std::bitset<kMaxTasks>> before(graph.size());
  std::array<TaskId, kLanes> last;
  last.fill(-1);
  for (size_t t = 0; t < graph.size(); ++t) {
    const auto inherit = [&](TaskId earlier) {
      if (earlier < 0) return;
      before[t] |= before[static_cast<size_t>(earlier)];
      before[t].set(static_cast<size_t>(earlier));
    };
    inherit(last[static_cast<size_t>(graph[t].lane)]);
    for (const TaskId earlier : graph[t].after) inherit(earlier);
    last[static_cast<size_t>(graph[t].lane)] = static_cast<TaskId>(t);
  }
  const auto touches = [](const std::vector<BufferId>& list, BufferId buffer) {
    return std::find(list.begin(), list.end(), buffer) != list.end();
  };
  for (size_t late = 0; late < graph.size(); ++late) {
    for (size_t early = 0; early < late; ++early) {
      if (before[late].test(early)) continue;
      for (size_t i = 0; i < buffers.all.size(); ++i) {
        const auto buffer = static_cast<BufferId>(i);
        const bool early_writes = touches(graph[early].writes, buffer);
        const bool late_writes = touches(graph[late].writes, buffer);
        const bool both = (early_writes || touches(graph[early].reads, buffer)) &&
                          (late_writes || touches(graph[late].reads, buffer));
        if (both && (early_writes || late_writes)) {
          return fmt::format("'{}' of unit {} (task {}) and '{}' of unit {} (task {}) on {}",
                             name_of(graph[early].kind), graph[early].unit, early,
                             name_of(graph[late].kind), graph[late].unit, late,
                             buffers.all[i].name);
        }
      }
    }
  }
  return {};
}

}  // namespace strata::pipeline
