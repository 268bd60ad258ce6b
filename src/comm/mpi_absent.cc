// In place of mpi_world.cc and mpi_communicator.cc where there is no MPI.
#include "base/error.h"
#include "comm/mpi_communicator.h"

namespace strata::comm {

bool mpi_is_built() noexcept { return false; }

RankGroups MpiWorld::create_rank_groups(int /*shard_ranks*/) { return {}; }

std::unique_ptr<MpiWorld> start_mpi() {
  throw usage_error(
      "this build has no MPI; install libopenmpi-dev and build again, or run one rank");
}

}  // namespace strata::comm
