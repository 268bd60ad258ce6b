// Ranks on CUDA devices, their groups by NCCL: the same bits wherever state is, and near what ranks
// on host devices learn and what one CUDA device does. On the emulated device with a stand-in for
// NCCL, and on as many real devices.
#include <fmt/format.h>

#include <cmath>

#include "catch.h"
#include "comm/nccl_ranks.h"
#include "model/rank_run.h"
#ifdef STRATA_EMULATED
#include "comm/nccl_stand_in.h"
#include "cuda_emulator/emulator.h"
#endif

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::RankLayout;
using pipeline::Sharding;
using pipeline::Tier;

// Each is a second of the emulator or two.
constexpr int kSteps = 2;
constexpr int kMicroBatches = 4;

OpenRank cuda_ranks(const RankLayout& layout) {
  const auto invitations = std::make_shared<comm::Invitations>(layout.ranks);
  return [invitations, shard_ranks = layout.shard_ranks](int rank) {
    RankPlace place{.device = comm::create_rank_device(rank), .groups = {}};
    place.groups =
        comm::create_nccl_rank_groups(*place.device, invitations->options(rank), shard_ranks);
    return place;
  };
}

LlamaConfig shallow_config() {
  LlamaConfig config = small_config(false);
  config.num_hidden_layers = 2;
  return config;
}

RankRun train(const RankLayout& layout, Tier home, const MakeRanks& ranks) {
  const LlamaConfig config = shallow_config();
  Placement placement = Placement::all_on(home, static_cast<size_t>(config.num_hidden_layers) + 2);
  placement.ranks = layout;
  return train_on_ranks(config, placement, kSteps,
                        {.micro_batches = kMicroBatches, .ranks = ranks});
}

void check_near(const std::vector<double>& values, const std::vector<double>& expected,
                double tolerance) {
  REQUIRE(values.size() == expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK(std::abs(values[i] - expected[i]) <= tolerance * std::abs(expected[i]));
  }
}

/// What differs is the order of sums, and then what bf16 makes of it.
void check_near(const Trajectory& run, const Trajectory& expected) {
  REQUIRE(run.losses.size() == kSteps);
  REQUIRE(run.eval_losses.size() == 1);
  check_near(run.losses, expected.losses, 1e-3);
  check_near(run.eval_losses, expected.eval_losses, 1e-3);
  check_near(run.norms, expected.norms, 4e-3);
}

}  // namespace

TEST_CASE("cuda ranks: placements give the same bits, near those of the host and of one rank",
          "[cuda]") {
  const bool four = GENERATE(false, true);
  const int ranks = four ? 4 : 2;
  const int available = comm::nccl_ranks(ranks);
  if (available == 0) return;
  if (available < ranks) {
    WARN("skipped: " << ranks << " ranks need as many CUDA devices, and there are " << available);
    return;
  }
#ifdef STRATA_EMULATED
  gpu::cuda::emulator::reset();
#endif
  const Trajectory alone = train(RankLayout{}, Tier::kDevice, cuda_ranks).trajectory;
  std::optional<Trajectory> of_two;
  for (const Sharding sharding : four ? std::vector{Sharding::kHybridShard}
                                      : std::vector{Sharding::kFullShard, Sharding::kShardGradOp}) {
    INFO(fmt::format("{} ranks, {}", ranks, name_of(sharding)));
    const RankLayout layout = RankLayout::of(sharding, ranks, 2);
    const RankRun resident = train(layout, Tier::kDevice, cuda_ranks);
    CHECK(resident.differences == std::vector<std::string>());
    CHECK(resident.collective_bytes > 0);
    const RankRun offloaded = train(layout, Tier::kHost, cuda_ranks);
    CHECK(offloaded.differences == std::vector<std::string>());
    CHECK(offloaded.trajectory == resident.trajectory);
    CHECK(offloaded.device_bytes < resident.device_bytes);
    check_near(resident.trajectory, alone);
    check_near(resident.trajectory, train(layout, Tier::kDevice, host_ranks).trajectory);
    if (four) continue;
    // A sum of two is the same in any order.
    if (!of_two) of_two = resident.trajectory;
    CHECK(resident.trajectory == *of_two);
  }
#ifdef STRATA_EMULATED
  CHECK(gpu::cuda::emulator::diagnoses() == std::vector<std::string>());
  CHECK(comm::nccl_stand_in::alive() == 0);
  CHECK(comm::nccl_stand_in::aborted() == 0);
#endif
}

}  // namespace strata::model
