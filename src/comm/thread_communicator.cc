#include "comm/thread_communicator.h"

#include <cstring>

#include "base/error.h"
#include "comm/ordered_sum.h"
#include "comm/thread_rendezvous.h"
#include "gpu/host/host_stream.h"

namespace strata::comm {
namespace {

gpu::host::HostStream& host_stream(gpu::Stream& stream) {
  return static_cast<gpu::host::HostStream&>(stream);
}

std::byte* at(void* data, size_t offset_bytes) {
  return static_cast<std::byte*>(data) + offset_bytes;
}
const std::byte* at(const void* data, size_t offset_bytes) {
  return static_cast<const std::byte*>(data) + offset_bytes;
}

void copy(void* out, const void* in, size_t size_bytes) {
  if (out != in && size_bytes > 0) std::memcpy(out, in, size_bytes);
}

}  // namespace

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<ThreadRendezvous> group, int rank)
    : group_(std::move(group)), rank_(rank) {
  STRATA_CHECK(rank >= 0 && rank < size(), "a rank is one of its group");
  inputs_.resize(static_cast<size_t>(size()));
}

ThreadCommunicator::~ThreadCommunicator() = default;

int ThreadCommunicator::size() const noexcept { return group_->ranks(); }

void ThreadCommunicator::all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                                          gpu::Stream& stream) {
  host_stream(stream).enqueue([=, this] { all_gather(in, out, bytes_per_rank); });
}

void ThreadCommunicator::reduce_scatter_async(void* in, void* out, int64_t count_per_rank,
                                              DType dtype, gpu::Stream& stream) {
  host_stream(stream).enqueue([=, this] { reduce_scatter(in, out, count_per_rank, dtype); });
}

void ThreadCommunicator::all_reduce_async(void* data, int64_t count, DType dtype,
                                          gpu::Stream& stream) {
  host_stream(stream).enqueue([=, this] { all_reduce(data, count, dtype); });
}

void ThreadCommunicator::broadcast_async(void* data, size_t size_bytes, int root,
                                         gpu::Stream& stream) {
  STRATA_CHECK(root >= 0 && root < size(), "the root is a rank of the group");
  host_stream(stream).enqueue([=, this] { broadcast(data, size_bytes, root); });
}

void ThreadCommunicator::barrier_async(gpu::Stream& stream) {
  host_stream(stream).enqueue([this] {
    group_->open(rank_, {});
    group_->meet();
  });
}

void ThreadCommunicator::abort() noexcept { group_->abort(rank_); }

void ThreadCommunicator::all_gather(const void* in, void* out, size_t bytes_per_rank) {
  group_->open(rank_, {.kind = GroupCall::Kind::kAllGather,
                       .count = static_cast<int64_t>(bytes_per_rank),
                       .in = in});
  for (int rank = 0; rank < size(); ++rank) {
    copy(at(out, static_cast<size_t>(rank) * bytes_per_rank), group_->call(rank).in,
         bytes_per_rank);
    if (rank != rank_) received_bytes_ += bytes_per_rank;
  }
  group_->meet();
}

void ThreadCommunicator::reduce_scatter(void* in, void* out, int64_t count_per_rank, DType dtype) {
  group_->open(
      rank_,
      {.kind = GroupCall::Kind::kReduceScatter, .dtype = dtype, .count = count_per_rank, .in = in});
  const size_t size_bytes = static_cast<size_t>(count_per_rank) * size_of(dtype);
  // Nobody else reads this rank's place in any array, which `out` may be.
  for (int rank = 0; rank < size(); ++rank) {
    inputs_[static_cast<size_t>(rank)] =
        at(group_->call(rank).in, static_cast<size_t>(rank_) * size_bytes);
    if (rank != rank_) received_bytes_ += size_bytes;
  }
  sum_in_order(inputs_.data(), size(), count_per_rank, dtype, out);
  group_->meet();
}

void ThreadCommunicator::all_reduce(void* data, int64_t count, DType dtype) {
  group_->open(rank_, {.kind = GroupCall::Kind::kAllReduce,
                       .dtype = dtype,
                       .count = count,
                       .in = data,
                       .out = data});
  const auto bytes_of = [&](int64_t elements) {
    return static_cast<size_t>(elements) * size_of(dtype);
  };
  const Block mine = block_of(count, size(), rank_);
  for (int rank = 0; rank < size(); ++rank) {
    inputs_[static_cast<size_t>(rank)] = at(group_->call(rank).in, bytes_of(mine.first));
    if (rank != rank_) received_bytes_ += bytes_of(mine.count);
  }
  sum_in_order(inputs_.data(), size(), mine.count, dtype, at(data, bytes_of(mine.first)));
  group_->meet();
  for (int rank = 0; rank < size(); ++rank) {
    const Block theirs = block_of(count, size(), rank);
    copy(at(data, bytes_of(theirs.first)), at(group_->call(rank).in, bytes_of(theirs.first)),
         bytes_of(theirs.count));
    if (rank != rank_) received_bytes_ += bytes_of(theirs.count);
  }
  group_->meet();
}

void ThreadCommunicator::broadcast(void* data, size_t size_bytes, int root) {
  group_->open(rank_, {.kind = GroupCall::Kind::kBroadcast,
                       .root = root,
                       .count = static_cast<int64_t>(size_bytes),
                       .in = data});
  if (rank_ != root) {
    copy(data, group_->call(root).in, size_bytes);
    received_bytes_ += size_bytes;
  }
  group_->meet();
}

std::vector<std::unique_ptr<Communicator>> create_thread_communicators(int ranks) {
  const auto group = std::make_shared<ThreadRendezvous>(ranks);
  std::vector<std::unique_ptr<Communicator>> result;
  for (int rank = 0; rank < ranks; ++rank) {
    result.push_back(std::make_unique<ThreadCommunicator>(group, rank));
  }
  return result;
}

std::vector<RankGroups> create_thread_rank_groups(int ranks, int shard_ranks) {
  STRATA_CHECK(shard_ranks > 0 && ranks % shard_ranks == 0, "shard groups are of one size");
  std::vector<RankGroups> result(static_cast<size_t>(ranks));
  const int replicas = ranks / shard_ranks;
  const auto add = [&](std::unique_ptr<Communicator> RankGroups::*member, int first, int step,
                       int count) {
    auto group = create_thread_communicators(count);
    for (int i = 0; i < count; ++i) {
      result[static_cast<size_t>(first + i * step)].*member =
          std::move(group[static_cast<size_t>(i)]);
    }
  };
  add(&RankGroups::world, 0, 1, ranks);
  for (int replica = 0; replica < replicas; ++replica) {
    add(&RankGroups::shard, replica * shard_ranks, 1, shard_ranks);
  }
  for (int rank = 0; rank < shard_ranks; ++rank) {
    add(&RankGroups::replica, rank, shard_ranks, replicas);
  }
  return result;
}

}  // namespace strata::comm
