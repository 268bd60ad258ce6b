// Ranks as processes that mpirun (or a resource manager with MPI) has started, on host devices.
//
// Data goes from memory to memory by point-to-point messages in pieces of bounded size, so that
// sizes have no limit, what is sent is known to the byte, and a rank that waits sleeps and can be
// told to stop; MPI's own collectives would spin on a core that computation needs. Sums are those
// of sum_in_order (ordered_sum.h): the same bits as with threads as ranks.
//
// Where the build has no MPI these functions are there all the same (mpi_absent.cc) and say so.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/rank_groups.h"

namespace strata::comm {

[[nodiscard]] bool mpi_is_built() noexcept;

/// MPI itself, for as long as this or a communicator of it lives; then it is finalized, which waits
/// for the other ranks. After an error or abort() of a communicator it is left as it is: messages
/// may be under way into memory that is gone, so the process must end, and mpirun ends the others.
///
/// Threads: everything here on one thread, the one that started MPI; that and what is not said to
/// be local blocks until all ranks (of the group) do the same. An error is a failure with MPI's
/// words.
class MpiWorld {
 public:
  virtual ~MpiWorld() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;
  /// This rank's number among those of the same host; for choosing a device of it.
  [[nodiscard]] virtual int local_rank() const noexcept = 0;
  [[nodiscard]] virtual const std::string& host_name() const noexcept = 0;

  /// From rank `root` to all.
  virtual void broadcast(void* data, size_t size_bytes, int root) = 0;
  /// The group of all ranks that give the same color (0 or more), in the order of `key`. Its work
  /// may be on any stream of a host device, one stream at a time.
  [[nodiscard]] virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  /// `shard_ranks` divides size().
  [[nodiscard]] RankGroups create_rank_groups(int shard_ranks);
};

/// Once in a process. Throws a usage error where the build has no MPI, a failure where MPI does not
/// start or does not allow calls of several threads.
[[nodiscard]] std::unique_ptr<MpiWorld> start_mpi();

}  // namespace strata::comm
