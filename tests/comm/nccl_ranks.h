// Ranks of a test as threads, each with a CUDA device: all with the emulated one, or each with a
// real one of its own, as the program is linked.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "comm/nccl_communicator.h"
#include "gpu/cuda/cuda_device.h"

namespace strata::comm {

/// How many ranks a test can have, `most` at most; 0, with a warning that makes it count as
/// skipped, without a device.
inline int nccl_ranks(int most) {
  const gpu::CudaAvailability found = gpu::cuda_availability();
  if (found.status != gpu::CudaStatus::kAvailable) {
    WARN("skipped: no CUDA device: " << found.diagnosis);
    return 0;
  }
#ifdef STRATA_EMULATED
  return most;
#else
  return std::min(most, static_cast<int>(found.devices.size()));
#endif
}

/// The device of a rank.
inline std::unique_ptr<gpu::Device> create_rank_device([[maybe_unused]] int rank) {
#ifdef STRATA_EMULATED
  return gpu::create_cuda_device({.ordinal = 0});
#else
  return gpu::create_cuda_device({.ordinal = rank});
#endif
}

/// From rank 0 to all, once.
class Invitations {
 public:
  explicit Invitations(int ranks) : ranks_(ranks) {}
  [[nodiscard]] NcclOptions options(int rank) {
    return {.rank = rank,
            .ranks = ranks_,
            .broadcast =
                [this, rank](void* data, size_t size_bytes) {
                  std::unique_lock lock(mutex_);
                  if (rank == 0) {
                    const auto* bytes = static_cast<const std::byte*>(data);
                    data_.assign(bytes, bytes + size_bytes);
                    sent_.notify_all();
                  } else {
                    sent_.wait(lock, [&] { return !data_.empty(); });
                    std::memcpy(data, data_.data(), std::min(size_bytes, data_.size()));
                  }
                },
            .patience = std::chrono::milliseconds(60'000),
            .check_every = std::chrono::milliseconds(2)};
  }

 private:
  int ranks_;
  std::mutex mutex_;
  std::condition_variable sent_;
  std::vector<std::byte> data_;
};

/// What ranks have allocated; the device must outlive it.
using Kept = std::vector<std::unique_ptr<gpu::Arena>>;

/// Calls body(options, device, stream) on a thread for each rank; what each returned, or the words
/// of what it threw.
template <class Body>
std::vector<std::string> on_cuda_ranks(int ranks, const Body& body) {
  Invitations invitations(ranks);
  std::vector<std::string> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::string& result = results[static_cast<size_t>(rank)];
      try {
        const auto device = create_rank_device(rank);
        const auto stream = device->create_stream("collectives");
        result = body(invitations.options(rank), *device, *stream);
      } catch (const std::exception& error) {
        result = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace strata::comm
