#include "comm/thread_communicator.h"

#include <atomic>
#include <chrono>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "comm/collectives.h"
#include "comm/thread_ranks.h"

namespace strata::comm {
namespace {

using Catch::Matchers::Contains;
using Results = std::vector<std::string>;

TEST_CASE("thread ranks: every collective, every group size") {
  for (const int ranks : {1, 2, 3, 5}) {
    const auto groups = create_thread_communicators(ranks);
    const Results results =
        on_ranks(ranks, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
          Communicator& group = *groups[static_cast<size_t>(rank)];
          if (group.rank() != rank || group.size() != ranks) return std::string("another rank");
          return check_collectives({device, stream, group}, 4099);
        });
    CHECK(results == Results(static_cast<size_t>(ranks)));
  }
}

TEST_CASE("thread ranks: shard groups and replicas") {
  constexpr int kRanks = 6;
  for (const int shard_ranks : {1, 2, 3, 6}) {
    const auto groups = create_thread_rank_groups(kRanks, shard_ranks);
    const Results results =
        on_ranks(kRanks, [&](int rank, gpu::Device& device, gpu::Stream& stream) -> std::string {
          const RankGroups& mine = groups[static_cast<size_t>(rank)];
          if (mine.world->rank() != rank || mine.shard->rank() != rank % shard_ranks ||
              mine.replica->rank() != rank / shard_ranks) {
            return "another place in a group";
          }
          // Which ranks there are in a group shows in what it gathers.
          const auto members = [&](Communicator& group) {
            const auto arena = device.allocate_device_memory(sizeof(int) * kRanks);
            auto* all = reinterpret_cast<int*>(arena->data());
            all[group.rank()] = rank;
            group.all_gather_async(all + group.rank(), all, sizeof(int), stream);
            device.synchronize(stream);
            return std::vector<int>(all, all + group.size());
          };
          std::vector<int> shard;
          std::vector<int> replica;
          for (int r = 0; r < kRanks; ++r) {
            if (r / shard_ranks == rank / shard_ranks) shard.push_back(r);
            if (r % shard_ranks == rank % shard_ranks) replica.push_back(r);
          }
          if (members(*mine.shard) != shard) return "other ranks in the shard group";
          if (members(*mine.replica) != replica) return "other ranks among the replicas";
          for (Communicator* group : {mine.shard.get(), mine.replica.get(), mine.world.get()}) {
            if (all_reduced({device, stream, *group}, 5, 100, DType::kBf16) !=
                expected_sum(5, group->size(), 100, DType::kBf16)) {
              return "another sum";
            }
          }
          return "";
        });
    CHECK(results == Results(kRanks));
  }
}

TEST_CASE("thread ranks: receive what the formula says") {
  constexpr int kRanks = 4;
  constexpr int64_t kCount = 1000;
  const auto groups = create_thread_communicators(kRanks);
  const Results results =
      on_ranks(kRanks, [&](int rank, gpu::Device& device, gpu::Stream& stream) -> std::string {
        auto& group = static_cast<ThreadCommunicator&>(*groups[static_cast<size_t>(rank)]);
        const auto arena = device.allocate_device_memory(kCount * 4 * kRanks);
        std::byte* data = arena->data();
        auto received = [&, before = uint64_t{0}]() mutable {
          device.synchronize(stream);
          const uint64_t now = group.received_bytes();
          return now - std::exchange(before, now);
        };
        const size_t whole_bytes = kCount * 4 * kRanks;
        group.all_gather_async(data + static_cast<size_t>(rank) * kCount * 4, data, kCount * 4,
                               stream);
        if (received() != collective_bytes(Collective::kAllGather, whole_bytes, kRanks)) {
          return "all-gather";
        }
        group.reduce_scatter_async(data, data + static_cast<size_t>(rank) * kCount * 4, kCount,
                                   DType::kF32, stream);
        if (received() != collective_bytes(Collective::kReduceScatter, whole_bytes, kRanks)) {
          return "reduce-scatter";
        }
        group.all_reduce_async(data, kCount, DType::kBf16, stream);
        if (received() != collective_bytes(Collective::kAllReduce, kCount * 2, kRanks)) {
          return "all-reduce";
        }
        group.broadcast_async(data, 77, 1, stream);
        if (received() != (rank == 1 ? 0 : collective_bytes(Collective::kBroadcast, 77, kRanks))) {
          return "broadcast";
        }
        return "";
      });
  CHECK(results == Results(kRanks));
}

TEST_CASE("thread ranks: a barrier waits for all of them") {
  const auto groups = create_thread_communicators(2);
  std::atomic<bool> late_is_there = false;
  const Results results =
      on_ranks(2, [&](int rank, gpu::Device& device, gpu::Stream& stream) -> std::string {
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          late_is_there = true;
        }
        groups[static_cast<size_t>(rank)]->barrier_async(stream);
        device.synchronize(stream);
        return late_is_there ? "" : "went on alone";
      });
  CHECK(results == Results(2));
}

TEST_CASE("thread ranks: an abort releases those who wait, with an error") {
  const auto groups = create_thread_communicators(3);
  std::latch enqueued(2);
  const Results results = on_ranks(3, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
    Communicator& group = *groups[static_cast<size_t>(rank)];
    if (rank == 2) {
      enqueued.wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      group.abort();
    }
    group.barrier_async(stream);
    if (rank != 2) enqueued.count_down();
    device.synchronize(stream);
    return std::string("no error");
  });
  for (const std::string& result : results) {
    CHECK_THAT(result, Contains("rank 2 has given up the group"));
  }
}

TEST_CASE("thread ranks: different calls are an error of all") {
  const auto groups = create_thread_communicators(3);
  const Results results = on_ranks(3, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
    const auto arena = device.allocate_device_memory(1024);
    groups[static_cast<size_t>(rank)]->all_reduce_async(arena->data(), rank == 1 ? 4 : 5,
                                                        DType::kF32, stream);
    device.synchronize(stream);
    return std::string("no error");
  });
  for (const std::string& result : results) {
    CHECK_THAT(result, Contains("rank 0 all-reduce of 5 fp32 elements, rank 1 all-reduce of 4"));
  }
}

TEST_CASE("thread ranks: many collectives one after the other, streams of different speed") {
  constexpr int kRanks = 3;
  constexpr int kRounds = 300;
  const auto groups = create_thread_communicators(kRanks);
  const Results results =
      on_ranks(kRanks, [&](int rank, gpu::Device& device, gpu::Stream& stream) -> std::string {
        Communicator& group = *groups[static_cast<size_t>(rank)];
        const auto arena = device.allocate_device_memory(kRanks * sizeof(float));
        auto* sums = reinterpret_cast<float*>(arena->data());
        for (int round = 0; round < kRounds; ++round) {
          constexpr int kTriplings = 15;  // as far as fp32 has all powers of 3
          if (round % kTriplings == 0) {
            device.synchronize(stream);
            if (sums[0] != (round == 0 ? 0.F : 14348907.F)) return "another sum";
            sums[0] = 1;
          }
          group.all_reduce_async(sums, 1, DType::kF32, stream);
          if (round % (rank + 2) == 0) device.synchronize(stream);
        }
        device.synchronize(stream);
        return "";
      });
  CHECK(results == Results(kRanks));
}

}  // namespace
}  // namespace strata::comm
