// What goes wrong in NCCL, which only the stand-in can do at will.
#include <atomic>
#include <chrono>
#include <thread>

#include "comm/collectives.h"
#include "comm/nccl_communicator.h"
#include "comm/nccl_ranks.h"
#include "comm/nccl_stand_in.h"
#include "cuda_emulator/emulator.h"

namespace strata::comm {
namespace {

using Catch::Matchers::Contains;
using Results = std::vector<std::string>;
namespace emulator = gpu::cuda::emulator;

/// Whatever a test does to the stand-in ends with it, and it must have been used as it should.
class Scope {
 public:
  Scope() { emulator::reset(); }
  ~Scope() {
    nccl_stand_in::stay_in_progress(0);
    CHECK(emulator::diagnoses().empty());
    CHECK(nccl_stand_in::alive() == 0);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
};

TEST_CASE("nccl stand-in: calls that stay in progress are waited for") {
  const Scope scope;
  nccl_stand_in::stay_in_progress(3);
  const int aborted = nccl_stand_in::aborted();
  CHECK(on_cuda_ranks(2, [](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) {
          Kept kept;
          const RankGroups groups = create_nccl_rank_groups(device, options, 1);
          const bool right =
              all_reduced(
                  {.device = device, .stream = stream, .group = *groups.replica, .kept = &kept}, 5,
                  100, DType::kF32) == expected_sum(5, 2, 100, DType::kF32);
          return std::string(right ? "" : "another sum");
        }) == Results(2));
  CHECK(nccl_stand_in::aborted() == aborted);
}

TEST_CASE("nccl stand-in: ranks that do not come are not waited for for ever") {
  const Scope scope;
  const Results results =
      on_cuda_ranks(2, [](NcclOptions options, gpu::Device& device, gpu::Stream& /*stream*/) {
        if (options.rank == 1) {
          int unused[64] = {};
          options.broadcast(unused, sizeof unused);
          return std::string();
        }
        options.patience = std::chrono::milliseconds(20);
        const auto group = create_nccl_communicator(device, options);
        return std::string("connected");
      });
  CHECK_THAT(results[0], Contains("cannot connect rank 0 with the 2 ranks of the group") &&
                             Contains("not all ranks have come in time"));
}

TEST_CASE("nccl stand-in: an asynchronous error ends the wait for a lost rank") {
  const Scope scope;
  std::atomic<int> connected = 0;
  std::atomic<bool> ended = false;
  const Results results = on_cuda_ranks(
      2, [&](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) -> std::string {
        const auto group = create_nccl_communicator(device, options);
        ++connected;
        if (options.rank == 1) {  // never comes to the barrier
          while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return "";
        }
        while (connected < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        group->barrier_async(stream);
        nccl_stand_in::fail_asynchronously(0, ncclRemoteError);
        std::string words = "no error";
        try {
          device.synchronize(stream);
        } catch (const std::exception& error) {
          words = error.what();
        }
        ended = true;
        group->barrier_async(stream);  // is refused without a call
        return words;
      });
  CHECK_THAT(results[0], Contains("remote process exited") && Contains("another rank has ended"));
  CHECK(results[1].empty());
}

TEST_CASE("nccl stand-in: an abort from another thread ends the wait for a lost rank") {
  const Scope scope;
  std::atomic<bool> ended = false;
  const Results results = on_cuda_ranks(
      2, [&](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) -> std::string {
        const auto group = create_nccl_communicator(device, options);
        if (options.rank == 1) {
          while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return "";
        }
        group->barrier_async(stream);
        std::thread other([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          group->abort();
        });
        std::string words = "no error";
        try {
          device.synchronize(stream);
        } catch (const std::exception& error) {
          words = error.what();
        }
        other.join();
        ended = true;
        return words;
      });
  CHECK(results == Results{"the group of this rank has been given up", ""});
}

TEST_CASE("nccl stand-in: a call that fails is the device's error") {
  const Scope scope;
  const Results results =
      on_cuda_ranks(1, [](const NcclOptions& options, gpu::Device& device, gpu::Stream& stream) {
        const auto group = create_nccl_communicator(device, options);
        nccl_stand_in::fail_next_call(ncclInvalidUsage);
        group->barrier_async(stream);
        device.synchronize(stream);
        return std::string("no error");
      });
  CHECK(results == Results{"cannot wait for all ranks: invalid usage"});
}

}  // namespace
}  // namespace strata::comm
