#include "pipeline/collective_cost.h"

#include "base/error.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::pipeline {
namespace {

using comm::Collective;

/// Speeds that are easy to tell apart.
MachineProfile machine() {
  MachineProfile profile;
  profile.name = "test";
  profile.ranks_per_node = 8;
  profile.collective_bytes_per_s = 1000;
  profile.collective_latency_s = 0.01;
  profile.network_bytes_per_s = 10;
  profile.network_latency_s = 1;
  profile.link_latency_s = 0.001;
  return profile;
}

RankLayout hybrid(int ranks, int group) {
  return RankLayout::of(Sharding::kHybridShard, ranks, group);
}

}  // namespace

TEST_CASE("groups lie on nodes as ranks do") {
  const auto shape = [](int ranks, int per_node, int nodes) {
    return GroupShape{.ranks = ranks, .ranks_per_node = per_node, .nodes = nodes};
  };
  const RankLayout full = RankLayout::of(Sharding::kFullShard, 32);
  CHECK(shard_group_shape(full, 8) == shape(32, 8, 4));
  CHECK(replica_group_shape(full, 8) == shape(1, 1, 1));
  const RankLayout none = RankLayout::of(Sharding::kNoShard, 32);
  CHECK(shard_group_shape(none, 8) == shape(1, 1, 1));
  CHECK(replica_group_shape(none, 8) == shape(32, 8, 4));
  CHECK(world_shape(none, 8) == shape(32, 8, 4));
  CHECK(shard_group_shape(hybrid(32, 8), 8) == shape(8, 8, 1));
  CHECK(replica_group_shape(hybrid(32, 8), 8) == shape(4, 1, 4));
  CHECK(shard_group_shape(hybrid(32, 4), 8) == shape(4, 4, 1));
  CHECK(replica_group_shape(hybrid(32, 4), 8) == shape(8, 2, 4));
  CHECK(shard_group_shape(hybrid(32, 16), 8) == shape(16, 8, 2));
  CHECK(replica_group_shape(hybrid(32, 16), 8) == shape(2, 1, 2));
  CHECK(replica_group_shape(hybrid(8, 4), 8) == shape(2, 2, 1));
  // Groups of three on nodes of eight: the one that spans two is waited for.
  CHECK(shard_group_shape(hybrid(12, 3), 8) == shape(3, 2, 2));
  CHECK(shard_group_shape(hybrid(6, 3), 8) == shape(3, 3, 1));
}

TEST_CASE("a collective takes its bytes over the slower level of links, and hops") {
  const auto seconds = [](Collective collective, size_t bytes, const GroupShape& group) {
    return collective_seconds(collective, bytes, group, machine());
  };
  const GroupShape node{.ranks = 4, .ranks_per_node = 4, .nodes = 1};
  CHECK(seconds(Collective::kAllGather, 4000, node) == Approx(0.001 + 3 * 0.01 + 3.0));
  CHECK(seconds(Collective::kReduceScatter, 4000, node) == Approx(0.001 + 3 * 0.01 + 3.0));
  CHECK(seconds(Collective::kAllReduce, 4000, node) == Approx(0.001 + 6 * 0.01 + 6.0));
  CHECK(seconds(Collective::kBroadcast, 4000, node) == Approx(0.001 + 3 * 0.01 + 4.0));

  // Four of a node share the crossing of each boundary of nodes: 3500 / (4 * 10) > 3500 / 1000.
  const GroupShape two{.ranks = 8, .ranks_per_node = 4, .nodes = 2};
  CHECK(seconds(Collective::kAllGather, 4000, two) == Approx(0.001 + 6 * 0.01 + 1 + 87.5));
  const GroupShape apart{.ranks = 4, .ranks_per_node = 1, .nodes = 4};
  CHECK(seconds(Collective::kAllGather, 4000, apart) == Approx(0.001 + 3 + 300));

  // Over many nodes a tree has fewer hops than a ring, where there is one.
  const GroupShape many{.ranks = 1024, .ranks_per_node = 8, .nodes = 128};
  CHECK(seconds(Collective::kAllReduce, 0, many) == Approx(0.001 + 2 * (7 * 0.01 + 7)));
  CHECK(seconds(Collective::kAllGather, 0, many) == Approx(0.001 + 896 * 0.01 + 127));

  CHECK(seconds(Collective::kAllReduce, 4000, {}) == 0);
}

TEST_CASE("what a collective needs and the profile does not say is asked for by name") {
  MachineProfile profile = machine();
  profile.network_bytes_per_s = 0;
  const GroupShape node{.ranks = 8, .ranks_per_node = 8, .nodes = 1};
  const GroupShape two{.ranks = 8, .ranks_per_node = 4, .nodes = 2};
  CHECK(collective_seconds(Collective::kAllGather, 8000, node, profile) > 0);
  const std::string network =
      message_of([&] { (void)collective_seconds(Collective::kAllGather, 8000, two, profile); });
  CHECK(network.find("'test'") != std::string::npos);
  CHECK(network.find("network_bytes_per_s") != std::string::npos);
  profile.collective_bytes_per_s = 0;
  const std::string link =
      message_of([&] { (void)collective_seconds(Collective::kAllGather, 8000, node, profile); });
  CHECK(link.find("'collective_bytes_per_s'") != std::string::npos);
  CHECK(ranks_per_node_of(profile) == 8);
  CHECK(ranks_per_node_of(profile, 4) == 4);
  profile.ranks_per_node = 0;
  CHECK(message_of([&] { (void)ranks_per_node_of(profile); }).find("--ranks-per-node") !=
        std::string::npos);
}

}  // namespace strata::pipeline
