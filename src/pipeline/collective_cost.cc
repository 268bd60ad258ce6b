#include "pipeline/collective_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/error.h"

namespace strata::pipeline {
namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

double known(double figure, std::string_view key, std::string_view needed_for,
             const MachineProfile& profile) {
  if (figure > 0) return figure;
  throw usage_error(
      fmt::format("machine profile '{}' does not say '{}', which {} needs; add it to the profile's "
                  "figures",
                  profile.name, key, needed_for));
}

}  // namespace

GroupShape shard_group_shape(const RankLayout& layout, int ranks_per_node) {
  STRATA_CHECK(ranks_per_node >= 1, "a node has a rank at least");
  const int size = layout.shard_ranks;
  int nodes = 1;
  for (int first = 0; first < layout.ranks; first += size) {
    const int spanned = (first + size - 1) / ranks_per_node - first / ranks_per_node + 1;
    nodes = std::max(nodes, spanned);
  }
  return {.ranks = size, .ranks_per_node = ceil_div(size, nodes), .nodes = nodes};
}

GroupShape replica_group_shape(const RankLayout& layout, int ranks_per_node) {
  STRATA_CHECK(ranks_per_node >= 1, "a node has a rank at least");
  const int size = layout.replicas();
  const int per_node = std::clamp(ranks_per_node / layout.shard_ranks, 1, size);
  const int nodes = layout.ranks <= ranks_per_node ? 1 : std::min(size, ceil_div(size, per_node));
  return {.ranks = size, .ranks_per_node = ceil_div(size, nodes), .nodes = nodes};
}

GroupShape world_shape(const RankLayout& layout, int ranks_per_node) {
  return shard_group_shape({.ranks = layout.ranks, .shard_ranks = layout.ranks}, ranks_per_node);
}

double collective_seconds(comm::Collective collective, size_t size_bytes, const GroupShape& group,
                          const MachineProfile& profile) {
  if (group.ranks <= 1) return 0;
  const auto sent =
      static_cast<double>(comm::collective_bytes(collective, size_bytes, group.ranks));
  double bytes_s = 0;
  double within_s = 0;   // a hop
  double between_s = 0;  // a hop
  if (group.ranks_per_node > 1) {
    bytes_s = sent / known(profile.collective_bytes_per_s, "collective_bytes_per_s",
                           "more than one rank on a node", profile);
    within_s = profile.collective_latency_s;
  }
  if (group.nodes > 1) {
    const double network =
        known(profile.network_bytes_per_s, "network_bytes_per_s", "more than one node", profile);
    bytes_s = std::max(bytes_s, sent / (network * group.ranks_per_node));
    between_s = profile.network_latency_s;
  }
  const int hops = group.ranks - 1;
  const int crossings = group.nodes - 1;
  double latency_s = (hops - crossings) * within_s + crossings * between_s;
  const bool has_tree =
      collective == comm::Collective::kAllReduce || collective == comm::Collective::kBroadcast;
  if (has_tree) {
    const int levels = std::bit_width(static_cast<unsigned>(group.nodes - 1));
    latency_s = std::min(latency_s, (group.ranks_per_node - 1) * within_s + levels * between_s);
  }
  if (collective == comm::Collective::kAllReduce) latency_s *= 2;
  return profile.link_latency_s + latency_s + bytes_s;
}

MachineProfile with_assumed_links(MachineProfile profile, int ranks) {
  if (profile.ranks_per_node == 0) profile.ranks_per_node = ranks;
  for (double* speed : {&profile.collective_bytes_per_s, &profile.network_bytes_per_s}) {
    if (*speed == 0) *speed = profile.upload_bytes_per_s;
  }
  return profile;
}

int ranks_per_node_of(const MachineProfile& profile, int asked) {
  if (asked > 0) return asked;
  if (profile.ranks_per_node > 0) return profile.ranks_per_node;
  throw usage_error(fmt::format(
      "machine profile '{}' does not say 'ranks_per_node'; give --ranks-per-node", profile.name));
}

}  // namespace strata::pipeline
