// Seconds of one collective on the links of a machine profile. Pure functions; any thread.
//
// The model is the one by which NCCL chooses its algorithms (its src/graph/tuning.cc), without the
// corrections for protocols: a time for beginning, a latency for each hop of the algorithm's
// longest chain, and bytes over the slower of two levels of links. Rings for all-gather and
// reduce-scatter; for all-reduce and broadcast the better of a ring and a tree.
#pragma once

#include <cstddef>

#include "comm/communicator.h"
#include "pipeline/machine_profile.h"
#include "pipeline/sharding.h"

namespace strata::pipeline {

/// How the ranks of a communicator lie on nodes.
struct GroupShape {
  int ranks = 1;
  int ranks_per_node = 1;  // of this group, on each of its nodes
  int nodes = 1;

  friend bool operator==(const GroupShape&, const GroupShape&) = default;
};

/// Shapes where ranks fill nodes in order, `ranks_per_node` to a node. Where groups differ, of one
/// that spans the most nodes: the step waits for it.
[[nodiscard]] GroupShape shard_group_shape(const RankLayout& layout, int ranks_per_node);
/// Of the ranks that hold the same shard: one of each shard group.
[[nodiscard]] GroupShape replica_group_shape(const RankLayout& layout, int ranks_per_node);
/// Of all ranks.
[[nodiscard]] GroupShape world_shape(const RankLayout& layout, int ranks_per_node);

/// With S the bytes of comm::collective_bytes that a rank sends, D ranks, k of them on each of n
/// nodes:
///  - bytes: the larger of S / collective_bytes_per_s within nodes (0 where k = 1) and
///    S / (k network_bytes_per_s) between them (0 where n = 1): as many rings as ranks on a node
///    cross each boundary of nodes, each through another rank's network link;
///  - ring: D - 1 hops, n - 1 of them (n > 1) network_latency_s, the others
///    collective_latency_s; twice that for all-reduce;
///  - tree (all-reduce twice, broadcast once): k - 1 hops within and ceil(log2 n) between nodes;
///  - link_latency_s to begin.
/// `size_bytes` as in comm::collective_bytes. Throws a usage error that names the profile and the
/// figure where the group needs links that it does not know. 0 for one rank.
[[nodiscard]] double collective_seconds(comm::Collective collective, size_t size_bytes,
                                        const GroupShape& group, const MachineProfile& profile);

/// The profile with what it does not know of links between ranks assumed: as fast as upload, all
/// ranks on one node. For runs, which must not be refused for want of a figure.
[[nodiscard]] MachineProfile with_assumed_links(MachineProfile profile, int ranks);

/// Ranks on a node: `asked`, or where that is 0 the profile's. Throws a usage error where neither
/// says.
[[nodiscard]] int ranks_per_node_of(const MachineProfile& profile, int asked = 0);

}  // namespace strata::pipeline
