// Several ranks in every sharding, their state in every tier: near one rank, and the same bits
// wherever state is.

#include <fmt/format.h>

#include <cmath>

#include "catch.h"
#include "model/rank_run.h"
#include "trials.h"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::RankLayout;
using pipeline::Sharding;
using pipeline::Tier;
using pipeline::UnitPlacement;
using pipeline::Update;

// With 8, too, there are clipped ones and the one with an infinite gradient.
constexpr int kSteps = trials(20, 8);

#ifdef __SANITIZE_THREAD__
// liburing maps its rings by system calls that ThreadSanitizer does not see: one rank's that comes
// to lie where another's has been looks like a race. Drives are in tier_placement_test.
constexpr bool kHaveDrives = false;
#else
constexpr bool kHaveDrives = true;
#endif

struct Case {
  std::string name;
  Placement placement;
};

std::vector<Case> cases(size_t units, const RankLayout& ranks) {
  std::vector<Case> all;
  const auto add = [&](std::string name, Placement placement) {
    placement.ranks = ranks;
    all.push_back({std::move(name), std::move(placement)});
  };
  add("device", Placement::all_on(Tier::kDevice, units));
  add("host", Placement::all_on(Tier::kHost, units));
  if (!kHaveDrives) return all;
  Placement nvme{.units = std::vector<UnitPlacement>(units, {.weight = Tier::kNvme,
                                                             .gradient = Tier::kNvme,
                                                             .optimizer = Tier::kNvme,
                                                             .update = Update::kSpeculated}),
                 .slots = 1,
                 .host_slots = 1};
  add("nvme speculated, one slot", nvme);
  nvme.slots = nvme.host_slots = 3;
  for (size_t unit = 0; unit < units; ++unit) {
    nvme.units[unit].weight = nvme.units[unit].gradient = Tier::kHost;
    if (unit % 2 == 0) nvme.units[unit].update = Update::kDeferred;
    if (unit == 1) nvme.units[unit] = UnitPlacement::all_on(Tier::kDevice);
    if (unit == 2) nvme.units[unit].resident_weight = true;
  }
  nvme.boundaries = Tier::kHost;
  add("all tiers at once", nvme);
  return all;
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double worst = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    // The step that is made infinite is so for all.
    if (!std::isfinite(a[i]) && !std::isfinite(b[i])) continue;
    worst = std::max(worst, std::abs(a[i] - b[i]) / std::abs(a[i]));
  }
  return worst;
}

/// Where time is short, each sharding once.
bool is_tried(int ranks, Sharding sharding) {
  if (sharding == Sharding::kHybridShard) return ranks == 4;
  if (!kSanitized) return true;
  return ranks == (sharding == Sharding::kFullShard ? 3 : 2);
}

RankRun alone_on(const LlamaConfig& config, size_t units, DType dtype) {
  RankRun alone =
      train_on_ranks(config, Placement::all_on(Tier::kDevice, units), kSteps, {.dtype = dtype});
  REQUIRE(alone.trajectory.losses.back() < alone.trajectory.losses.front());
  REQUIRE(alone.trajectory.clipped > 0);
  REQUIRE(alone.trajectory.clipped < kSteps - 1);
  return alone;
}

}  // namespace

TEST_CASE("ranks in every sharding learn what one rank learns, wherever state is") {
  const int ranks = GENERATE(2, 3, 4);
  const bool tied = ranks == 3;
  const LlamaConfig config = small_config(tied);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const RankRun alone = alone_on(config, units, DType::kBf16);
  // What differs is the order of the gradient's sum, of which bf16 makes more or less from CPU to
  // CPU: never as much as it makes of itself.
  const RankRun exact = alone_on(config, units, DType::kF32);
  const double loss_bound = worst_difference(alone.trajectory.losses, exact.trajectory.losses);
  const double eval_bound =
      worst_difference(alone.trajectory.eval_losses, exact.trajectory.eval_losses);
  std::optional<Trajectory> whole;  // of every sharding whose groups hold the state once
  for (const Sharding sharding :
       {Sharding::kNoShard, Sharding::kShardOptimizer, Sharding::kShardGradOp, Sharding::kFullShard,
        Sharding::kHybridShard}) {
    if (!is_tried(ranks, sharding)) continue;
    std::optional<Trajectory> resident;
    for (const Case& each : cases(units, RankLayout::of(sharding, ranks, 2))) {
      // The next sharding has the same graphs.
      if (sharding == Sharding::kShardOptimizer && resident) break;
      INFO(fmt::format("{} ranks, {}, {}", ranks, name_of(sharding), each.name));
      const RankRun run = train_on_ranks(config, each.placement, kSteps);
      CHECK(run.differences == std::vector<std::string>());
      if (!resident) {
        resident = run.trajectory;
        CHECK(worst_difference(alone.trajectory.losses, run.trajectory.losses) < loss_bound);
        CHECK(worst_difference(alone.trajectory.eval_losses, run.trajectory.eval_losses) <
              eval_bound);
      }
      CHECK(run.trajectory == *resident);
      CHECK(run.received_bytes == static_cast<size_t>(kSteps) * run.collective_bytes);
    }
    // Sums go from the first rank to the last, however they are divided.
    if (sharding == Sharding::kNoShard || sharding == Sharding::kHybridShard) continue;
    if (!whole) whole = resident;
    CHECK(*resident == *whole);
  }
}

TEST_CASE("ranks that compute in fp32 are as near one rank as fp32 is exact") {
  const LlamaConfig config = small_config(false);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const RankRun alone = alone_on(config, units, DType::kF32);
  for (const RankLayout& layout :
       {RankLayout::of(Sharding::kNoShard, 2), RankLayout::of(Sharding::kShardGradOp, 3),
        RankLayout::of(Sharding::kFullShard, 4), RankLayout::of(Sharding::kHybridShard, 4, 2)}) {
    INFO(fmt::format("{} ranks, {}", layout.ranks, name_of(layout.sharding)));
    Placement placement = Placement::all_on(Tier::kDevice, units);
    placement.ranks = layout;
    const RankRun run = train_on_ranks(config, placement, kSteps, {.dtype = DType::kF32});
    CHECK(run.differences == std::vector<std::string>());
    CHECK(worst_difference(alone.trajectory.losses, run.trajectory.losses) < 1e-6);
    CHECK(worst_difference(alone.trajectory.eval_losses, run.trajectory.eval_losses) < 1e-6);
    CHECK(run.trajectory.clipped == alone.trajectory.clipped);
  }
}

TEST_CASE("gradients that are summed over ranks in bf16 are near those in fp32") {
  const LlamaConfig config = small_config(false);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    Placement placement = Placement::all_on(tier, units);
    placement.ranks = RankLayout::of(Sharding::kHybridShard, 4, 2);
    const RankRun exact = train_on_ranks(config, placement, kSteps);
    placement.ranks.reduce_dtype = DType::kBf16;
    const RankRun rounded = train_on_ranks(config, placement, kSteps);
    CHECK(rounded.differences == std::vector<std::string>());
    CHECK(rounded.trajectory.losses != exact.trajectory.losses);
    CHECK(worst_difference(exact.trajectory.losses, rounded.trajectory.losses) < 3e-3);
    CHECK(rounded.collective_bytes < exact.collective_bytes);
  }
}

TEST_CASE("moments that round stochastically are the same however they are divided") {
  const LlamaConfig config = small_config(false);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  for (const cpu_adam::MomentFormat moments :
       {cpu_adam::MomentFormat::kBf16, cpu_adam::MomentFormat::kInt8}) {
    std::optional<Trajectory> whole;
    for (const Sharding sharding :
         {Sharding::kNoShard, Sharding::kShardGradOp, Sharding::kFullShard}) {
      for (const Tier tier : {Tier::kDevice, Tier::kNvme}) {
        if (tier == Tier::kNvme && (!kHaveDrives || sharding != Sharding::kFullShard)) continue;
        INFO(fmt::format("{}, {}, {}", cpu_adam::name_of(moments), name_of(sharding),
                         name_of(tier)));
        Placement placement = Placement::all_on(tier, units);
        placement.ranks = RankLayout::of(sharding, 3);
        placement.moments = moments;
        // The norm's last bits depend on the shards, and so would what is clipped by it.
        const RankRun run = train_on_ranks(config, placement, 4, {.max_grad_norm = 0});
        CHECK(run.differences == std::vector<std::string>());
        if (!whole) whole = run.trajectory;
        CHECK(run.trajectory.losses == whole->losses);
        CHECK(run.trajectory.eval_losses == whole->eval_losses);
        CHECK(run.trajectory.state == whole->state);
      }
    }
  }
}

}  // namespace strata::model
