// In place of nccl_communicator.cc where there is no CUDA or no nccl.h.
#include "base/error.h"
#include "comm/nccl_communicator.h"

namespace strata::comm {
namespace {

Error absent() {
  return usage_error(
      "this build has no NCCL; build with the CUDA toolkit and nccl.h (libnccl-dev), or run one "
      "rank");
}

}  // namespace

bool nccl_is_built() noexcept { return false; }

std::unique_ptr<NcclCommunicator> create_nccl_communicator(gpu::Device& /*device*/,
                                                           const NcclOptions& /*options*/) {
  throw absent();
}

RankGroups create_nccl_rank_groups(gpu::Device& /*device*/, const NcclOptions& /*options*/,
                                   int /*shard_ranks*/) {
  throw absent();
}

}  // namespace strata::comm
