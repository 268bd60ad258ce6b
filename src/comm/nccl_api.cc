#include "comm/nccl_api.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "base/error.h"

namespace strata::comm {
namespace {

constexpr const char* kName = "libnccl.so.2";
/// The first with ncclCommSplit.
constexpr int kOldestVersion = NCCL_VERSION(2, 18, 1);

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw failure(fmt::format("{} has no function {}; install NCCL 2.18 or newer", kName, name));
  }
}

Nccl load() {
  // Local, for nothing but these functions to be found by others.
  void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw failure(
        fmt::format("cannot load {} for collectives of CUDA devices: {}; install NCCL, or name its "
                    "folder in LD_LIBRARY_PATH",
                    kName, dlerror()));
  }
  Nccl result{};
  find(library, "ncclGetVersion", result.get_version);
  find(library, "ncclGetUniqueId", result.get_unique_id);
  find(library, "ncclCommInitRankConfig", result.comm_init_rank_config);
  find(library, "ncclCommSplit", result.comm_split);
  find(library, "ncclCommGetAsyncError", result.comm_get_async_error);
  find(library, "ncclCommCount", result.comm_count);
  find(library, "ncclCommUserRank", result.comm_user_rank);
  find(library, "ncclCommFinalize", result.comm_finalize);
  find(library, "ncclCommDestroy", result.comm_destroy);
  find(library, "ncclCommAbort", result.comm_abort);
  find(library, "ncclGetErrorString", result.get_error_string);
  find(library, "ncclGetLastError", result.get_last_error);
  find(library, "ncclAllGather", result.all_gather);
  find(library, "ncclReduceScatter", result.reduce_scatter);
  find(library, "ncclAllReduce", result.all_reduce);
  find(library, "ncclBroadcast", result.broadcast);
  int version = 0;
  if (result.get_version(&version) != ncclSuccess || version < kOldestVersion) {
    throw failure(fmt::format("{} is NCCL {}.{}; install 2.18 or newer", kName, version / 10000,
                              version / 100 % 100));
  }
  return result;
}

}  // namespace

const Nccl& nccl() {
  static const Nccl loaded = load();
  return loaded;
}

}  // namespace strata::comm
