// Ranks with a CUDA device each, through NCCL. Where the build has no CUDA or no nccl.h these
// functions are there all the same (nccl_absent.cc) and say so.
//
// Sums of fp32 and bf16 are NCCL's own: their order depends on its algorithm, and bf16 is rounded
// more than once. All ranks get the same bits of an all-reduce.
//
// NCCL's communicators do not block: a thread of each one asks for NCCL's asynchronous errors. The
// first is given to the device (gpu::Device::fail) and the communicator aborted, so that kernels
// which wait for a lost rank end and a synchronize throws instead of waiting for ever. An abort()
// does the same at once.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "comm/communicator.h"
#include "comm/rank_groups.h"

namespace strata::comm {

[[nodiscard]] bool nccl_is_built() noexcept;

struct NcclOptions {
  int rank = 0;
  int ranks = 1;
  /// Gives bytes of rank 0 to all; called once by each rank, after NCCL has been loaded there.
  std::function<void(void* data, size_t size_bytes)> broadcast;
  /// How long ranks may take to find each other, and to part.
  std::chrono::milliseconds patience{120'000};
  /// Between questions for errors.
  std::chrono::milliseconds check_every{100};
};

/// Its calls may block while NCCL connects the ranks, which it does in the first ones; abort() ends
/// that too. The work of its streams must have ended before it is destroyed, by all ranks in the
/// same order.
class NcclCommunicator : public Communicator {
 public:
  /// The group of all ranks of this one that give the same color (0 or more), in the order of
  /// `key`. Blocks until they have; throws a failure.
  [[nodiscard]] virtual std::unique_ptr<NcclCommunicator> split(int color, int key) = 0;
};

/// Blocks until all ranks are there, each with a CUDA device of its own, which must outlive it.
/// Throws a usage error where the build has no NCCL, else a failure.
[[nodiscard]] std::unique_ptr<NcclCommunicator> create_nccl_communicator(
    gpu::Device& device, const NcclOptions& options);

/// `shard_ranks` divides options.ranks.
[[nodiscard]] RankGroups create_nccl_rank_groups(gpu::Device& device, const NcclOptions& options,
                                                 int shard_ranks);

}  // namespace strata::comm
