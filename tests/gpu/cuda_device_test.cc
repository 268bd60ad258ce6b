// The contract of gpu/device.h on CUDA, emulated or real.

#include "gpu/cuda/cuda_device.h"

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <limits>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/scratch.h"
#include "gpu/cuda_test_device.h"
#include "gpu/operators.h"

namespace strata::gpu {
namespace {

using Catch::Matchers::Contains;
using cuda::CudaStream;

/// Long enough for a stream that wrongly goes on to be seen; a right one is never waited for so.
constexpr std::chrono::milliseconds kProvocation{20};

/// Blocks a stream until opened. Opens at the latest when it goes, so that a failed REQUIRE ends.
class Gate {
 public:
  explicit Gate(Stream& stream) : handle_(static_cast<CudaStream&>(stream).handle()) {
    const auto wait = [](void* latch) { static_cast<std::latch*>(latch)->wait(); };
    REQUIRE(cudaLaunchHostFunc(handle_, wait, &latch_) == cudaSuccess);
  }
  ~Gate() {
    open();
    static_cast<void>(cudaStreamSynchronize(handle_));  // it must not read the latch any more
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    if (!latch_.try_wait()) latch_.count_down();
  }

 private:
  std::latch latch_{1};
  cuda::StreamHandle handle_;
};

/// Work that sets a flag.
void enqueue_flag(Stream& stream, std::atomic<bool>& flag) {
  const auto set = [](void* target) { *static_cast<std::atomic<bool>*>(target) = true; };
  REQUIRE(cudaLaunchHostFunc(static_cast<CudaStream&>(stream).handle(), set, &flag) == cudaSuccess);
}

/// A device arena with a host arena of the same size for what goes in and out.
struct Memory {
  Memory(Device& device, size_t size_bytes)
      : on_device(device.allocate_device_memory(size_bytes)),
        on_host(device.allocate_host_memory(size_bytes)) {}
  std::unique_ptr<Arena> on_device, on_host;
};

TEST_CASE("cuda device: says what it is", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  CHECK(device->kind() == "cuda");
  const CudaAvailability found = cuda_availability();
  REQUIRE(found.devices.size() >= 1);
  CHECK(device->description() == found.devices[0].name);
  CHECK_FALSE(found.devices[0].name.empty());
  CHECK(found.devices[0].major >= kOldestMajor);
  CHECK(found.diagnosis.empty());
  CHECK(device->free_memory_bytes() > 0);
  CHECK(device->free_memory_bytes() < found.devices[0].memory_bytes);
  CHECK_THROWS_AS(create_cuda_device({.ordinal = 4096}), Error);
}

TEST_CASE("cuda device: arenas share what the device may use", "[cuda]") {
  const auto device = open_test_device({.memory_bytes = 10 * kMiB + 1});
  if (!device) return;
  CHECK(device->free_memory_bytes() == 10 * kMiB + 1);
  auto first = device->allocate_device_memory(6 * kMiB);
  CHECK(first->size_bytes() == 6 * kMiB);
  CHECK(reinterpret_cast<uintptr_t>(first->data()) % 256 == 0);
  CHECK(device->free_memory_bytes() == 4 * kMiB + 1);
  const auto host_memory = device->allocate_host_memory(32 * kMiB);
  CHECK(device->free_memory_bytes() == 4 * kMiB + 1);
  try {
    const auto too_much = device->allocate_device_memory(4 * kMiB + 2);
    FAIL("more than the limit was given");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDoesNotFit);
    CHECK_THAT(error.what(), Contains("4194305 bytes") && Contains("4194306 bytes"));
  }
  CHECK_THROWS_AS(device->allocate_device_memory(std::numeric_limits<size_t>::max()), Error);
  const auto rest = device->allocate_device_memory(4 * kMiB + 1);
  CHECK(device->free_memory_bytes() == 0);
  const auto nothing = device->allocate_device_memory(0);
  CHECK(nothing->size_bytes() == 0);
  first.reset();
  CHECK(device->free_memory_bytes() == 6 * kMiB);
}

TEST_CASE("cuda device: more than the device has is refused with numbers", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const size_t all = cuda_availability().devices[0].memory_bytes;
  try {
    const auto too_much = device->allocate_device_memory(all + 1);
    FAIL("more than the device has was given");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDoesNotFit);
    CHECK_THAT(error.what(), Contains(device->description()) && Contains(std::to_string(all + 1)));
  }
  // What is said to be free can be had.
  const auto everything = device->allocate_device_memory(device->free_memory_bytes());
  CHECK(everything->data() != nullptr);
}

TEST_CASE("cuda device: host memory is page-aligned, zero and of exact size", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  CHECK(device->allocate_host_memory(0)->size_bytes() == 0);
  for (const size_t size_bytes :
       {size_t{1}, page_bytes - 1, page_bytes, page_bytes + 1, 5 * kMiB}) {
    const auto arena = device->allocate_host_memory(size_bytes);
    INFO(size_bytes);
    CHECK(arena->size_bytes() == size_bytes);
    CHECK(reinterpret_cast<uintptr_t>(arena->data()) % page_bytes == 0);
    CHECK(std::all_of(arena->data(), arena->data() + size_bytes,
                      [](std::byte value) { return value == std::byte{0}; }));
    cudaPointerAttributes attributes{};
    REQUIRE(cudaPointerGetAttributes(&attributes, arena->data()) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeHost);
  }
}

TEST_CASE("cuda device: copies and fills of sizes around a page and more", "[cuda]") {
  constexpr size_t kMost = 2 * kMiB + 1;
  const auto device = open_test_device();
  if (!device) return;
  const Memory memory(*device, kMost);
  const auto second = device->allocate_device_memory(kMost);
  const auto back = device->allocate_host_memory(kMost);
  const auto stream = device->create_stream("copies");
  CHECK(stream->name() == "copies");
  CounterRandom random(7, 0);
  for (const size_t size :
       {size_t{0}, size_t{1}, 4 * kKiB - 1, 4 * kKiB, 4 * kKiB + 1, kMiB, 2 * kMiB, kMost}) {
    for (size_t i = 0; i < size; ++i) memory.on_host->data()[i] = std::byte(random.next_u64());
    std::memset(back->data(), 0x55, kMost);
    device->copy_async(memory.on_device->data(), memory.on_host->data(), size,
                       CopyDirection::kUpload, *stream);
    device->copy_async(second->data(), memory.on_device->data(), size, CopyDirection::kWithinDevice,
                       *stream);
    device->fill_zero_async(memory.on_device->data(), size, *stream);
    device->copy_async(back->data(), second->data(), size, CopyDirection::kDownload, *stream);
    device->synchronize(*stream);
    INFO(size);
    CHECK(std::memcmp(back->data(), memory.on_host->data(), size) == 0);
    CHECK((size == kMost || back->data()[size] == std::byte{0x55}));
    device->copy_async(back->data(), memory.on_device->data(), size, CopyDirection::kDownload,
                       *stream);
    device->synchronize(*stream);
    CHECK(std::all_of(back->data(), back->data() + size,
                      [](std::byte value) { return value == std::byte{0}; }));
  }
}

TEST_CASE("cuda stream: a blocked stream blocks neither the caller nor another stream", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto blocked = device->create_stream("blocked");
  const auto free = device->create_stream("free");
  const Memory memory(*device, 4096);
  std::atomic<bool> in_blocked = false;
  std::atomic<bool> in_free = false;
  {
    Gate gate(*blocked);
    // None of these waits for the gate, copies of pinned memory included.
    device->copy_async(memory.on_device->data(), memory.on_host->data(), 4096,
                       CopyDirection::kUpload, *blocked);
    device->fill_zero_async(memory.on_device->data(), 4096, *blocked);
    device->operators().add({.count = 1024,
                             .dtype = DType::kF32,
                             .a = memory.on_device->data(),
                             .b = memory.on_device->data(),
                             .out = memory.on_device->data()},
                            *blocked);
    enqueue_flag(*blocked, in_blocked);
    enqueue_flag(*free, in_free);
    device->synchronize(*free);
    CHECK(in_free);
    CHECK_FALSE(in_blocked);
    gate.open();
    device->synchronize(*blocked);
    CHECK(in_blocked);
  }
}

TEST_CASE("cuda stream: drains when it is destroyed", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  auto stream = device->create_stream("draining");
  std::atomic<bool> ended = false;
  const auto nap = [](void*) { std::this_thread::sleep_for(kProvocation); };
  REQUIRE(cudaLaunchHostFunc(static_cast<CudaStream&>(*stream).handle(), nap, nullptr) ==
          cudaSuccess);
  enqueue_flag(*stream, ended);
  stream.reset();
  CHECK(ended);
}

TEST_CASE("cuda events: a wait keeps to the recording that it found", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto first = device->create_stream("first");
  const auto second = device->create_stream("second");
  const auto waiting = device->create_stream("waiting");
  auto event = device->create_event();
  std::atomic<bool> went_on = false;

  SECTION("when the event is recorded again elsewhere, or destroyed") {
    Gate gate(*first);
    device->record_async(*event, *first);
    device->wait_async(*waiting, *event);
    enqueue_flag(*waiting, went_on);
    device->record_async(*event, *second);
    device->synchronize(*event);  // the latest recording: does not wait for the gate
    event.reset();
    std::this_thread::sleep_for(kProvocation);
    CHECK_FALSE(went_on);
    gate.open();
    device->synchronize(*waiting);
    CHECK(went_on);
  }
  SECTION("when the event is first recorded after the wait") {
    device->synchronize(*event);  // never recorded: reached
    Gate gate(*first);
    device->wait_async(*waiting, *event);
    enqueue_flag(*waiting, went_on);
    device->record_async(*event, *first);
    device->synchronize(*waiting);
    CHECK(went_on);
  }
  SECTION("of its own stream, without blocking it") {
    Gate gate(*first);
    device->record_async(*event, *first);
    device->wait_async(*first, *event);
    enqueue_flag(*first, went_on);
    gate.open();
    device->synchronize(*first);
    CHECK(went_on);
  }
}

TEST_CASE("cuda events: order random work of several streams", "[cuda]") {
  // Blocks of numbers are changed by work on random streams. Each block has one event, recorded
  // after every use and waited for before, so that the result is that of the calling order. Sums of
  // small integers in fp32 are exact, and doubled at most every other time they stay so.
  constexpr uint64_t kSeed = 20240611;
  CAPTURE(kSeed);
  constexpr size_t kBlocks = 6;
  constexpr size_t kStreams = 4;
  constexpr size_t kCount = 1000;
  constexpr size_t kBlockBytes = kCount * sizeof(float);
  constexpr size_t kPitch = align_up(kBlockBytes, 256);

  const auto device = open_test_device();
  if (!device) return;
  const Memory memory(*device, kBlocks * kPitch);
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t s = 0; s < kStreams; ++s) streams.push_back(device->create_stream("stream"));
  std::vector<std::unique_ptr<Event>> events;
  for (size_t b = 0; b < kBlocks; ++b) events.push_back(device->create_event());
  const auto block = [&](size_t b) {
    return reinterpret_cast<float*>(memory.on_device->data() + b * kPitch);
  };

  CounterRandom random(kSeed, 0);
  std::vector<std::vector<float>> expected(kBlocks);
  for (size_t b = 0; b < kBlocks; ++b) {
    auto* staged = reinterpret_cast<float*>(memory.on_host->data() + b * kPitch);
    for (size_t i = 0; i < kCount; ++i) {
      staged[i] = static_cast<float>(random.next_below(100));
      expected[b].push_back(staged[i]);
    }
    device->copy_async(block(b), staged, kBlockBytes, CopyDirection::kUpload, *streams[b % 4]);
    device->record_async(*events[b], *streams[b % 4]);
  }
  for (int round = 0; round < 400; ++round) {
    const auto to = static_cast<size_t>(random.next_below(kBlocks));
    const auto from = static_cast<size_t>((to + 1 + random.next_below(kBlocks - 1)) % kBlocks);
    Stream& stream = *streams[random.next_below(kStreams)];
    device->wait_async(stream, *events[to]);
    device->wait_async(stream, *events[from]);
    switch (random.next_below(4)) {
      case 0:
        device->copy_async(block(to), block(from), kBlockBytes, CopyDirection::kWithinDevice,
                           stream);
        expected[to] = expected[from];
        break;
      case 1:
        device->fill_zero_async(block(to), kBlockBytes / 2, stream);
        std::fill_n(expected[to].begin(), kCount / 2, 0.0F);
        break;
      default:
        device->operators().add({.count = kCount,
                                 .dtype = DType::kF32,
                                 .a = block(to),
                                 .b = block(from),
                                 .out = block(to)},
                                stream);
        for (size_t i = 0; i < kCount; ++i) expected[to][i] += expected[from][i];
    }
    device->record_async(*events[to], stream);
    device->record_async(*events[from], stream);
  }
  for (const auto& stream : streams) device->synchronize(*stream);
  device->copy_async(memory.on_host->data(), memory.on_device->data(), kBlocks * kPitch,
                     CopyDirection::kDownload, *streams[0]);
  device->synchronize(*streams[0]);
  for (size_t b = 0; b < kBlocks; ++b) {
    CHECK(std::memcmp(memory.on_host->data() + b * kPitch, expected[b].data(), kBlockBytes) == 0);
  }
}

TEST_CASE("cuda events: several threads may synchronize while the event is recorded again",
          "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto stream = device->create_stream("stream");
  const auto event = device->create_event();
  constexpr int kItems = 300;
  std::atomic<int> recorded = 0;
  std::atomic<int> ended = 0;
  std::atomic<int> too_early = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int seen = 0; seen < kItems;) {
        seen = recorded;
        device->synchronize(*event);
        if (ended < seen) ++too_early;
      }
    });
  }
  const auto count = [](void* counter) { ++*static_cast<std::atomic<int>*>(counter); };
  bool enqueued = true;
  for (int i = 0; i < kItems; ++i) {
    enqueued = enqueued && cudaLaunchHostFunc(static_cast<CudaStream&>(*stream).handle(), count,
                                              &ended) == cudaSuccess;
    device->record_async(*event, *stream);
    ++recorded;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(enqueued);
  CHECK(too_early == 0);
}

TEST_CASE("cuda operators: run in the order of the stream, with their own copy of the arguments",
          "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto stream = device->create_stream("compute");
  constexpr int64_t kCount = 1001;
  constexpr size_t kBytes = kCount * sizeof(float);
  constexpr size_t kPitch = align_up(kBytes, 256);
  const Memory memory(*device, 3 * kPitch);
  auto* host = reinterpret_cast<float*>(memory.on_host->data());
  for (int64_t i = 0; i < kCount; ++i) host[i] = static_cast<float>(i);
  std::byte* a = memory.on_device->data();
  std::byte* b = a + kPitch;
  std::byte* sum = b + kPitch;

  Gate gate(*stream);
  device->copy_async(a, host, kBytes, CopyDirection::kUpload, *stream);
  device->copy_async(b, a, kBytes, CopyDirection::kWithinDevice, *stream);
  {
    AddArgs args{.count = kCount, .dtype = DType::kF32, .a = a, .b = b};
    args.out = sum;
    device->operators().add(args, *stream);
    args = {};
  }
  auto* result = reinterpret_cast<float*>(memory.on_host->data() + kPitch);
  device->copy_async(result, sum, kBytes, CopyDirection::kDownload, *stream);
  CHECK(result[1] == 0);
  gate.open();
  device->synchronize(*stream);
  for (int64_t i = 0; i < kCount; ++i) REQUIRE(result[i] == 2 * static_cast<float>(i));
}

TEST_CASE("cuda operators: a plan made without the device has its sizes of scratch", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  const auto sizes = cuda::operator_sizes(cuda_availability().devices.front().major);
  const Operators& operators = device->operators();
  const AttentionBackwardArgs attention{.forward = {.tokens = 100, .heads = 6}};
  CHECK(sizes->matmul_scratch_bytes({}) == operators.matmul_scratch_bytes({}));
  CHECK(sizes->rms_norm_backward_scratch_bytes({.rows = 5000, .width = 72}) ==
        operators.rms_norm_backward_scratch_bytes({.rows = 5000, .width = 72}));
  CHECK(sizes->attention_scratch_bytes(attention.forward) ==
        operators.attention_scratch_bytes(attention.forward));
  CHECK(sizes->attention_backward_scratch_bytes(attention) ==
        operators.attention_backward_scratch_bytes(attention));
  CHECK(sizes->embedding_backward_scratch_bytes({.rows = 77}) ==
        operators.embedding_backward_scratch_bytes({.rows = 77}));
  CHECK(sizes->cross_entropy_scratch_bytes({.rows = 33}) ==
        operators.cross_entropy_scratch_bytes({.rows = 33}));
  CHECK(sizes->finish_gradient_scratch_bytes({.count = 9}) ==
        operators.finish_gradient_scratch_bytes({.count = 9}));
}

}  // namespace
}  // namespace strata::gpu
