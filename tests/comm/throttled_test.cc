#include "comm/throttled.h"

#include <chrono>
#include <functional>
#include <limits>

#include "base/error.h"
#include "catch.h"
#include "comm/collectives.h"
#include "comm/thread_communicator.h"
#include "comm/thread_ranks.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Results = std::vector<std::string>;

std::vector<std::unique_ptr<Communicator>> create_throttled(int ranks, double bytes_per_second) {
  auto groups = create_thread_communicators(ranks);
  for (auto& group : groups) group = throttled(std::move(group), bytes_per_second);
  return groups;
}

TEST_CASE("throttled ranks: compute the same") {
  const auto groups = create_throttled(3, 1e12);
  CHECK(on_ranks(3, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
          return check_collectives({device, stream, *groups[static_cast<size_t>(rank)]}, 1500);
        }) == Results(3));
}

TEST_CASE("throttled ranks: a collective takes its bytes at the speed, a barrier nothing") {
  constexpr double kBytesPerSecond = 1e6;
  constexpr size_t kBytes = 20'000;
  const auto groups = create_throttled(2, kBytesPerSecond);
  CHECK(on_ranks(2, [&](int rank, gpu::Device& device, gpu::Stream& stream) -> std::string {
          Communicator& group = *groups[static_cast<size_t>(rank)];
          const auto arena = device.allocate_device_memory(kBytes);
          std::byte* data = arena->data();
          std::byte* place = data + static_cast<size_t>(rank) * kBytes / 2;
          const auto takes = [&](Collective collective, const std::function<void()>& call) {
            const Clock::time_point begin = Clock::now();
            call();
            device.synchronize(stream);
            const std::chrono::duration<double> took = Clock::now() - begin;
            return took.count() >=
                   static_cast<double>(collective_bytes(collective, kBytes, 2)) / kBytesPerSecond;
          };
          if (!takes(Collective::kAllGather,
                     [&] { group.all_gather_async(place, data, kBytes / 2, stream); })) {
            return "all-gather";
          }
          if (!takes(Collective::kReduceScatter, [&] {
                group.reduce_scatter_async(data, place, kBytes / 8, DType::kF32, stream);
              })) {
            return "reduce-scatter";
          }
          if (!takes(Collective::kAllReduce,
                     [&] { group.all_reduce_async(data, kBytes / 4, DType::kF32, stream); })) {
            return "all-reduce";
          }
          if (!takes(Collective::kBroadcast,
                     [&] { group.broadcast_async(data, kBytes, 0, stream); })) {
            return "broadcast";
          }
          return "";
        }) == Results(2));
}

TEST_CASE("throttled ranks: an abort ends the sleep") {
  // A day, of which nobody waits for the end.
  const auto groups = create_throttled(2, 1);
  const Clock::time_point begin = Clock::now();
  on_ranks(2, [&](int rank, gpu::Device& device, gpu::Stream& stream) {
    Communicator& group = *groups[static_cast<size_t>(rank)];
    const auto arena = device.allocate_device_memory(86'400);
    group.broadcast_async(arena->data(), 86'400, 0, stream);
    group.abort();
    device.synchronize(stream);
    return std::string();
  });
  CHECK(Clock::now() - begin < std::chrono::hours(1));
}

TEST_CASE("throttled ranks: refuse speeds that are none") {
  for (const double speed : {0.0, -1.0, 0.5, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_AS(create_throttled(1, speed), Error);
  }
}

}  // namespace
}  // namespace strata::comm
