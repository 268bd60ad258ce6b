#include "pipeline/cluster.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"
#include "catch.h"
#include "gpu/host/host_device.h"
#include "pipeline/rank_formulas.h"
#include "temporary_directory.h"

namespace strata::pipeline {
namespace {

/// A model that only has sizes and costs: blocks of 3.1 M parameters.
class Blocks final : public UnitModel {
 public:
  Blocks() {
    units_.push_back(
        {.name = "embedding", .parameter_count = 1 << 20, .backward_reads_weight = false});
    for (int i = 0; i < 4; ++i) {
      units_.push_back({.name = "block", .parameter_count = 12 * kWidth * kWidth});
    }
    units_.push_back({.name = "head", .parameter_count = 1 << 20});
  }
  std::span<const UnitSpec> units() const noexcept override { return units_; }
  DType dtype() const noexcept override { return DType::kBf16; }
  size_t boundary_bytes(int64_t tokens) const noexcept override {
    return static_cast<size_t>(tokens * kWidth * 2);
  }
  size_t constants_bytes() const noexcept override { return 64; }
  void write_constants(std::span<std::byte>) const override {}
  size_t workspace_bytes(Pass, const StepShape& shape, const gpu::Operators&) const override {
    return 8 * boundary_bytes(shape.tokens);
  }
  size_t saved_bytes(int, SavedActivations, int64_t) const override { return 0; }
  double matmul_flops(int unit, Pass pass, int64_t tokens, int64_t,
                      SavedActivations) const override {
    const double passes = pass == Pass::kForward || pass == Pass::kLoss ? 1 : 3;
    return 2 * passes * static_cast<double>(tokens) *
           static_cast<double>(units_[static_cast<size_t>(unit)].parameter_count);
  }
  double other_bytes(int, Pass, int64_t, SavedActivations) const override { return 0; }
  void forward(int, const UnitCall&) const override {}
  void backward(int, const UnitCall&) const override {}
  void loss(const UnitCall&) const override {}
  void logits(const UnitCall&, int64_t, float*) const override {}
  int64_t vocabulary() const noexcept override { return 16; }

 private:
  static constexpr int64_t kWidth = 512;
  std::vector<UnitSpec> units_;
};

const gpu::Operators& operators() {
  static const auto kDevice = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB});
  return kDevice->operators();
}

const MachineProfile& machine() {
  static const MachineProfile kMachine = find_profile("h100");
  return kMachine;
}

/// All that a rank needs has room on the device, and nothing else is there.
ClusterRequest request(Sharding sharding, int ranks) {
  ClusterRequest r{.sharding = sharding, .ranks = ranks};
  r.rank.shape = {.micro_batches = 2, .tokens = 8192, .max_sequences = 4};
  r.rank.sequence_length = 2048;
  r.rank.budget = {.device_bytes = 2 * kGiB, .host_bytes = kGiB};
  r.rank.fixed.offload = Tier::kDevice;
  return r;
}

RankForecast forecast(const ClusterRequest& r, const MachineProfile& profile = machine()) {
  return forecast(Blocks(), operators(), profile, r);
}

}  // namespace

TEST_CASE("a forecast sends what the formulas say", "[cluster]") {
  const Blocks model;
  for (const Sharding sharding :
       {Sharding::kNoShard, Sharding::kShardGradOp, Sharding::kHybridShard, Sharding::kFullShard}) {
    ClusterRequest r = request(sharding, 16);
    r.rank.fixed.slots = 2;
    const RankForecast one = forecast(r);
    INFO(name_of(sharding));
    REQUIRE(one.fits);
    CHECK(one.ranks.shard_ranks == (sharding == Sharding::kNoShard       ? 1
                                    : sharding == Sharding::kHybridShard ? 8
                                                                         : 16));
    const RankedModel ranked{.units = model.units(), .ranks = one.ranks};
    const size_t most = collective_traffic(ranked, 2).total_bytes();
    if (sharding == Sharding::kNoShard || sharding == Sharding::kShardGradOp) {
      CHECK(one.collective_bytes == most);
    } else {  // whose weights may be resident, so that they are gathered once
      CHECK(one.collective_bytes <= most);
      CHECK(one.collective_bytes >= collective_traffic(ranked, 4).total_bytes());
    }
    CHECK(one.tokens == 16384);
    CHECK(one.collective_s > 0);
    CHECK(one.step_s >= std::max(one.collective_s, one.compute_s));
    CHECK(one.all_tokens_per_s() == Approx(16 * 16384 / one.step_s));
    CHECK(one.state_on_device);
  }
}

TEST_CASE("ranks scale by what their links leave to compute", "[cluster]") {
  const auto all =
      forecast_scaling(Blocks(), operators(), machine(), request(Sharding::kFullShard, 1), 64);
  REQUIRE(all.size() == 7);
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(all[i].ranks.ranks == 1 << i);
    REQUIRE(all[i].fits);
    // A rank updates what it holds, which one alone has to do for all: that may gain a little.
    CHECK(scaling_efficiency(all, i) <= 1.05);
    // What a rank holds shrinks, and the whole does not.
    if (i > 0) CHECK(all[i].all_tokens_per_s() > 0);
  }
  CHECK(all[0].collective_bytes == 0);
  CHECK(scaling_efficiency(all, 0) == 1);
  CHECK(all[6].tier_bytes[0] < all[2].tier_bytes[0]);
  CHECK(scaling_efficiency(all, 6) < scaling_efficiency(all, 3));

  // With a network as good as none, one node does not feel it and two do.
  MachineProfile slow = machine();
  slow.network_bytes_per_s = 1e7;
  const RankForecast within = forecast(request(Sharding::kFullShard, 8), slow);
  const RankForecast across = forecast(request(Sharding::kFullShard, 16), slow);
  CHECK(within.step_s == forecast(request(Sharding::kFullShard, 8)).step_s);
  CHECK(across.step_s > 5 * within.step_s);
}

TEST_CASE("a batch divided among ranks", "[cluster]") {
  ClusterRequest r = request(Sharding::kFullShard, 8);
  r.sequences = 48;  // six a rank, three at a time where four are asked
  const PlanRequest rank = rank_request(r, machine());
  CHECK(rank.shape.micro_batches == 2);
  CHECK(rank.shape.max_sequences == 3);
  CHECK(rank.shape.tokens == 3 * 2048);
  r.sequences = 50;
  CHECK(message_of([&] { (void)rank_request(r, machine()); }).find("50 sequences") !=
        std::string::npos);
  r.sequences = 4;
  const RankForecast none = forecast(r);
  CHECK(!none.fits);
  CHECK(none.why_not.find("fewer sequences") != std::string::npos);
}

TEST_CASE("links that a profile does not know are asked for before planning", "[cluster]") {
  MachineProfile unknown = machine();
  unknown.network_bytes_per_s = 0;
  CHECK(forecast(request(Sharding::kFullShard, 8), unknown).fits);
  CHECK(message_of([&] {
          (void)forecast(request(Sharding::kFullShard, 16), unknown);
        }).find("network_bytes_per_s") != std::string::npos);
  unknown.ranks_per_node = 0;
  CHECK(message_of([&] {
          (void)forecast(request(Sharding::kFullShard, 8), unknown);
        }).find("ranks_per_node") != std::string::npos);
  CHECK(forecast(request(Sharding::kFullShard, 1), unknown).fits);
}

TEST_CASE("the advice finds the least sharding by the memory there is", "[cluster]") {
  const Blocks model;
  ClusterRequest r = request(Sharding::kFullShard, 16);
  const auto advise = [&] {
    return advise_on_cluster(cluster_figures(model, operators(), machine(), r));
  };
  const ClusterFigures figures = cluster_figures(model, operators(), machine(), r);
  REQUIRE(figures.shardings.size() == 4);
  CHECK(figures.sequences == 128);
  CHECK(figures.boundary_bytes_per_token == 1024);
  // A block's whole weight, and two accumulators; its shard's gradient on the way out.
  const size_t block = 12 * 512 * 512;
  CHECK(figures.least_unit_bytes >= block * 10);
  CHECK(figures.least_unit_bytes < block * 11);
  CHECK(advise().least == 0u);

  // Between what no_shard and what the next takes.
  r.rank.budget.device_bytes =
      (figures.shardings[0].tier_bytes[0] + figures.shardings[1].tier_bytes[0]) / 2;
  CHECK(advise().least == 1u);
  // Less than one unit needs.
  r.rank.budget.device_bytes = figures.least_unit_bytes;
  const ClusterAdvice none = advise();
  CHECK(!none.least);
  REQUIRE(!none.needs.empty());
  CHECK(none.needs.front().need == Need::kTensorParallel);
}

}  // namespace strata::pipeline
