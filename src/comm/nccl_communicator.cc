#include "comm/nccl_communicator.h"

#include <fmt/format.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"
#include "comm/nccl_api.h"
#include "gpu/cuda/cuda_stream.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::chrono::microseconds kPollEvery{100};

ncclDataType_t type_of(DType dtype) { return dtype == DType::kBf16 ? ncclBfloat16 : ncclFloat32; }

cudaStream_t handle_of(gpu::Stream& stream) {
  return static_cast<gpu::cuda::CudaStream&>(stream).handle();
}

Error nccl_error(ncclResult_t result, ncclComm_t comm, std::string_view what) {
  std::string text = fmt::format("cannot {}: {}", what, nccl().get_error_string(result));
  // What the library noted last, which is more than the name of the error.
  const char* more = nccl().get_last_error(comm);
  if (more != nullptr && *more != '\0') text += fmt::format(" ({})", more);
  if (result == ncclRemoteError) text += "; another rank has ended or cannot be reached";
  return failure(text);
}

class Group final : public NcclCommunicator {
 public:
  /// Takes a communicator that is complete.
  Group(gpu::Device& device, NcclOptions options, ncclComm_t comm)
      : device_(device), options_(std::move(options)), comm_(comm) {
    barrier_memory_ = device_.allocate_device_memory(sizeof(float));
    watcher_ = std::thread([this] { watch(); });
  }

  ~Group() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    stopped_.notify_all();
    watcher_.join();
    ncclComm_t comm = take();
    if (comm == nullptr) return;
    ncclResult_t result = nccl().comm_finalize(comm);
    const Clock::time_point deadline = Clock::now() + options_.patience;
    while (result == ncclInProgress && Clock::now() < deadline) {
      std::this_thread::sleep_for(kPollEvery);
      if (nccl().comm_get_async_error(comm, &result) != ncclSuccess) break;
    }
    static_cast<void>(result == ncclSuccess ? nccl().comm_destroy(comm) : nccl().comm_abort(comm));
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  [[nodiscard]] int rank() const noexcept override { return options_.rank; }
  [[nodiscard]] int size() const noexcept override { return options_.ranks; }

  void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                        gpu::Stream& stream) override {
    if (bytes_per_rank == 0) return;
    call("gather from all ranks", [&](ncclComm_t comm) {
      return nccl().all_gather(in, out, bytes_per_rank, ncclUint8, comm, handle_of(stream));
    });
  }

  void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                            gpu::Stream& stream) override {
    if (count_per_rank == 0) return;
    call("reduce and scatter to all ranks", [&](ncclComm_t comm) {
      return nccl().reduce_scatter(in, out, static_cast<size_t>(count_per_rank), type_of(dtype),
                                   ncclSum, comm, handle_of(stream));
    });
  }

  void all_reduce_async(void* data, int64_t count, DType dtype, gpu::Stream& stream) override {
    if (count == 0) return;
    call("reduce over all ranks", [&](ncclComm_t comm) {
      return nccl().all_reduce(data, data, static_cast<size_t>(count), type_of(dtype), ncclSum,
                               comm, handle_of(stream));
    });
  }

  void broadcast_async(void* data, size_t size_bytes, int root, gpu::Stream& stream) override {
    STRATA_CHECK(root >= 0 && root < size(), "the root is a rank of the group");
    if (size_bytes == 0) return;
    call("broadcast to all ranks", [&](ncclComm_t comm) {
      return nccl().broadcast(data, data, size_bytes, ncclUint8, root, comm, handle_of(stream));
    });
  }

  void barrier_async(gpu::Stream& stream) override {
    // Its value is of no matter: that every rank must bring one is.
    void* memory = barrier_memory_->data();
    call("wait for all ranks", [&](ncclComm_t comm) {
      return nccl().all_reduce(memory, memory, 1, ncclFloat32, ncclSum, comm, handle_of(stream));
    });
  }

  void abort() noexcept override {
    end([] { return failure("the group of this rank has been given up"); });
  }

  [[nodiscard]] std::unique_ptr<NcclCommunicator> split(int color, int key) override;

 private:
  [[nodiscard]] ncclComm_t take() noexcept {
    const std::lock_guard lock(mutex_);
    return std::exchange(comm_, nullptr);
  }

  /// Whoever takes the communicator is the one to end it: nobody else can call NCCL with it then.
  template <class MakeError>
  void end(const MakeError& make_error) noexcept {
    ncclComm_t comm = take();
    if (comm == nullptr) return;
    end(comm, make_error);
  }
  template <class MakeError>
  void end(ncclComm_t comm, const MakeError& make_error) noexcept {
    // The device must know before kernels end by the abort, with what they have.
    try {
      device_.fail(std::make_exception_ptr(make_error()));
    } catch (...) {  // no memory for the words
      device_.fail(std::current_exception());
    }
    static_cast<void>(nccl().comm_abort(comm));
  }

  /// One call of NCCL, to its end but not to that of its work. Its errors are the device's.
  template <class Call>
  void call(std::string_view what, const Call& of_nccl) noexcept {
    std::unique_lock lock(mutex_);
    if (comm_ == nullptr) return refuse();
    ncclResult_t result = of_nccl(comm_);
    while (result == ncclInProgress) {
      lock.unlock();
      std::this_thread::sleep_for(kPollEvery);
      lock.lock();
      if (comm_ == nullptr) return;  // ended meanwhile, and the device knows
      const ncclResult_t asked = nccl().comm_get_async_error(comm_, &result);
      if (asked != ncclSuccess) result = asked;
    }
    if (result == ncclSuccess) return;
    ncclComm_t comm = std::exchange(comm_, nullptr);
    lock.unlock();
    end(comm, [&] { return nccl_error(result, comm, what); });
  }

  /// The device has the error that ended the group, unless that was before this device.
  void refuse() noexcept {
    try {
      device_.fail(std::make_exception_ptr(failure("the group of this rank has been given up")));
    } catch (...) {
      device_.fail(std::current_exception());
    }
  }

  void watch() {
    std::unique_lock lock(mutex_);
    while (!stop_ && comm_ != nullptr) {
      stopped_.wait_for(lock, options_.check_every, [&] { return stop_; });
      if (stop_ || comm_ == nullptr) return;
      ncclResult_t result = ncclSuccess;
      const ncclResult_t asked = nccl().comm_get_async_error(comm_, &result);
      if (asked != ncclSuccess) result = asked;
      if (result == ncclSuccess || result == ncclInProgress) continue;
      ncclComm_t comm = std::exchange(comm_, nullptr);
      lock.unlock();
      end(comm, [&] { return nccl_error(result, comm, "go on with the work of all ranks"); });
      return;
    }
  }

  gpu::Device& device_;
  const NcclOptions options_;
  std::unique_ptr<gpu::Arena> barrier_memory_;

  std::mutex mutex_;  // guards what follows, and every call with the communicator
  std::condition_variable stopped_;
  ncclComm_t comm_;  // null: ended
  bool stop_ = false;

  std::thread watcher_;
};

/// Blocks until the communicator has done what it is at; throws a failure.
void finish(ncclComm_t comm, ncclResult_t result, Clock::time_point deadline,
            std::string_view what) {
  while (result == ncclInProgress) {
    if (Clock::now() > deadline) {
      throw failure(fmt::format("cannot {}: not all ranks have come in time", what));
    }
    std::this_thread::sleep_for(kPollEvery);
    const ncclResult_t asked = nccl().comm_get_async_error(comm, &result);
    if (asked != ncclSuccess) result = asked;
  }
  if (result != ncclSuccess) throw nccl_error(result, comm, what);
}

/// A communicator until somebody else has it.
class UniqueComm {
 public:
  explicit UniqueComm(ncclComm_t comm = nullptr) : comm_(comm) {}
  ~UniqueComm() {
    if (comm_ != nullptr) static_cast<void>(nccl().comm_abort(comm_));
  }
  UniqueComm(const UniqueComm&) = delete;
  UniqueComm& operator=(const UniqueComm&) = delete;
  [[nodiscard]] ncclComm_t get() const noexcept { return comm_; }
  [[nodiscard]] ncclComm_t* out() noexcept { return &comm_; }
  void release() noexcept { comm_ = nullptr; }

 private:
  ncclComm_t comm_;
};

std::unique_ptr<NcclCommunicator> adopt(gpu::Device& device, const NcclOptions& options,
                                        UniqueComm& comm) {
  auto group = std::make_unique<Group>(device, options, comm.get());
  comm.release();
  return group;
}

std::unique_ptr<NcclCommunicator> Group::split(int color, int key) {
  STRATA_CHECK(color >= 0, "a rank is in some group");
  constexpr std::string_view kWhat = "split the ranks into groups";
  const Clock::time_point deadline = Clock::now() + options_.patience;
  UniqueComm part;
  NcclOptions options = options_;
  {
    // Nothing else may be asked of the communicator meanwhile. An abort() waits.
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw failure("the group of this rank has been given up");
    finish(comm_, nccl().comm_split(comm_, color, key, part.out(), nullptr), deadline, kWhat);
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl().comm_get_async_error(part.get(), &state);
    finish(part.get(), asked != ncclSuccess ? asked : state, deadline, kWhat);
  }
  finish(part.get(), nccl().comm_user_rank(part.get(), &options.rank), deadline, kWhat);
  finish(part.get(), nccl().comm_count(part.get(), &options.ranks), deadline, kWhat);
  return adopt(device_, options, part);
}

/// What rank 0 gives to the others.
struct Invitation {
  bool valid = false;
  ncclUniqueId id{};
};

Invitation exchange_invitation(const NcclOptions& options) {
  Invitation invitation;
  std::exception_ptr error;
  try {
    const Nccl& library = nccl();  // on every rank: where it is missing is to be known now
    if (options.rank == 0) {
      const ncclResult_t result = library.get_unique_id(&invitation.id);
      if (result != ncclSuccess) throw nccl_error(result, nullptr, "start NCCL");
    }
    invitation.valid = true;
  } catch (...) {
    error = std::current_exception();
  }
  // The others wait for it, also where it is of no use.
  options.broadcast(&invitation, sizeof invitation);
  if (error) std::rethrow_exception(error);
  if (!invitation.valid) {
    throw failure("cannot start NCCL: rank 0 could not, and says why on its own");
  }
  return invitation;
}

}  // namespace

bool nccl_is_built() noexcept { return true; }

std::unique_ptr<NcclCommunicator> create_nccl_communicator(gpu::Device& device,
                                                           const NcclOptions& options) {
  STRATA_CHECK(options.rank >= 0 && options.rank < options.ranks, "a rank is one of its group");
  STRATA_CHECK(device.kind() == "cuda", "NCCL is for CUDA devices");
  const Invitation invitation = exchange_invitation(options);
  static_cast<void>(device.free_memory_bytes());  // makes the device this thread's current one
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const Clock::time_point deadline = Clock::now() + options.patience;
  UniqueComm comm;
  const ncclResult_t result =
      nccl().comm_init_rank_config(comm.out(), options.ranks, invitation.id, options.rank, &config);
  finish(
      comm.get(), result, deadline,
      fmt::format("connect rank {} with the {} ranks of the group", options.rank, options.ranks));
  return adopt(device, options, comm);
}

RankGroups create_nccl_rank_groups(gpu::Device& device, const NcclOptions& options,
                                   int shard_ranks) {
  STRATA_CHECK(shard_ranks > 0 && options.ranks % shard_ranks == 0, "shard groups are of one size");
  auto world = create_nccl_communicator(device, options);
  RankGroups groups;
  groups.shard = world->split(options.rank / shard_ranks, options.rank);
  groups.replica = world->split(options.rank % shard_ranks, options.rank);
  groups.world = std::move(world);
  return groups;
}

}  // namespace strata::comm
