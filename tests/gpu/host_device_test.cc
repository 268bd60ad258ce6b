#include "gpu/host/host_device.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <latch>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/random.h"
#include "catch.h"
#include "cpu_adam/adam.h"
#include "gpu/host/host_stream.h"
#include "gpu/host/kernels.h"
#include "gpu/operators.h"

namespace strata::gpu {
namespace {

using Catch::Matchers::Contains;
using host::HostEvent;
using host::HostStream;
using Clock = std::chrono::steady_clock;

/// Long enough for a thread that wrongly goes on to be seen; a right one is never waited for so.
constexpr std::chrono::milliseconds kProvocation{20};

template <class Work>
void enqueue(Stream& stream, const Work& work) {
  static_cast<HostStream&>(stream).enqueue(work);
}

/// Blocks a stream until opened. Opens at the latest when it goes, so that a failed REQUIRE ends.
class Gate {
 public:
  explicit Gate(Stream& stream) {
    enqueue(stream, [this] { latch_.wait(); });
    passed_ = static_cast<HostStream&>(stream).recording();
  }
  ~Gate() {
    open();
    HostStream::wait(passed_);  // it must not read the latch any more
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    if (!latch_.try_wait()) latch_.count_down();
  }

 private:
  std::latch latch_{1};
  HostEvent::Recording passed_;
};

size_t resident_bytes(const Arena& arena) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages(align_up(arena.size_bytes(), page_bytes) / page_bytes);
  REQUIRE(mincore(arena.data(), arena.size_bytes(), pages.data()) == 0);
  size_t resident = 0;
  for (const unsigned char page : pages) resident += (page & 1U) * page_bytes;
  return resident;
}

TEST_CASE("host device: arenas share one hard capacity") {
  const auto device = create_host_device({.threads = 1, .memory_bytes = 10 * kMiB + 1});
  CHECK(device->free_memory_bytes() == 10 * kMiB + 1);
  auto first = device->allocate_device_memory(6 * kMiB);
  CHECK(device->free_memory_bytes() == 4 * kMiB + 1);
  const auto host_memory = device->allocate_host_memory(32 * kMiB);
  CHECK(device->free_memory_bytes() == 4 * kMiB + 1);

  try {
    const auto too_much = device->allocate_device_memory(4 * kMiB + 2);
    FAIL("more than the capacity was given");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDoesNotFit);
    CHECK_THAT(error.what(), Contains("4194305 bytes") && Contains("4194306 bytes"));
  }
  CHECK_THROWS_AS(device->allocate_device_memory(std::numeric_limits<size_t>::max()), Error);
  CHECK(device->free_memory_bytes() == 4 * kMiB + 1);

  const auto rest = device->allocate_device_memory(4 * kMiB + 1);
  CHECK(device->free_memory_bytes() == 0);
  const auto nothing = device->allocate_device_memory(0);
  CHECK(nothing->size_bytes() == 0);
  first.reset();
  CHECK(device->free_memory_bytes() == 6 * kMiB);
  first = device->allocate_device_memory(6 * kMiB);
  CHECK(device->free_memory_bytes() == 0);
}

TEST_CASE("host device: a mapping that the system refuses takes no capacity") {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  const auto device = create_host_device({.threads = 1, .memory_bytes = kMost});
  for (const size_t size_bytes : {kMost, kMost / 2}) {
    CHECK_THROWS_AS(device->allocate_device_memory(size_bytes), Error);
    CHECK_THROWS_AS(device->allocate_host_memory(size_bytes), Error);
    CHECK(device->free_memory_bytes() == kMost);
  }
}

TEST_CASE("host device: memory is page-aligned, zero, and resident only where it was touched") {
  const auto device = create_host_device({.threads = 1, .memory_bytes = kGiB});
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (const size_t size_bytes :
       {size_t{1}, page_bytes - 1, page_bytes, page_bytes + 1, 5 * kMiB, 256 * kMiB}) {
    for (const bool on_device : {true, false}) {
      const auto arena = on_device ? device->allocate_device_memory(size_bytes)
                                   : device->allocate_host_memory(size_bytes);
      INFO(size_bytes);
      CHECK(arena->size_bytes() == size_bytes);
      CHECK(reinterpret_cast<uintptr_t>(arena->data()) % page_bytes == 0);
      CHECK(resident_bytes(*arena) == 0);
      arena->data()[size_bytes / 2] = std::byte{1};
      CHECK(resident_bytes(*arena) >= 1);
      CHECK(resident_bytes(*arena) <= 2 * kMiB);
      CHECK((size_bytes == 1 || arena->data()[0] == std::byte{0}));
    }
  }
}

TEST_CASE("host device: describes itself and refuses bad options") {
  CHECK(create_host_device({.threads = 1})->description() == "CPU cores (1 thread)");
  CHECK(create_host_device({.threads = 2})->description() == "CPU cores (2 threads)");
  const auto device = create_host_device({});
  CHECK(device->kind() == "host");
  const auto machine_bytes =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  CHECK(device->free_memory_bytes() == machine_bytes / 2);

  CHECK_THROWS_AS(create_host_device({.threads = -1}), Error);
  for (const double speed : {-1.0, 0.5, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_AS(create_host_device({.upload_bytes_per_second = speed}), Error);
    CHECK_THROWS_AS(create_host_device({.download_bytes_per_second = speed}), Error);
  }
}

TEST_CASE("host stream: has a thread of its own, with its name") {
  const auto device = create_host_device({.threads = 1});
  const auto stream = device->create_stream("a long name of a lane");
  CHECK(stream->name() == "a long name of a lane");
  std::array<char, 32> name{};
  std::thread::id id;
  enqueue(*stream, [&name, &id] {
    pthread_getname_np(pthread_self(), name.data(), name.size());
    id = std::this_thread::get_id();
  });
  device->synchronize(*stream);
  CHECK(std::string(name.data()) == "a long name of ");
  CHECK(id != std::this_thread::get_id());
}

TEST_CASE("host stream: a blocked stream blocks neither the caller nor another stream") {
  const auto device = create_host_device({.threads = 1});
  const auto blocked = device->create_stream("blocked");
  const auto free = device->create_stream("free");
  int in_blocked = 0;
  int in_free = 0;
  Gate gate(*blocked);
  enqueue(*blocked, [&] { in_blocked = 1; });
  enqueue(*free, [&] { in_free = 1; });
  device->synchronize(*free);
  CHECK(in_free == 1);
  gate.open();
  device->synchronize(*blocked);
  CHECK(in_blocked == 1);
}

TEST_CASE("host stream: drains when it is destroyed") {
  const auto device = create_host_device({.threads = 1});
  std::vector<int> order;
  auto stream = device->create_stream("draining");
  const auto event = device->create_event();
  for (int i = 0; i < 100; ++i) {
    enqueue(*stream, [i, &order] {
      if (i == 0) std::this_thread::sleep_for(kProvocation);
      order.push_back(i);
    });
  }
  device->record_async(*event, *stream);
  stream.reset();
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<size_t>(i)] == i);
  device->synchronize(*event);

  // A later stream counts on; it must neither repeat old work nor think new work ended.
  stream = device->create_stream("later");
  enqueue(*stream, [&order] { order.push_back(100); });
  device->synchronize(*stream);
  CHECK(order.size() == 101);
}

TEST_CASE("host stream: a full ring blocks the caller until there is room") {
  const auto device = create_host_device({.threads = 1});
  const auto stream = device->create_stream("full");
  constexpr int kItems = 2 * static_cast<int>(HostStream::kRingItems) + 10;
  std::atomic<int> enqueued = 1;  // with the gate
  int ran = 0;
  bool in_order = true;
  Gate gate(*stream);
  std::thread caller([&] {
    for (int i = 0; i < kItems; ++i) {
      enqueue(*stream, [i, &ran, &in_order] { in_order = in_order && ran++ == i; });
      ++enqueued;
    }
  });
  while (enqueued < static_cast<int>(HostStream::kRingItems)) std::this_thread::yield();
  std::this_thread::sleep_for(kProvocation);
  CHECK(enqueued == static_cast<int>(HostStream::kRingItems));
  gate.open();
  caller.join();
  device->synchronize(*stream);
  CHECK(ran == kItems);
  CHECK(in_order);
}

TEST_CASE("host events: order random work of several streams") {
  // Blocks of numbers are changed by work on random streams. Each block has one event, recorded
  // after every use and waited for before, so that the result is that of the calling order.
  constexpr uint64_t kSeed = 20240611;
  CAPTURE(kSeed);
  constexpr size_t kBlocks = 6;
  constexpr size_t kStreams = 4;
  constexpr size_t kBlockBytes = 1000 * sizeof(uint64_t);
  struct Block {
    std::array<uint64_t, 1000> values;
  };
  static_assert(sizeof(Block) == kBlockBytes);

  const auto device = create_host_device({.threads = 1, .memory_bytes = kBlocks * kBlockBytes});
  const auto arena = device->allocate_device_memory(kBlocks * kBlockBytes);
  auto* blocks = reinterpret_cast<Block*>(arena->data());
  std::vector<Block> expected(kBlocks);
  CounterRandom random(kSeed, 0);
  for (size_t b = 0; b < kBlocks; ++b) {
    for (uint64_t& value : expected[b].values) value = random.next_u64();
    blocks[b] = expected[b];
  }
  std::vector<std::unique_ptr<Stream>> streams;
  for (size_t s = 0; s < kStreams; ++s) streams.push_back(device->create_stream("stream"));
  std::vector<std::unique_ptr<Event>> events;
  for (size_t b = 0; b < kBlocks; ++b) events.push_back(device->create_event());

  const auto mix = [](Block& to, const Block& from, uint64_t factor) {
    for (size_t i = 0; i < to.values.size(); ++i) {
      to.values[i] = to.values[i] * factor + from.values[to.values.size() - 1 - i];
    }
  };
  for (int round = 0; round < 3000; ++round) {
    const auto to = static_cast<size_t>(random.next_below(kBlocks));
    const auto from = static_cast<size_t>((to + 1 + random.next_below(kBlocks - 1)) % kBlocks);
    Stream& stream = *streams[random.next_below(kStreams)];
    device->wait_async(stream, *events[to]);
    device->wait_async(stream, *events[from]);
    switch (random.next_below(8)) {
      case 0:
        device->copy_async(&blocks[to], &blocks[from], kBlockBytes,
                           static_cast<CopyDirection>(random.next_below(3)), stream);
        expected[to] = expected[from];
        break;
      case 1:
        device->fill_zero_async(&blocks[to], kBlockBytes / 2, stream);
        std::memset(&expected[to], 0, kBlockBytes / 2);
        break;
      default: {
        const uint64_t factor = random.next_u64() | 1U;
        const auto nap = std::chrono::microseconds(random.next_below(8) == 0 ? 50 : 0);
        enqueue(stream, [nap, factor, mix, &to = blocks[to], &from = blocks[from]] {
          if (nap.count() > 0) std::this_thread::sleep_for(nap);
          mix(to, from, factor);
        });
        mix(expected[to], expected[from], factor);
      }
    }
    device->record_async(*events[to], stream);
    device->record_async(*events[from], stream);
    if (random.next_below(200) == 0) {
      device->synchronize(*events[to]);
      REQUIRE(std::memcmp(&blocks[to], &expected[to], kBlockBytes) == 0);
    }
  }
  for (const auto& stream : streams) device->synchronize(*stream);
  for (size_t b = 0; b < kBlocks; ++b) {
    CHECK(std::memcmp(&blocks[b], &expected[b], kBlockBytes) == 0);
  }
}

TEST_CASE("host events: a wait keeps to the recording that it found") {
  const auto device = create_host_device({.threads = 1});
  const auto first = device->create_stream("first");
  const auto second = device->create_stream("second");
  const auto waiting = device->create_stream("waiting");
  auto event = device->create_event();
  std::atomic<bool> first_ended = false;
  std::atomic<bool> went_on = false;
  bool in_order = false;

  SECTION("when the event is recorded again elsewhere, or destroyed") {
    Gate gate(*first);
    enqueue(*first, [&] { first_ended = true; });
    device->record_async(*event, *first);
    device->wait_async(*waiting, *event);
    enqueue(*waiting, [&] {
      in_order = first_ended;
      went_on = true;
    });
    device->record_async(*event, *second);
    device->synchronize(*event);  // the latest recording: does not wait for the gate
    event.reset();
    std::this_thread::sleep_for(kProvocation);
    CHECK_FALSE(went_on);
    gate.open();
    device->synchronize(*waiting);
    CHECK(went_on);
    CHECK(in_order);
  }
  SECTION("when the event is first recorded after the wait") {
    device->synchronize(*event);  // never recorded: reached
    Gate gate(*first);
    device->wait_async(*waiting, *event);
    enqueue(*waiting, [&] { went_on = true; });
    device->record_async(*event, *first);
    device->synchronize(*waiting);
    CHECK(went_on);
  }
  SECTION("the latest of several in one stream") {
    device->record_async(*event, *first);
    Gate gate(*first);
    enqueue(*first, [&] { first_ended = true; });
    device->record_async(*event, *first);
    device->wait_async(*waiting, *event);
    enqueue(*waiting, [&] { in_order = first_ended; });
    std::this_thread::sleep_for(kProvocation);
    gate.open();
    device->synchronize(*waiting);
    CHECK(in_order);
  }
  SECTION("of its own stream, without blocking it") {
    Gate gate(*first);
    device->record_async(*event, *first);
    device->wait_async(*first, *event);
    enqueue(*first, [&] { went_on = true; });
    gate.open();
    device->synchronize(*first);
    CHECK(went_on);
  }
}

TEST_CASE("host events: several threads may synchronize while the event is recorded again") {
  const auto device = create_host_device({.threads = 1});
  const auto stream = device->create_stream("stream");
  const auto event = device->create_event();
  constexpr int kItems = 2000;
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
  for (int i = 0; i < kItems; ++i) {
    enqueue(*stream, [&ended] { ++ended; });
    device->record_async(*event, *stream);
    ++recorded;
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(too_early == 0);
}

TEST_CASE("host device: the first error is kept, skips later work, and hangs nobody") {
  const auto device = create_host_device({.threads = 1});
  const auto failing = device->create_stream("failing");
  const auto slow = device->create_stream("slow");
  const auto other = device->create_stream("other");
  const auto failed = device->create_event();
  const auto slow_ended = device->create_event();
  const auto other_ended = device->create_event();
  std::atomic<bool> slow_done = false;
  std::array<char, 4> data{'a', 'b', 'c', 'd'};
  bool ran_after = false;

  std::latch slow_began(1);
  std::latch slow_may_end(1);
  enqueue(*slow, [&] {
    slow_began.count_down();
    slow_may_end.wait();
    std::this_thread::sleep_for(kProvocation);
    slow_done = true;
    throw std::runtime_error("a later error");
  });
  device->record_async(*slow_ended, *slow);
  slow_began.wait();  // so that the error does not skip it
  enqueue(*failing, [] { throw std::runtime_error("the first error"); });
  enqueue(*failing, [&] { ran_after = true; });
  device->record_async(*failed, *failing);
  CHECK_THROWS_WITH(device->synchronize(*failed), "the first error");
  slow_may_end.count_down();

  device->wait_async(*other, *failed);
  enqueue(*other, [&] { ran_after = true; });
  device->fill_zero_async(data.data(), 1, *other);
  device->copy_async(&data[1], data.data(), 1, CopyDirection::kUpload, *other);
  device->wait_async(*other, *slow_ended);
  device->record_async(*other_ended, *other);
  CHECK_THROWS_WITH(device->synchronize(*other_ended), "the first error");
  CHECK(slow_done);  // waits are kept to after an error
  for (int i = 0; i < 2; ++i) {
    CHECK_THROWS_WITH(device->synchronize(*failing), "the first error");
    CHECK_THROWS_WITH(device->synchronize(*other), "the first error");
    CHECK_THROWS_WITH(device->synchronize(*failed), "the first error");
  }
  CHECK_FALSE(ran_after);
  CHECK(data == std::array<char, 4>{'a', 'b', 'c', 'd'});
  const auto late = device->create_stream("late");
  enqueue(*late, [&] { ran_after = true; });
  CHECK_THROWS_WITH(device->synchronize(*late), "the first error");
  CHECK_FALSE(ran_after);
}

TEST_CASE("host device: copies and fills of sizes around a page and a piece") {
  constexpr size_t kMost = 2 * kMiB + 1;
  const auto device = create_host_device({.threads = 1,
                                          .memory_bytes = kMost,
                                          .upload_bytes_per_second = 4e9,
                                          .download_bytes_per_second = 1e12});
  const auto on_device = device->allocate_device_memory(kMost);
  const auto source = device->allocate_host_memory(kMost);
  const auto back = device->allocate_host_memory(kMost);
  const auto stream = device->create_stream("copies");
  CounterRandom random(7, 0);
  for (const size_t size : {size_t{0}, size_t{1}, 4 * kKiB - 1, 4 * kKiB, 4 * kKiB + 1, kMiB - 1,
                            kMiB, kMiB + 1, 2 * kMiB, kMost}) {
    for (size_t i = 0; i < size; ++i) source->data()[i] = std::byte(random.next_u64());
    std::memset(back->data(), 0x55, kMost);
    device->copy_async(on_device->data(), source->data(), size, CopyDirection::kUpload, *stream);
    device->copy_async(back->data(), on_device->data(), size, CopyDirection::kDownload, *stream);
    device->synchronize(*stream);
    INFO(size);
    CHECK(std::memcmp(back->data(), source->data(), size) == 0);
    CHECK((size == kMost || back->data()[size] == std::byte{0x55}));
    device->fill_zero_async(back->data(), size, *stream);
    device->synchronize(*stream);
    CHECK(std::all_of(back->data(), back->data() + size,
                      [](std::byte value) { return value == std::byte{0}; }));
    CHECK((size == kMost || back->data()[size] == std::byte{0x55}));
  }
}

TEST_CASE("host link: copies are never faster than the limit") {
  constexpr double kSpeed = 20e6;
  constexpr size_t kBytes = 400'000;  // 20 ms
  const auto device = create_host_device({.threads = 1, .upload_bytes_per_second = kSpeed});
  const auto one = device->create_stream("one");
  const auto two = device->create_stream("two");
  std::vector<char> from(kBytes, 'x');
  std::vector<char> to_one(kBytes);
  std::vector<char> to_two(kBytes);
  const auto seconds_since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };

  const auto begin = Clock::now();
  device->copy_async(to_one.data(), from.data(), kBytes, CopyDirection::kUpload, *one);
  device->copy_async(to_two.data(), from.data(), kBytes, CopyDirection::kUpload, *two);
  device->synchronize(*one);
  CHECK(seconds_since(begin) >= kBytes / kSpeed);
  device->synchronize(*two);
  CHECK(seconds_since(begin) >= 2 * kBytes / kSpeed);  // they share the link
  CHECK(to_one == from);
  CHECK(to_two == from);

  std::this_thread::sleep_for(kProvocation);  // an idle link saves nothing up
  const auto begin_again = Clock::now();
  device->copy_async(to_one.data(), from.data(), kBytes, CopyDirection::kUpload, *one);
  device->synchronize(*one);
  CHECK(seconds_since(begin_again) >= kBytes / kSpeed);
}

TEST_CASE("host link: the limit of one direction is that of no other") {
  // A byte a second: what kept to the wrong limit would take a day.
  const auto device = create_host_device({.threads = 1, .upload_bytes_per_second = 1});
  const auto stream = device->create_stream("stream");
  std::vector<char> from(100'000, 'x');
  std::vector<char> to(from.size());
  device->copy_async(to.data(), from.data(), from.size(), CopyDirection::kDownload, *stream);
  device->copy_async(to.data(), from.data(), from.size(), CopyDirection::kWithinDevice, *stream);
  device->copy_async(to.data(), from.data(), 0, CopyDirection::kUpload, *stream);
  device->synchronize(*stream);
  CHECK(to == from);
}

// One thread where values are checked: ThreadSanitizer does not see how oneTBB joins its workers.

TEST_CASE("host operators: run in the order of the stream, with their own copy of the arguments") {
  const auto device = create_host_device({.threads = 1});
  const auto stream = device->create_stream("compute");
  constexpr int64_t kCount = 1001;
  constexpr size_t kBytes = kCount * sizeof(float);
  std::vector<float> a(kCount);
  std::vector<float> b(kCount);
  std::vector<float> sum(kCount, -1);
  for (size_t i = 0; i < kCount; ++i) a[i] = static_cast<float>(i);

  Gate gate(*stream);
  device->copy_async(b.data(), a.data(), kBytes, CopyDirection::kWithinDevice, *stream);
  {
    AddArgs args{.count = kCount, .dtype = DType::kF32, .a = a.data(), .b = b.data()};
    args.out = sum.data();
    device->operators().add(args, *stream);
    args = {};
  }
  device->copy_async(b.data(), sum.data(), kBytes, CopyDirection::kWithinDevice, *stream);
  CHECK(sum[1] == -1);
  gate.open();
  device->synchronize(*stream);
  for (size_t i = 0; i < kCount; ++i) REQUIRE(b[i] == 2 * static_cast<float>(i));
}

TEST_CASE("host operators: adam is that of cpu_adam, to the same bits") {
  const auto device = create_host_device({.threads = 1});
  const auto stream = device->create_stream("compute");
  constexpr size_t kCount = 2 * cpu_adam::kChunkElements + 1;
  const std::array segments{cpu_adam::Segment{.count = 1000, .decay = true},
                            cpu_adam::Segment{.count = kCount - 1000, .decay = false}};
  constexpr uint64_t kSeed = 11;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  struct State {
    std::vector<float> weight, moment1, moment2;
  };
  State actual;
  std::vector<float> gradient;
  for (size_t i = 0; i < kCount; ++i) {
    gradient.push_back(static_cast<float>(random.next_normal()));
    actual.weight.push_back(static_cast<float>(random.next_normal()));
    actual.moment1.push_back(static_cast<float>(random.next_normal()));
    actual.moment2.push_back(static_cast<float>(random.next_uniform()));
  }
  State expected = actual;
  const auto shard = [&gradient](State& state) {
    return cpu_adam::Shard{.count = kCount,
                           .weight_dtype = DType::kF32,
                           .gradient_dtype = DType::kF32,
                           .gradient = gradient.data(),
                           .weight = state.weight.data(),
                           .moment1 = state.moment1.data(),
                           .moment2 = state.moment2.data(),
                           .weight_out = state.weight.data(),
                           .moment1_out = state.moment1.data(),
                           .moment2_out = state.moment2.data()};
  };
  const auto constants = cpu_adam::step_constants({.weight_decay = 0.1}, 3, 0.5);
  device->operators().adam({.shard = shard(actual),
                            .segments = segments.data(),
                            .segment_count = static_cast<int64_t>(segments.size()),
                            .constants = constants},
                           *stream);
  device->synchronize(*stream);
  cpu_adam::update_reference(shard(expected), segments, constants);
  CHECK(std::memcmp(actual.weight.data(), expected.weight.data(), kCount * 4) == 0);
  CHECK(std::memcmp(actual.moment1.data(), expected.moment1.data(), kCount * 4) == 0);
  CHECK(std::memcmp(actual.moment2.data(), expected.moment2.data(), kCount * 4) == 0);
}

TEST_CASE("host operators: scratch is for the device's number of threads") {
  const AttentionArgs args{.tokens = 64,
                           .heads = 4,
                           .kv_heads = 2,
                           .head_dim = 16,
                           .sequences = 1,
                           .max_sequence = 64,
                           .qkv_stride = 128};
  const AttentionBackwardArgs backward{.forward = args, .dqkv_stride = 128};
  for (const int threads : {1, 2, 3}) {
    const auto device = create_host_device({.threads = threads});
    CHECK(device->operators().attention_scratch_bytes(args) ==
          host::attention_scratch_bytes(args, threads));
    CHECK(device->operators().attention_backward_scratch_bytes(backward) ==
          host::attention_backward_scratch_bytes(backward, threads));
  }
}

}  // namespace
}  // namespace strata::gpu
