// Ranks as threads of one process, on host devices: for tests and benches.
//
// Each rank's stream blocks inside a collective until the streams of all ranks are there; then each
// copies and sums out of the others' memory, as much of it as it would receive over a network. Sums
// are those of sum_in_order (ordered_sum.h). A communicator must outlive the work of its rank.
//
// abort() ends the group for all of its ranks: what waits for ranks that have not come throws in
// its stream, what all have begun is done to the end. Where ranks call different collectives, all
// throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/rank_groups.h"

namespace strata::comm {

class ThreadRendezvous;

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadRendezvous> group, int rank);
  ~ThreadCommunicator() override;
  ThreadCommunicator(const ThreadCommunicator&) = delete;
  ThreadCommunicator& operator=(const ThreadCommunicator&) = delete;

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override;
  void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                        gpu::Stream& stream) override;
  void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                            gpu::Stream& stream) override;
  void all_reduce_async(void* data, int64_t count, DType dtype, gpu::Stream& stream) override;
  void broadcast_async(void* data, size_t size_bytes, int root, gpu::Stream& stream) override;
  void barrier_async(gpu::Stream& stream) override;
  void abort() noexcept override;

  /// What this rank has read of others' memory so far.
  [[nodiscard]] uint64_t received_bytes() const noexcept { return received_bytes_; }

 private:
  void all_gather(const void* in, void* out, size_t bytes_per_rank);
  void reduce_scatter(void* in, void* out, int64_t count_per_rank, DType dtype);
  void all_reduce(void* data, int64_t count, DType dtype);
  void broadcast(void* data, size_t size_bytes, int root);

  std::shared_ptr<ThreadRendezvous> group_;
  int rank_;
  std::vector<const void*> inputs_;  // of a sum, by rank; of the stream's thread
  std::atomic<uint64_t> received_bytes_ = 0;
};

/// A group of as many ranks, by rank.
[[nodiscard]] std::vector<std::unique_ptr<Communicator>> create_thread_communicators(int ranks);

/// The groups of each rank; `shard_ranks` divides `ranks`.
[[nodiscard]] std::vector<RankGroups> create_thread_rank_groups(int ranks, int shard_ranks);

}  // namespace strata::comm
