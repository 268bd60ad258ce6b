// The communicators of one rank where ranks form shard groups that are replicas of each other:
// rank = replica * shard_ranks + shard rank.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace strata::comm {

/// None is null.
struct RankGroups {
  std::unique_ptr<Communicator> world;
  std::unique_ptr<Communicator> shard;    // ranks of the same replica
  std::unique_ptr<Communicator> replica;  // the same shard rank of all replicas

  void abort() const noexcept {
    for (Communicator* group : {world.get(), shard.get(), replica.get()}) group->abort();
  }
};

}  // namespace strata::comm
