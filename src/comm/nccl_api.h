// NCCL, loaded when ranks on CUDA devices first need it: neither the build nor a start of the
// program asks for the library.
#pragma once

#include <nccl.h>

namespace strata::comm {

/// The functions that are used, under their own names without the prefix.
struct Nccl {
  decltype(&ncclGetVersion) get_version;
  decltype(&ncclGetUniqueId) get_unique_id;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&ncclCommSplit) comm_split;
  decltype(&ncclCommGetAsyncError) comm_get_async_error;
  decltype(&ncclCommCount) comm_count;
  decltype(&ncclCommUserRank) comm_user_rank;
  decltype(&ncclCommFinalize) comm_finalize;
  decltype(&ncclCommDestroy) comm_destroy;
  decltype(&ncclCommAbort) comm_abort;
  decltype(&ncclGetErrorString) get_error_string;
  decltype(&ncclGetLastError) get_last_error;
  decltype(&ncclAllGather) all_gather;
  decltype(&ncclReduceScatter) reduce_scatter;
  decltype(&ncclAllReduce) all_reduce;
  decltype(&ncclBroadcast) broadcast;
};

/// Loads the library once for the whole process, which keeps it. Throws a failure that says what
/// was looked for, or that what was found is too old.
[[nodiscard]] const Nccl& nccl();

}  // namespace strata::comm
