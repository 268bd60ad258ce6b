// On the emulated device with a stand-in for NCCL, and on real devices with NCCL itself.
#include "comm/nccl_communicator.h"

#include "comm/collectives.h"
#include "comm/nccl_ranks.h"

namespace strata::comm {
namespace {

using Results = std::vector<std::string>;

TEST_CASE("nccl ranks: every collective") {
  for (const int most : {1, 3}) {
    const int ranks = nccl_ranks(most);
    if (ranks == 0) return;
    CHECK(on_cuda_ranks(ranks,
                        [](const NcclOptions& options, gpu::Device& device,
                           gpu::Stream& stream) -> std::string {
                          Kept kept;
                          const auto group = create_nccl_communicator(device, options);
                          if (group->rank() != options.rank || group->size() != options.ranks) {
                            return "another rank";
                          }
                          return check_collectives({.device = device,
                                                    .stream = stream,
                                                    .group = *group,
                                                    .ordered_sums = false,
                                                    .kept = &kept},
                                                   1500);
                        }) == Results(static_cast<size_t>(ranks)));
  }
}

TEST_CASE("nccl ranks: shard groups and replicas") {
  const int ranks = nccl_ranks(4);
  if (ranks == 0) return;
  const int shard_ranks = ranks % 2 == 0 ? 2 : 1;
  CHECK(
      on_cuda_ranks(
          ranks,
          [&](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) -> std::string {
            Kept kept;
            const RankGroups groups = create_nccl_rank_groups(device, options, shard_ranks);
            if (groups.shard->rank() != options.rank % shard_ranks ||
                groups.replica->rank() != options.rank / shard_ranks ||
                groups.shard->size() != shard_ranks ||
                groups.replica->size() != ranks / shard_ranks) {
              return "another place in a group";
            }
            // Of two ranks, in which order they are added is of no matter.
            for (Communicator* group : {groups.shard.get(), groups.replica.get()}) {
              if (group->size() <= 2 &&
                  all_reduced({.device = device, .stream = stream, .group = *group, .kept = &kept},
                              5, 100,
                              DType::kF32) != expected_sum(5, group->size(), 100, DType::kF32)) {
                return "another sum";
              }
            }
            return "";
          }) == Results(static_cast<size_t>(ranks)));
}

TEST_CASE("nccl ranks: nothing goes on after an abort") {
  if (nccl_ranks(1) == 0) return;
  const auto results =
      on_cuda_ranks(1, [](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) {
        const auto group = create_nccl_communicator(device, options);
        group->barrier_async(stream);
        device.synchronize(stream);
        group->abort();
        group->barrier_async(stream);
        device.synchronize(stream);
        return std::string();
      });
  CHECK(results == Results{"the group of this rank has been given up"});
}

}  // namespace
}  // namespace strata::comm
