#include "pipeline/cluster_advice.h"

#include <algorithm>

#include "base/bytes.h"
#include "catch.h"

namespace strata::pipeline {
namespace {

RankForecast forecast(Sharding sharding, double step_s, bool on_device, double collective_s = 0.5) {
  return {.ranks = RankLayout::of(sharding, 16, 8),
          .fits = true,
          .state_on_device = on_device,
          .collective_bytes = kGiB,
          .tokens = 1000,
          .step_s = step_s,
          .compute_s = 1,
          .collective_s = collective_s};
}

/// A cluster that lacks nothing.
ClusterFigures figures() {
  return {.ranks = 16,
          .ranks_per_node = 8,
          .sequences = 64,
          .units = 34,
          .device_bytes = 10 * kGiB,
          .least_unit_bytes = 2 * kGiB,
          .least_activation_bytes = kGiB,
          .boundary_bytes_per_token = 8192,
          .state_bytes = 100 * kGiB,
          .state_budget_bytes = 20 * kGiB,
          .shardings = {{.ranks = RankLayout::of(Sharding::kNoShard, 16), .why_not = "too small"},
                        forecast(Sharding::kShardGradOp, 2, false),
                        forecast(Sharding::kHybridShard, 1.2, true),
                        forecast(Sharding::kFullShard, 1.5, true)}};
}

const ClusterNeed* find(const ClusterAdvice& advice, Need need) {
  const auto found = std::find_if(advice.needs.begin(), advice.needs.end(),
                                  [&](const ClusterNeed& one) { return one.need == need; });
  return found == advice.needs.end() ? nullptr : &*found;
}

bool says(const ClusterNeed* need, std::string_view words) {
  return need != nullptr && need->reason.find(words) != std::string::npos;
}

}  // namespace

TEST_CASE("the least sharding that is enough, and the fastest") {
  const ClusterAdvice advice = advise_on_cluster(figures());
  CHECK(advice.least == 1u);
  CHECK(advice.least_without_offload == 2u);
  CHECK(advice.fastest == 2u);
  CHECK(advice.needs.empty());
}

TEST_CASE("a unit that fits no device needs tensor parallelism") {
  ClusterFigures f = figures();
  f.least_unit_bytes = 25 * kGiB;
  const ClusterAdvice advice = advise_on_cluster(f);
  REQUIRE(advice.needs.size() == 1);
  CHECK(says(find(advice, Need::kTensorParallel), "3 devices"));
  CHECK(says(find(advice, Need::kTensorParallel), "26.0 GiB"));
}

TEST_CASE("state for which a rank has no room asks for more ranks") {
  ClusterFigures f = figures();
  f.shardings = {{.ranks = RankLayout::of(Sharding::kFullShard, 16)}};
  f.state_budget_bytes = 5 * kGiB;
  const ClusterAdvice advice = advise_on_cluster(f);
  CHECK(!advice.least);
  CHECK(!advice.fastest);
  CHECK(says(find(advice, Need::kMoreRanks), "20 ranks"));
}

TEST_CASE("fewer sequences than ranks are told") {
  ClusterFigures f = figures();
  f.sequences = 6;
  const ClusterAdvice advice = advise_on_cluster(f);
  CHECK(says(find(advice, Need::kFewerRanks), "6 sequences for 16 ranks"));
  CHECK(says(find(advice, Need::kFewerRanks), "let 3 ranks share"));
}

TEST_CASE("links that bound the step are told with the tokens that would balance them") {
  ClusterFigures f = figures();
  f.shardings = {forecast(Sharding::kFullShard, 3, true, 2.5)};
  const ClusterAdvice advice = advise_on_cluster(f);
  CHECK(says(find(advice, Need::kMoreTokens), "about 2500 tokens a rank (2.5 times"));
  CHECK(says(find(advice, Need::kTensorParallel), "8000 tokens together"));
  // 2 nodes, 2 * 2 * 1000 * 8192 bytes of boundaries.
  CHECK(says(find(advice, Need::kPipelineParallel), "31.2 MiB"));
  // Boundaries that are more than what is sent now are no help.
  f.boundary_bytes_per_token = kMiB;
  CHECK(find(advise_on_cluster(f), Need::kPipelineParallel) == nullptr);
  // Nor are fewer units than stages.
  f.boundary_bytes_per_token = 8192;
  f.units = 1;
  CHECK(find(advise_on_cluster(f), Need::kPipelineParallel) == nullptr);
  // One node has no stages.
  f = figures();
  f.ranks = 8;
  f.shardings = {forecast(Sharding::kFullShard, 3, true, 2.5)};
  CHECK(find(advise_on_cluster(f), Need::kPipelineParallel) == nullptr);
}

}  // namespace strata::pipeline
