// Kernels in the emulator: right ones give the same in every order, wrong ones are found out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "catch.h"
#include "cuda_emulator/test_kernels.h"
#include "cuda_emulator/test_support.h"

namespace strata::gpu::cuda::emulator::test {
namespace {

struct LaneOrder {
  Order order;
  uint64_t seed;
};
const std::vector<LaneOrder> kOrders{{Order::kForward, 0},
                                     {Order::kBackward, 0},
                                     {Order::kRandom, 1},
                                     {Order::kRandom, 2},
                                     {Order::kRandom, 3}};

std::vector<int> reversed_thrice(LaneOrder order, int barriers) {
  constexpr unsigned kBlocks = 3;
  set_lane_order(order.order, order.seed);
  std::vector<int> values(kBlocks * 64);
  std::iota(values.begin(), values.end(), 1);
  const TestStream stream;
  const DeviceArray<int> in(values);
  const DeviceArray<int> out(values.size());
  reverse_thrice(out.data(), in.data(), kBlocks, barriers, stream.get());
  check(stream.synchronize());
  return out.download();
}

std::vector<int> reversed_blocks() {
  std::vector<int> values(3 * 64);
  for (int i = 0; i < 3 * 64; ++i) values[static_cast<size_t>(i)] = i / 64 * 64 + 64 - i % 64;
  return values;
}

TEST_CASE("Barriers order shared memory in every lane order") {
  const FreshDevice device;
  for (const LaneOrder order : kOrders) {
    CHECK(reversed_thrice(order, 2) == reversed_blocks());
  }
}

// ThreadSanitizer would (rightly) report these.
TEST_CASE("A missing barrier shows in some lane order") {
  if (kThreadSanitizer) return;
  const FreshDevice device;
  for (const int barriers : {0, 1}) {
    CAPTURE(barriers);
    int wrong = 0;
    std::set<std::vector<int>> results;
    for (const LaneOrder order : kOrders) {
      results.insert(reversed_thrice(order, barriers));
      if (reversed_thrice(order, barriers) != reversed_blocks()) ++wrong;
    }
    CHECK(wrong >= 2);
    // Without any, all end up with what nobody wrote.
    CHECK(results.size() >= (barriers == 0 ? 1U : 2U));
  }
  std::vector<int> values(32);
  std::iota(values.begin(), values.end(), 0);
  const TestStream stream;
  const DeviceArray<int> in(values);
  const DeviceArray<int> out(32);
  std::reverse(values.begin(), values.end());
  for (const LaneOrder order : kOrders) {
    set_lane_order(order.order, order.seed);
    reverse_warp(out.data(), in.data(), true, stream.get());
    check(stream.synchronize());
    CHECK(out.download() == values);
    reverse_warp(out.data(), in.data(), false, stream.get());
    check(stream.synchronize());
    CHECK(out.download() != values);
  }
}

TEST_CASE("A random order is the same again for the same seed") {
  const FreshDevice device;
  const TestStream stream;
  const auto order_of = [&](LaneOrder order) {
    set_lane_order(order.order, order.seed);
    const DeviceArray<unsigned> out(4 * 64);
    const DeviceArray<unsigned> counter(std::vector<unsigned>{0});
    tickets(out.data(), counter.data(), 4, stream.get());
    check(stream.synchronize());
    return out.download();
  };
  std::vector<unsigned> forward(4 * 64);
  std::iota(forward.begin(), forward.end(), 0U);
  CHECK(order_of({Order::kForward, 5}) == forward);
  std::reverse(forward.begin(), forward.end());
  CHECK(order_of({Order::kBackward, 5}) == forward);
  const std::vector<unsigned> random = order_of({Order::kRandom, 5});
  CHECK(order_of({Order::kRandom, 5}) == random);
  CHECK(order_of({Order::kRandom, 6}) != random);
  std::vector<unsigned> sorted = random;
  std::sort(sorted.begin(), sorted.end());
  std::reverse(sorted.begin(), sorted.end());
  CHECK(sorted == forward);
}

TEST_CASE("Threads and blocks are numbered in three dimensions") {
  const FreshDevice device;
  const TestStream stream;
  const dim3 grid(3, 2, 2);
  for (const dim3 block : {dim3(5, 4, 3), dim3(1), dim3(1024), dim3(1, 16, 64)}) {
    const size_t threads = size_t{block.x} * block.y * block.z;
    const DeviceArray<uint64_t> out(2 * 12 * threads);
    indices(out.data(), grid, block, stream.get());
    check(stream.synchronize());
    const std::vector<uint64_t> result = out.download();
    for (size_t i = 0; i < 12 * threads; ++i) {
      const size_t thread = i % threads;
      const size_t b = i / threads;
      REQUIRE(result[2 * i] == thread % block.x + 1000 * (thread / block.x % block.y) +
                                   1000000 * (thread / block.x / block.y));
      REQUIRE(result[2 * i + 1] == b % 3 + 1000 * (b / 3 % 2) + 1000000 * (b / 6));
    }
  }
}

std::vector<unsigned> copied(Pipeline pipeline, LaneOrder order, bool* right) {
  constexpr int kTiles = 5;
  set_lane_order(order.order, order.seed);
  std::vector<unsigned> values(kTiles * 64 * 4);
  std::iota(values.begin(), values.end(), 1U);
  const TestStream stream;
  const DeviceArray<unsigned> in(values);
  const DeviceArray<unsigned> out(std::vector<unsigned>(values.size(), 0));
  pipelined_copy(reinterpret_cast<uint4*>(out.data()), reinterpret_cast<const uint4*>(in.data()),
                 kTiles, pipeline, stream.get());
  check(stream.synchronize());
  const std::vector<unsigned> result = out.download();
  *right = result == values;
  return result;
}

TEST_CASE("cp.async lands between its issue and the wait for its group") {
  const FreshDevice device;
  bool right = false;
  for (const LaneOrder order : kOrders) {
    copied(Pipeline::kRight, order, &right);
    CHECK(right);
  }
  if (kThreadSanitizer) return;
  for (const Pipeline pipeline : {Pipeline::kNoWait, Pipeline::kWaitTooFew}) {
    // As late as it may.
    const std::vector<unsigned> result = copied(pipeline, {Order::kForward, 0}, &right);
    CHECK_FALSE(right);
    CHECK(result[0] == 0xffffffffU);
    copied(pipeline, {Order::kRandom, 1}, &right);
    CHECK_FALSE(right);
  }
  // Over what another thread has still to read.
  for (const LaneOrder order : kOrders) {
    copied(Pipeline::kNoBarrierBeforeReuse, order, &right);
    CHECK_FALSE(right);
  }
}

TEST_CASE("cp.async writes zeros where the source is not valid") {
  const FreshDevice device;
  const TestStream stream;
  std::vector<unsigned> values(32 * 4, 7);
  const DeviceArray<unsigned> in(values);
  const DeviceArray<unsigned> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = i / 4 % 2 == 0 ? 7 : 0;
  for (const LaneOrder order : kOrders) {
    set_lane_order(order.order, order.seed);
    zero_filled_copy(reinterpret_cast<uint4*>(out.data()),
                     reinterpret_cast<const uint4*>(in.data()), stream.get());
    check(stream.synchronize());
    CHECK(out.download() == values);
  }
}

TEST_CASE("Memory that nobody wrote holds NaN") {
  const FreshDevice device;
  const TestStream stream;
  const DeviceArray<float> fresh(10000);
  for (const float x : fresh.download()) REQUIRE(std::isnan(x));
  const DeviceArray<float> out(std::vector<float>(2 * 64, 0.0F));
  read_uninitialized(out.data(), stream.get());
  check(stream.synchronize());
  for (const float x : out.download()) CHECK(std::isnan(x));
}

struct Expectation {
  Mistake mistake;
  cudaError_t error;
  std::vector<std::string> parts;
};

TEST_CASE("A kernel's mistake is diagnosed by kernel, block, thread and line") {
  const std::string source = "test_kernels.cu:";
  const std::vector<Expectation> expectations{
      {Mistake::kDivergentBarrier,
       cudaErrorLaunchFailure,
       {"thread (0, 0, 0) waits at __syncthreads", "thread (40, 0, 0) is missing",
        "it waits at __syncthreads", source}},
      {Mistake::kExitBeforeBarrier,
       cudaErrorLaunchFailure,
       {"thread (0, 0, 0) waits at __syncthreads", "thread (63, 0, 0) is missing: it has exited",
        source}},
      {Mistake::kExitBeforeShuffle,
       cudaErrorLaunchFailure,
       {"thread (0, 0, 0) waits at a shuffle", "thread (5, 0, 0) is missing: it has exited"}},
      {Mistake::kBarrierAgainstShuffle,
       cudaErrorLaunchFailure,
       {"thread (0, 0, 0) waits at a shuffle", "thread (7, 0, 0) is missing",
        "it waits at __syncthreads"}},
      {Mistake::kTwoShuffles,
       cudaErrorLaunchFailure,
       {"thread (0, 0, 0) waits at a shuffle", "thread (1, 0, 0) is missing",
        "it waits at a shuffle"}},
      {Mistake::kPartialWarp,
       cudaErrorLaunchFailure,
       {"thread (32, 0, 0) waits at a shuffle", "a warp of fewer than 32 threads"}},
      {Mistake::kLoadPastEnd,
       cudaErrorIllegalAddress,
       {"thread (9, 0, 0) accesses 16 bytes", "not within one allocation", source}},
      {Mistake::kStorePastEnd,
       cudaErrorIllegalAddress,
       {"thread (9, 0, 0) accesses 16 bytes", "not within one allocation", source}},
      {Mistake::kMisaligned,
       cudaErrorMisalignedAddress,
       {"thread (0, 0, 0)", "misaligned address", source}},
      {Mistake::kAsyncFromHost,
       cudaErrorIllegalAddress,
       {"thread (0, 0, 0)", "not within one allocation", source}},
      {Mistake::kAsyncPastShared,
       cudaErrorIllegalAddress,
       {"thread (63, 0, 0) accesses 16 bytes outside its shared memory of 1024", source}},
      {Mistake::kMatrixPastShared,
       cudaErrorIllegalAddress,
       {"thread (30, 0, 0) accesses 16 bytes outside its shared memory of 1024", source}},
      {Mistake::kThrows, cudaErrorLaunchFailure, {"thread (33, 0, 0) threw: out of patience"}},
  };
  for (const Expectation& expectation : expectations) {
    const FreshDevice device;
    const TestStream stream;
    const DeviceArray<std::byte> memory(1032);
    make_mistake(expectation.mistake, memory.data(), memory.size_bytes(), stream.get());
    CAPTURE(static_cast<int>(expectation.mistake));
    CHECK(stream.synchronize() == expectation.error);
    CHECK(cudaStreamSynchronize(stream.get()) == expectation.error);  // It stays.
    const std::string diagnosis = only_diagnosis();
    CAPTURE(diagnosis);
    CHECK(contains(diagnosis, "make_mistake: block (0, 0, 0), "));
    for (const std::string& part : expectation.parts) {
      CAPTURE(part);
      CHECK(contains(diagnosis, part));
    }
    // And the fibers that were left behind are good for another kernel.
    reset();
    const DeviceArray<unsigned> x(std::vector<unsigned>(64, 2));
    step(x.data(), 64, stream.get());
    check(stream.synchronize());
    CHECK(x.download() == std::vector<unsigned>(64, 7));
  }
}

TEST_CASE("Writes outside shared memory and allocations are found") {
  const FreshDevice device;
  const TestStream stream;
  {
    const DeviceArray<unsigned> caught(1);
    probe_shared_ends(caught.data(), stream.get());
    check(stream.synchronize());
    CHECK(caught.download()[0] == 6);
  }
  if (kAddressSanitizer) return;  // It would stop at the write itself.
  for (const Mistake mistake : {Mistake::kSharedWriteBefore, Mistake::kSharedWriteAfter}) {
    reset({.print_diagnoses = false});
    const DeviceArray<std::byte> memory(1032);
    make_mistake(mistake, memory.data(), memory.size_bytes(), stream.get());
    CHECK(stream.synchronize() == cudaErrorIllegalAddress);
    CHECK(contains(only_diagnosis(),
                   "make_mistake: block (0, 0, 0) wrote outside its shared memory"));
  }
  for (const int64_t offset : {-1, 1000}) {
    reset({.print_diagnoses = false});
    std::byte* memory = nullptr;
    check(cudaMalloc(reinterpret_cast<void**>(&memory), 1000));
    poke(memory, offset, stream.get());
    check(stream.synchronize());
    CHECK(cudaFree(memory) == cudaErrorIllegalAddress);
    CHECK(contains(only_diagnosis(), "an allocation of 1000 bytes was written outside its ends"));
  }
}

TEST_CASE("A kernel is not given memory of the host") {
  const FreshDevice device;
  const TestStream stream;
  std::vector<unsigned> host(64);
  step(host.data(), 64, stream.get());
  CHECK(stream.synchronize() == cudaErrorIllegalAddress);
  CHECK(contains(only_diagnosis(), "step: a pointer parameter is neither device nor page-locked"));
}

TEST_CASE("A launch that the device cannot do is refused by name") {
  const FreshDevice device;
  const TestStream stream;
  const auto message = [&](dim3 grid, dim3 block, size_t shared_bytes) -> std::string {
    try {
      nothing(grid, block, shared_bytes, stream.get());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  CHECK(message(1, 1024, 163 * 1024).empty());
  CHECK(message(dim3(1, 65535), 1, 0).empty());
  CHECK(message(0, 32, 0).empty());
  CHECK(message(dim3(4, 0), 2000, 0).empty());
  CHECK(
      message(1, 1025, 0) ==
      "nothing: cannot launch 1x1x1 blocks of 1025 threads with 0 bytes of shared memory: invalid "
      "configuration argument");
  CHECK(contains(message(dim3(1, 65536), 1, 0), "invalid configuration argument"));
  CHECK(contains(message(1, 32, 163 * 1024 + 1), "invalid argument"));
  CHECK(cudaGetLastError() == cudaSuccess);  // The exception told it.
  CHECK(stream.synchronize() == cudaSuccess);
  CHECK(counts().launches == 2);
}

}  // namespace
}  // namespace strata::gpu::cuda::emulator::test
