// One rank of a run of mpirun. All ranks run the same cases in the same order, each with its own
// assertions; mpirun fails where one of them does.
#define CATCH_CONFIG_RUNNER
#include "comm/mpi_communicator.h"

#include <fmt/format.h>
#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "catch.h"
#include "comm/collectives.h"
#include "comm/thread_communicator.h"
#include "comm/thread_ranks.h"
#include "gpu/host/host_device.h"

namespace {
std::atomic<uint64_t> g_sent_bytes = 0;
}

/// In place of the library's, which it counts and calls. Nothing else of MPI sends data here.
extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag,
                         MPI_Comm comm, MPI_Request* request) {
  int size_bytes = 0;
  MPI_Type_size(type, &size_bytes);
  g_sent_bytes += static_cast<uint64_t>(count) * static_cast<uint64_t>(size_bytes);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace strata::comm {
namespace {

MpiWorld* g_world = nullptr;  // of main()

/// What a rank of the tests has.
struct Bench {
  std::unique_ptr<gpu::Device> device =
      gpu::create_host_device({.threads = 1, .memory_bytes = size_t{256} * kMiB});
  std::unique_ptr<gpu::Stream> stream = device->create_stream("collectives");
};

TEST_CASE("mpi: the world knows its ranks and hosts") {
  CHECK(g_world->rank() >= 0);
  CHECK(g_world->rank() < g_world->size());
  CHECK(g_world->local_rank() == g_world->rank());  // on one host
  CHECK_FALSE(g_world->host_name().empty());
  const int root = g_world->size() - 1;
  std::string text(1000, g_world->rank() == root ? 'x' : ' ');
  g_world->broadcast(text.data(), text.size(), root);
  CHECK(text == std::string(1000, 'x'));
  CHECK_THROWS_WITH(start_mpi(), Catch::Matchers::Contains("has done so before"));
}

TEST_CASE("mpi: every collective") {
  Bench bench;
  const auto group = g_world->split(0, g_world->rank());
  CHECK(group->rank() == g_world->rank());
  CHECK(group->size() == g_world->size());
  // More than two pieces of a sum.
  CHECK(check_collectives({*bench.device, *bench.stream, *group}, 20'011) == "");
}

TEST_CASE("mpi: sums of many pieces have the bits of threads as ranks") {
  constexpr int64_t kCount = 1'200'003;
  Bench bench;
  const int ranks = g_world->size();
  const auto group = g_world->split(0, g_world->rank());
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const auto mine = all_reduced({*bench.device, *bench.stream, *group}, 3, kCount, dtype);
    CHECK(mine.size() == static_cast<size_t>(kCount) * size_of(dtype));
    if (g_world->rank() != 0) continue;
    const auto threads = create_thread_communicators(ranks);
    const auto results = on_ranks(ranks, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
      const Communicator& thread = *threads[static_cast<size_t>(rank)];
      return all_reduced({device, stream, *threads[static_cast<size_t>(thread.rank())]}, 3, kCount,
                         dtype) == mine
                 ? std::string()
                 : std::string("other bits");
    });
    CHECK(results == std::vector<std::string>(static_cast<size_t>(ranks)));
  }
}

TEST_CASE("mpi: groups of ranks") {
  Bench bench;
  const int ranks = g_world->size();
  for (int shard_ranks = 1; shard_ranks <= ranks; ++shard_ranks) {
    if (ranks % shard_ranks != 0) continue;
    const RankGroups groups = g_world->create_rank_groups(shard_ranks);
    CHECK(groups.shard->rank() == g_world->rank() % shard_ranks);
    CHECK(groups.replica->rank() == g_world->rank() / shard_ranks);
    for (Communicator* group : {groups.shard.get(), groups.replica.get(), groups.world.get()}) {
      const auto got = all_reduced({*bench.device, *bench.stream, *group}, 5, 1001, DType::kBf16);
      CHECK(got == expected_sum(5, group->size(), 1001, DType::kBf16));
    }
  }
}

TEST_CASE("mpi: sends what the formula says") {
  constexpr size_t kBytes = 12 * 100'000;  // divisible by every number of ranks
  Bench bench;
  const int ranks = g_world->size();
  const auto group = g_world->split(0, g_world->rank());
  const auto arena = bench.device->allocate_device_memory(kBytes);
  std::byte* data = arena->data();
  const size_t part_bytes = kBytes / static_cast<size_t>(ranks);
  std::byte* place = data + static_cast<size_t>(group->rank()) * part_bytes;
  const auto check = [&](std::string_view what, size_t expected, const auto& begin) {
    bench.device->synchronize(*bench.stream);
    const uint64_t before = g_sent_bytes;
    begin();
    bench.device->synchronize(*bench.stream);
    INFO(what);
    CHECK(g_sent_bytes - before == expected);
  };
  check("all-gather", collective_bytes(Collective::kAllGather, kBytes, ranks),
        [&] { group->all_gather_async(place, data, part_bytes, *bench.stream); });
  check("reduce-scatter", collective_bytes(Collective::kReduceScatter, kBytes, ranks), [&] {
    group->reduce_scatter_async(data, place, static_cast<int64_t>(part_bytes / 4), DType::kF32,
                                *bench.stream);
  });
  check("all-reduce", collective_bytes(Collective::kAllReduce, kBytes, ranks), [&] {
    group->all_reduce_async(data, static_cast<int64_t>(kBytes / 2), DType::kBf16, *bench.stream);
  });
  const bool last = (group->rank() + 1) % ranks == 0;
  check("broadcast", last ? 0 : collective_bytes(Collective::kBroadcast, kBytes, ranks),
        [&] { group->broadcast_async(data, kBytes, 0, *bench.stream); });
}

// Last and by itself: MPI cannot be finalized after it. CTest looks for what it says.
TEST_CASE("mpi: errors and aborts end what is under way", "[.errors]") {
  const auto group = g_world->split(0, g_world->rank());
  const auto other = g_world->split(0, g_world->rank());
  std::string different;
  std::string aborted;
  {
    Bench bench;
    const auto arena = bench.device->allocate_device_memory(20);
    group->broadcast_async(arena->data(), g_world->rank() == 0 ? 10 : 20, 0, *bench.stream);
    try {
      bench.device->synchronize(*bench.stream);
    } catch (const Error& error) {
      different = error.what();
    }
  }
  CHECK(different == (g_world->rank() == 0
                          ? ""
                          : "rank 0 has sent 10 bytes instead of 20: the ranks call different "
                            "collectives"));
  if (g_world->rank() == 0) {
    Bench bench;
    other->barrier_async(*bench.stream);  // to which nobody else comes
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    other->abort();
    try {
      bench.device->synchronize(*bench.stream);
    } catch (const Error& error) {
      aborted = error.what();
    }
    CHECK(aborted == "the group of this rank has been given up");
    if (!aborted.empty()) fmt::print("The abort has ended the barrier.\n");
    std::fflush(stdout);
  }
  MPI_Barrier(MPI_COMM_WORLD);  // mpirun ends all when the first has gone
}

}  // namespace
}  // namespace strata::comm

int main(int argc, char** argv) {
  const auto world = strata::comm::start_mpi();
  strata::comm::g_world = world.get();
  const int result = Catch::Session().run(argc, argv);
  strata::comm::g_world = nullptr;
  return result;
}
