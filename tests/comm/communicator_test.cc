#include "comm/communicator.h"

#include <cstring>

#include "base/bytes.h"
#include "catch.h"
#include "comm/collectives.h"
#include "comm/one_rank.h"
#include "gpu/host/host_device.h"

namespace strata::comm {
namespace {

TEST_CASE("collectives: the bytes that no algorithm can save") {
  const auto bytes = [](Collective collective, size_t size, int ranks) {
    return collective_bytes(collective, size, ranks);
  };
  for (size_t i = 0; i < kCollectives; ++i) {
    CHECK(bytes(static_cast<Collective>(i), 1000, 1) == 0);
    CHECK(bytes(static_cast<Collective>(i), 0, 8) == 0);
  }
  CHECK(bytes(Collective::kAllGather, 1000, 4) == 750);
  CHECK(bytes(Collective::kReduceScatter, 1000, 8) == 875);
  CHECK(bytes(Collective::kAllReduce, 1000, 2) == 1000);
  CHECK(bytes(Collective::kBroadcast, 1000, 5) == 1000);
  CHECK(bytes(Collective::kAllGather, size_t{1} << 62, 4) == 3 * (size_t{1} << 60));
}

TEST_CASE("one rank: does every collective on its own") {
  const auto device = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB * 64});
  const auto stream = device->create_stream("collectives");
  const auto group = create_one_rank(*device);
  CHECK(group->rank() == 0);
  CHECK(group->size() == 1);
  CHECK(check_collectives({*device, *stream, *group}, 5000).empty());
}

TEST_CASE("one rank: nothing goes on after an abort") {
  const auto device = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB});
  const auto stream = device->create_stream("collectives");
  const auto group = create_one_rank(*device);
  group->barrier_async(*stream);
  device->synchronize(*stream);
  group->abort();
  group->barrier_async(*stream);
  CHECK_THROWS_WITH(device->synchronize(*stream), Catch::Matchers::Contains("given up"));
}

}  // namespace
}  // namespace strata::comm
