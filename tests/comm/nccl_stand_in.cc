#include "comm/nccl_stand_in.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "comm/nccl_api.h"
#include "comm/thread_rendezvous.h"
#include "cuda_emulator/emulator.h"

namespace {

using strata::Bf16;
using strata::DType;
using strata::comm::GroupCall;
using strata::comm::Nccl;
using strata::comm::ThreadRendezvous;
namespace emulator = strata::gpu::cuda::emulator;

/// Ranks that belong together. Streams may still be at work when its communicators have gone.
struct Ranks {
  explicit Ranks(int count)
      : meeting(std::make_shared<ThreadRendezvous>(count)), members(static_cast<size_t>(count)) {}
  std::shared_ptr<ThreadRendezvous> meeting;
  std::vector<ncclComm*> members;  // null: not yet there
  struct Wish {
    int color, key, rank;
    ncclComm_t* out;
  };
  std::vector<Wish> wishes;  // of a split under way
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Ranks> ranks;
  int rank = 0;
  int in_progress = 0;     // questions that are to be answered so
  bool splitting = false;  // until all ranks are
  ncclResult_t error = ncclSuccess;

  [[nodiscard]] bool connected() const {
    return std::none_of(ranks->members.begin(), ranks->members.end(),
                        [](const ncclComm* member) { return member == nullptr; });
  }
};

namespace {

std::mutex g_mutex;  // guards all here
std::map<std::string, std::shared_ptr<Ranks>> g_invited;
std::set<ncclComm*> g_alive;
int g_ids = 0;
int g_questions = 0;
int g_aborted = 0;
ncclResult_t g_next_call = ncclSuccess;

ncclResult_t refuse(ncclResult_t result, const std::string& message) {
  emulator::diagnose("NCCL: " + message);
  return result;
}

bool is_alive(ncclComm* comm) { return g_alive.count(comm) > 0; }

bool is_busy(const ncclComm* comm) {
  return !comm->connected() || comm->splitting || comm->in_progress > 0;
}

ncclResult_t progress_of(const ncclComm* comm) {
  return is_busy(comm) ? ncclInProgress : ncclSuccess;
}

ncclComm* add(const std::shared_ptr<Ranks>& ranks, int rank) {
  auto* comm = new ncclComm{.ranks = ranks, .rank = rank, .in_progress = g_questions};
  ranks->members[static_cast<size_t>(rank)] = comm;
  g_alive.insert(comm);
  return comm;
}

ncclResult_t remove(ncclComm* comm, const char* what) {
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, std::string(what) + " of none");
  g_alive.erase(comm);
  delete comm;
  return ncclSuccess;
}

size_t size_of(ncclDataType_t type) {
  return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}

double read(const void* data, size_t i, ncclDataType_t type) {
  if (type == ncclBfloat16) return static_cast<double>(to_float(static_cast<const Bf16*>(data)[i]));
  return static_cast<double>(static_cast<const float*>(data)[i]);
}

void write(void* data, size_t i, ncclDataType_t type, double value) {
  const auto single = static_cast<float>(value);
  if (type == ncclBfloat16) {
    static_cast<Bf16*>(data)[i] = strata::to_bf16(single);
  } else {
    static_cast<float*>(data)[i] = single;
  }
}

const void* at(const void* data, size_t offset_bytes) {
  return static_cast<const std::byte*>(data) + offset_bytes;
}

/// What a rank's stream does when it gets there. `count` elements are what `out` gets, but of a
/// gather what each rank brings.
struct Work {
  std::shared_ptr<ThreadRendezvous> meeting;
  int rank;
  GroupCall call;
  ncclDataType_t type;

  cudaError_t operator()() const {
    const auto ranks = static_cast<size_t>(meeting->ranks());
    const auto mine = static_cast<size_t>(rank);
    const auto count = static_cast<size_t>(call.count);
    const size_t size_bytes = count * size_of(type);
    const bool gathers = call.kind == GroupCall::Kind::kAllGather;
    const bool scatters = call.kind == GroupCall::Kind::kReduceScatter;
    if (!emulator::accessible(call.in, scatters ? size_bytes * ranks : size_bytes) ||
        !emulator::accessible(call.out, gathers ? size_bytes * ranks : size_bytes)) {
      emulator::diagnose("NCCL: an array reaches beyond its memory");
      return cudaErrorIllegalAddress;
    }
    try {
      meeting->open(rank, call);
    } catch (const std::exception&) {
      return cudaSuccess;  // aborted: a kernel of the library just ends
    }
    // Into memory of its own first, since arrays may be the same.
    std::vector<std::byte> result(gathers ? size_bytes * ranks : size_bytes);
    if (gathers) {
      for (size_t r = 0; r < ranks; ++r) {
        std::memcpy(result.data() + r * size_bytes, meeting->call(static_cast<int>(r)).in,
                    size_bytes);
      }
    } else if (call.kind == GroupCall::Kind::kBroadcast) {
      std::memcpy(result.data(), meeting->call(call.root).in, size_bytes);
    } else {
      for (size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (size_t r = 0; r < ranks; ++r) {
          const void* theirs = meeting->call(static_cast<int>(r)).in;
          sum += read(scatters ? at(theirs, mine * size_bytes) : theirs, i, type);
        }
        write(result.data(), i, type, sum);
      }
    }
    meeting->meet();
    std::memcpy(call.out, result.data(), result.size());
    return cudaSuccess;
  }
};

ncclResult_t begin(ncclComm_t comm, GroupCall call, ncclDataType_t type, cudaStream_t stream) {
  const std::lock_guard lock(g_mutex);
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, "a call with no communicator");
  if (is_busy(comm)) return refuse(ncclInvalidUsage, "a call while another is in progress");
  if (comm->error != ncclSuccess) return comm->error;
  if (g_next_call != ncclSuccess) return std::exchange(g_next_call, ncclSuccess);
  if (type != ncclFloat32 && type != ncclBfloat16 && type != ncclUint8) {
    return refuse(ncclInvalidArgument, "an unknown type");
  }
  call.dtype = type == ncclBfloat16 ? DType::kBf16 : DType::kF32;
  if (emulator::enqueue(stream, Work{comm->ranks->meeting, comm->rank, call, type}) !=
      cudaSuccess) {
    return ncclUnhandledCudaError;
  }
  comm->in_progress = g_questions;
  return progress_of(comm);
}

bool is_sum(ncclRedOp_t operation, ncclDataType_t type) {
  return operation == ncclSum && type != ncclUint8;
}

ncclResult_t get_version(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  const std::lock_guard lock(g_mutex);
  *id = {};
  const std::string text = "id " + std::to_string(++g_ids);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}

ncclResult_t comm_init_rank_config(ncclComm_t* out, int count, ncclUniqueId id, int rank,
                                   ncclConfig_t* config) {
  const std::lock_guard lock(g_mutex);
  if (config->blocking != 0) return refuse(ncclInvalidArgument, "a communicator that blocks");
  const std::string name(id.internal);
  if (name.empty()) return refuse(ncclInvalidArgument, "an id that is none");
  std::shared_ptr<Ranks>& ranks = g_invited[name];
  if (!ranks) ranks = std::make_shared<Ranks>(count);
  if (static_cast<size_t>(count) != ranks->members.size() || rank < 0 || rank >= count ||
      ranks->members[static_cast<size_t>(rank)] != nullptr) {
    return refuse(ncclInvalidArgument, "a rank that does not go with the others");
  }
  *out = add(ranks, rank);
  return progress_of(*out);
}

/// All ranks have said what they want.
void split_all(Ranks& ranks) {
  std::sort(ranks.wishes.begin(), ranks.wishes.end(), [](const auto& a, const auto& b) {
    return std::tie(a.color, a.key, a.rank) < std::tie(b.color, b.key, b.rank);
  });
  for (size_t first = 0; first < ranks.wishes.size();) {
    size_t end = first;
    while (end < ranks.wishes.size() && ranks.wishes[end].color == ranks.wishes[first].color) ++end;
    const auto part = std::make_shared<Ranks>(static_cast<int>(end - first));
    for (size_t i = first; i < end; ++i) {
      *ranks.wishes[i].out = add(part, static_cast<int>(i - first));
    }
    first = end;
  }
  ranks.wishes.clear();
  for (ncclComm* member : ranks.members) {
    member->splitting = false;
    member->in_progress = g_questions;
  }
}

ncclResult_t comm_split(ncclComm_t comm, int color, int key, ncclComm_t* out,
                        ncclConfig_t* /*config*/) {
  const std::lock_guard lock(g_mutex);
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, "a split of none");
  if (is_busy(comm)) return refuse(ncclInvalidUsage, "a split while a call is in progress");
  comm->splitting = true;
  Ranks& ranks = *comm->ranks;
  ranks.wishes.push_back({color, key, comm->rank, out});
  if (ranks.wishes.size() == ranks.members.size()) split_all(ranks);
  return progress_of(comm);
}

ncclResult_t comm_get_async_error(ncclComm_t comm, ncclResult_t* error) {
  const std::lock_guard lock(g_mutex);
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, "a question to no communicator");
  *error = comm->error != ncclSuccess ? comm->error : progress_of(comm);
  if (comm->in_progress > 0) --comm->in_progress;
  return ncclSuccess;
}

ncclResult_t comm_count(const ncclComm_t comm, int* count) {
  const std::lock_guard lock(g_mutex);
  *count = static_cast<int>(comm->ranks->members.size());
  return ncclSuccess;
}

ncclResult_t comm_user_rank(const ncclComm_t comm, int* rank) {
  const std::lock_guard lock(g_mutex);
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t comm_finalize(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, "an end of none");
  comm->in_progress = g_questions;
  return progress_of(comm);
}

ncclResult_t comm_destroy(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  if (is_alive(comm) && is_busy(comm)) {
    return refuse(ncclInvalidUsage, "a communicator is destroyed while it is in progress");
  }
  return remove(comm, "destruction");
}

ncclResult_t comm_abort(ncclComm_t comm) {
  const std::lock_guard lock(g_mutex);
  if (!is_alive(comm)) return refuse(ncclInvalidArgument, "an abort of none");
  // Also what the others have begun: data that does not come ends no kernel of theirs in the
  // library, but what this rank has brought may be gone by then.
  comm->ranks->meeting->abort(comm->rank);
  ++g_aborted;
  return remove(comm, "abort");
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "some other error";
  }
}

const char* get_last_error(ncclComm_t /*comm*/) { return ""; }

ncclResult_t all_gather(const void* in, void* out, size_t count, ncclDataType_t type,
                        ncclComm_t comm, cudaStream_t stream) {
  return begin(comm,
               {.kind = GroupCall::Kind::kAllGather,
                .count = static_cast<int64_t>(count),
                .in = in,
                .out = out},
               type, stream);
}

ncclResult_t reduce_scatter(const void* in, void* out, size_t count, ncclDataType_t type,
                            ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  if (!is_sum(operation, type)) return refuse(ncclInvalidArgument, "not a sum");
  return begin(comm,
               {.kind = GroupCall::Kind::kReduceScatter,
                .count = static_cast<int64_t>(count),
                .in = in,
                .out = out},
               type, stream);
}

ncclResult_t all_reduce(const void* in, void* out, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
  if (!is_sum(operation, type)) return refuse(ncclInvalidArgument, "not a sum");
  return begin(comm,
               {.kind = GroupCall::Kind::kAllReduce,
                .count = static_cast<int64_t>(count),
                .in = in,
                .out = out},
               type, stream);
}

ncclResult_t broadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return begin(comm,
               {.kind = GroupCall::Kind::kBroadcast,
                .root = root,
                .count = static_cast<int64_t>(count),
                .in = in,
                .out = out},
               type, stream);
}

}  // namespace

namespace strata::comm {

const Nccl& nccl() {
  static const Nccl functions{.get_version = &get_version,
                              .get_unique_id = &get_unique_id,
                              .comm_init_rank_config = &comm_init_rank_config,
                              .comm_split = &comm_split,
                              .comm_get_async_error = &comm_get_async_error,
                              .comm_count = &comm_count,
                              .comm_user_rank = &comm_user_rank,
                              .comm_finalize = &comm_finalize,
                              .comm_destroy = &comm_destroy,
                              .comm_abort = &comm_abort,
                              .get_error_string = &get_error_string,
                              .get_last_error = &get_last_error,
                              .all_gather = &all_gather,
                              .reduce_scatter = &reduce_scatter,
                              .all_reduce = &all_reduce,
                              .broadcast = &broadcast};
  return functions;
}

namespace nccl_stand_in {

void stay_in_progress(int questions) {
  const std::lock_guard lock(g_mutex);
  g_questions = questions;
}

void fail_asynchronously(int rank, ncclResult_t result) {
  const std::lock_guard lock(g_mutex);
  for (ncclComm* comm : g_alive) {
    if (comm->rank == rank) comm->error = result;
  }
}

void fail_next_call(ncclResult_t result) {
  const std::lock_guard lock(g_mutex);
  g_next_call = result;
}

int alive() {
  const std::lock_guard lock(g_mutex);
  return static_cast<int>(g_alive.size());
}

int aborted() {
  const std::lock_guard lock(g_mutex);
  return g_aborted;
}

}  // namespace nccl_stand_in
}  // namespace strata::comm
