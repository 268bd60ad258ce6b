#include "pipeline/rank_formulas.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "catch.h"
#include "comm/communicator.h"
#include "gpu/host/host_device.h"
#include "pipeline/plan.h"

namespace strata::pipeline {
namespace {

using cpu_adam::MomentFormat;

constexpr size_t index(StateKind kind) { return static_cast<size_t>(kind); }

/// First unit, inner units, last unit, whose sizes no number of ranks divides.
std::vector<UnitSpec> three_blocks() {
  return {{.name = "first", .parameter_count = 1000, .backward_reads_weight = false},
          {.name = "block", .parameter_count = 5000},
          {.name = "block", .parameter_count = 5000},
          {.name = "block", .parameter_count = 5000},
          {.name = "last", .parameter_count = 1048}};
}

/// A model that only has sizes, which no number of ranks divides.
class Sized final : public UnitModel {
 public:
  Sized(int blocks, bool is_tied) {
    units_.push_back({.name = "first", .parameter_count = 70008, .backward_reads_weight = false});
    for (int i = 0; i < blocks; ++i) {
      units_.push_back({.name = "block", .parameter_count = 130072});
    }
    units_.push_back({.name = "last", .parameter_count = is_tied ? 264 : 70264});
    if (is_tied) units_.back().shared_unit = 0;
  }
  std::span<const UnitSpec> units() const noexcept override { return units_; }
  DType dtype() const noexcept override { return DType::kBf16; }
  size_t boundary_bytes(int64_t tokens) const noexcept override {
    return static_cast<size_t>(tokens) * 64;
  }
  size_t constants_bytes() const noexcept override { return 64; }
  void write_constants(std::span<std::byte>) const override {}
  size_t workspace_bytes(Pass, const StepShape&, const gpu::Operators&) const override {
    return 640;
  }
  size_t saved_bytes(int, SavedActivations, int64_t) const override { return 0; }
  double matmul_flops(int, Pass, int64_t, int64_t, SavedActivations) const override { return 1; }
  double other_bytes(int, Pass, int64_t, SavedActivations) const override { return 1; }
  void forward(int, const UnitCall&) const override {}
  void backward(int, const UnitCall&) const override {}
  void loss(const UnitCall&) const override {}
  void logits(const UnitCall&, int64_t, float*) const override {}
  int64_t vocabulary() const noexcept override { return 16; }

 private:
  std::vector<UnitSpec> units_;
};

Plan plan_of(const UnitModel& model, const Placement& placement, int64_t micro_batches = 2) {
  static const auto kDevice = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB});
  return build_plan(model, kDevice->operators(),
                    {.micro_batches = micro_batches, .tokens = 8, .max_sequences = 1}, placement);
}

/// What the graph counts; reductions, which are one task, all as scatter_bytes.
CollectiveTraffic traffic_of(const Plan& plan) {
  CollectiveTraffic traffic;
  for (const Task& task : plan.train) {
    if (task.lane != Lane::kCollective) continue;
    size_t& sum = task.kind == TaskKind::kGatherWeight     ? traffic.gather_bytes
                  : task.kind == TaskKind::kReduceGradient ? traffic.scatter_bytes
                                                           : traffic.scalar_bytes;
    sum += task.moved_bytes;
  }
  return traffic;
}

/// Bytes of the homes of a kind, of all units.
size_t home_bytes(const Plan& plan, StateKind kind) {
  size_t sum = 0;
  for (size_t unit = 0; unit < plan.parts.size(); ++unit) {
    const BufferId home = plan.home(static_cast<int>(unit), kind);
    if (home != kNoBuffer) sum += plan.buffer(home).size_bytes;
  }
  return sum;
}

size_t resident_bytes(const Plan& plan) {
  size_t sum = 0;
  for (const Buffer& buffer : plan.buffers.all) {
    if (buffer.name.find("(resident)") != std::string::npos) sum += buffer.size_bytes;
  }
  return sum;
}

void check_plan(const UnitModel& model, const Placement& placement) {
  const Plan plan = plan_of(model, placement);
  const RankedModel ranked{
      .units = model.units(), .ranks = placement.ranks, .moments = placement.moments};
  CollectiveTraffic expected = collective_traffic(ranked, found_in_slots(ranked, placement.slots));
  expected.scatter_bytes += std::exchange(expected.all_reduce_bytes, 0);
  CHECK(traffic_of(plan) == expected);

  const auto at_rest = state_at_rest_bytes(ranked);
  const bool on_device = placement.units.front().weight == Tier::kDevice;
  const size_t whole = kept_whole_weight_bytes(ranked);
  for (size_t kind = 0; kind < kStateKinds; ++kind) {
    const bool is_whole =
        static_cast<StateKind>(kind) == StateKind::kWeight && on_device && whole > 0;
    CHECK(home_bytes(plan, static_cast<StateKind>(kind)) == (is_whole ? whole : at_rest[kind]));
  }
  CHECK(resident_bytes(plan) == (on_device ? 0 : whole));
}

RankedModel model_of(const std::vector<UnitSpec>& units, Sharding sharding, int ranks,
                     int group = 1) {
  return {.units = units, .ranks = RankLayout::of(sharding, ranks, group)};
}

}  // namespace

TEST_CASE("state at rest is the shards', padded to 64 elements") {
  const std::vector<UnitSpec> units = three_blocks();
  const auto none = state_at_rest_bytes(model_of(units, Sharding::kNoShard, 3));
  CHECK(none[index(StateKind::kWeight)] == 2 * 17048);
  CHECK(none[index(StateKind::kMoment2)] == 4 * 17048);
  // 1000 / 3 -> 384, 5000 / 3 -> 1728, 1048 / 3 -> 384.
  const size_t shard = 384 + 3 * 1728 + 384;
  for (const Sharding sharding :
       {Sharding::kShardOptimizer, Sharding::kShardGradOp, Sharding::kFullShard}) {
    const auto bytes = state_at_rest_bytes(model_of(units, sharding, 3));
    CHECK(bytes[index(StateKind::kWeight)] == 2 * shard);
    CHECK(bytes[index(StateKind::kResidual)] == 2 * shard);
    CHECK(bytes[index(StateKind::kMoment1)] == 4 * shard);
    CHECK(bytes[index(StateKind::kGradient)] == 2 * shard);
  }
  CHECK(state_at_rest_bytes(model_of(units, Sharding::kHybridShard, 6, 3)) ==
        state_at_rest_bytes(model_of(units, Sharding::kFullShard, 3)));
  RankedModel rounded = model_of(units, Sharding::kFullShard, 3);
  rounded.moments = MomentFormat::kBf16;  // shards of whole chunks
  CHECK(state_at_rest_bytes(rounded)[index(StateKind::kMoment1)] == 5 * 2 * 32768);
}

TEST_CASE("only shardings that keep whole weights have them besides") {
  const std::vector<UnitSpec> units = three_blocks();
  const size_t padded = 3 * (384 + 3 * 1728 + 384);
  CHECK(kept_whole_weight_bytes(model_of(units, Sharding::kShardOptimizer, 3)) == 2 * padded);
  CHECK(kept_whole_weight_bytes(model_of(units, Sharding::kShardGradOp, 3)) == 2 * padded);
  CHECK(kept_whole_weight_bytes(model_of(units, Sharding::kShardGradOp, 1)) == 0);
  CHECK(kept_whole_weight_bytes(model_of(units, Sharding::kFullShard, 3)) == 0);
  CHECK(kept_whole_weight_bytes(model_of(units, Sharding::kNoShard, 3)) == 0);
}

TEST_CASE("collective bytes follow from what is gathered and reduced") {
  const std::vector<UnitSpec> units = three_blocks();
  const size_t first = 384, block = 1728, last = 384;  // elements of a shard; others send twice it
  const size_t once = 2 * (first + 3 * block + last);
  const size_t reduced = 4 * once;

  const auto none = collective_traffic(model_of(units, Sharding::kNoShard, 3), 0);
  CHECK(none.gather_bytes == 0);
  CHECK(none.scatter_bytes == 0);
  size_t all_reduced = 0;
  for (const UnitSpec& unit : units) {
    all_reduced += 2 * (static_cast<size_t>(unit.parameter_count) * 4 * 2 / 3);
  }
  CHECK(none.all_reduce_bytes == all_reduced);

  for (const Sharding sharding : {Sharding::kShardOptimizer, Sharding::kShardGradOp}) {
    const auto kept = collective_traffic(model_of(units, sharding, 3), 0);
    CHECK(kept.gather_bytes == 2 * once);
    CHECK(kept.scatter_bytes == reduced);
    CHECK(kept.all_reduce_bytes == 0);
  }

  // Blocks come twice; two of them are still there when backward begins.
  const auto full = collective_traffic(model_of(units, Sharding::kFullShard, 3), 0);
  CHECK(full.gather_bytes == 2 * (once + 2 * 3 * block));
  CHECK(full.scatter_bytes == reduced);
  const auto found = collective_traffic(model_of(units, Sharding::kFullShard, 3), 2);
  CHECK(found.gather_bytes == 2 * (once + 2 * block));

  const auto hybrid = collective_traffic(model_of(units, Sharding::kHybridShard, 12, 3), 2);
  CHECK(hybrid.gather_bytes == found.gather_bytes);
  CHECK(hybrid.scatter_bytes == found.scatter_bytes);
  CHECK(hybrid.all_reduce_bytes == 2 * (first + 3 * block + last) * 4 * 3 / 4);

  RankedModel rounded = model_of(units, Sharding::kFullShard, 3);
  rounded.ranks.reduce_dtype = DType::kBf16;
  CHECK(collective_traffic(rounded, 0).scatter_bytes == reduced / 2);
  CHECK(collective_traffic(model_of(units, Sharding::kFullShard, 1), 0).total_bytes() == 0);
  CHECK(full.scalar_bytes == 6 * 8 * 2);  // the loss and five norms, of two others
}

TEST_CASE("the textbook's three passes are the limit of full_shard, padding aside") {
  const int64_t block = 1 << 16;
  std::vector<UnitSpec> units(1, {.name = "first", .parameter_count = block});
  units.resize(50, {.name = "block", .parameter_count = block});
  units.push_back({.name = "last", .parameter_count = block});
  RankedModel model = model_of(units, Sharding::kFullShard, 32);
  model.ranks.reduce_dtype = DType::kBf16;
  const double pass = 2.0 * 51 * static_cast<double>(block) * 31 / 32;
  // The last unit is gathered once, since its loss is forward and backward at once.
  const CollectiveTraffic traffic = collective_traffic(model, 0);
  CHECK(static_cast<double>(traffic.total_bytes() - traffic.scalar_bytes) ==
        Approx(pass * (3 - 1.0 / 51)));
}

TEST_CASE("a plan's ledger and graph come to the formulas, on every tier", "[ranks]") {
  for (const bool is_tied : {false, true}) {
    Sized model(6, is_tied);
    for (const auto& [sharding, ranks, group] :
         {std::tuple(Sharding::kNoShard, 3, 1), std::tuple(Sharding::kShardOptimizer, 3, 1),
          std::tuple(Sharding::kShardGradOp, 4, 1), std::tuple(Sharding::kFullShard, 2, 1),
          std::tuple(Sharding::kFullShard, 3, 1), std::tuple(Sharding::kHybridShard, 6, 3),
          std::tuple(Sharding::kFullShard, 1, 1)}) {
      for (const Tier tier : kTiers) {
        for (const int slots : {1, 2, 3}) {
          for (const DType reduce : {DType::kF32, DType::kBf16}) {
            for (const MomentFormat moments : {MomentFormat::kF32, MomentFormat::kInt8}) {
              Placement placement = Placement::all_on(tier, model.units().size(), slots);
              placement.ranks = RankLayout::of(sharding, ranks, group, reduce);
              placement.moments = moments;
              CAPTURE(is_tied, name_of(sharding), ranks, name_of(tier), slots, name_of(reduce));
              check_plan(model, placement);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("collective bytes of a step do not depend on its micro-batches", "[ranks]") {
  const Sized model(4, false);
  Placement placement = Placement::all_on(Tier::kHost, model.units().size());
  placement.ranks = RankLayout::of(Sharding::kFullShard, 4);
  CHECK(traffic_of(plan_of(model, placement, 1)) == traffic_of(plan_of(model, placement, 5)));
}

}  // namespace strata::pipeline
