#include "nvme/drive.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "base/error.h"
#include "catch.h"
#include "nvme/fault_backend.h"
#include "nvme/test_requests.h"
#include "temporary_directory.h"
#include "trials.h"

namespace strata::nvme {
namespace {

constexpr size_t kPage = Drive::kMinAlignmentBytes;
constexpr size_t kBlock = 4 * kPage;

DriveOptions options_for(FaultDisk& disk, unsigned depth = 4) {
  return {.path = "drive-under-test",
          .block_size_bytes = kBlock,
          .depth = depth,
          .queue_capacity = 64,
          .backend = disk.factory()};
}

std::vector<std::byte> random_image(size_t size_bytes, uint64_t seed) {
  std::vector<std::byte> image(size_bytes);
  fill_random(image, seed);
  return image;
}

Request page_request(Operation operation, size_t page, const PageBuffer& buffer, Results& results) {
  return {.operation = operation,
          .offset_bytes = static_cast<int64_t>(page * kPage),
          .data = buffer.data() + page * kPage,
          .size_bytes = kPage,
          .tag = page,
          .sink = results.sink()};
}

}  // namespace

TEST_CASE("requests of every size around the block's come back whole") {
  FaultDisk disk(16 * kBlock);
  Drive drive(options_for(disk));
  for (const size_t size :
       {size_t{0}, kPage, kBlock - kPage, kBlock, kBlock + kPage, 3 * kBlock, 8 * kBlock + kPage}) {
    const PageBuffer data(size);
    const PageBuffer back(size);
    fill_random(data.span(), size);
    const int64_t offset = 3 * kPage;
    drive.write(offset, data.span());
    drive.read(offset, back.span());
    REQUIRE(equal(data.span(), back.span()));
  }
  for (const Transfer& transfer : disk.history()) CHECK(transfer.size_bytes <= kBlock);
}

TEST_CASE("a short transfer is continued") {
  FaultDisk disk(random_image(8 * kBlock, 1));
  const std::vector<std::byte> before = disk.image();
  const Operation operation = GENERATE(Operation::kRead, Operation::kWrite);
  const size_t bytes = GENERATE(size_t{512}, kPage + 512, kBlock - 512, size_t{700});
  for (uint64_t n = 0; n < 5; ++n) disk.shorten(operation, n, bytes);
  Drive drive(options_for(disk));
  const PageBuffer buffer(2 * kBlock);
  if (operation == Operation::kRead) {
    drive.read(kPage, buffer.span());
    CHECK(equal(buffer.span(), std::span(before).subspan(kPage, 2 * kBlock)));
  } else {
    fill_random(buffer.span(), 2);
    drive.write(kPage, buffer.span());
    const std::vector<std::byte> image = disk.image();
    CHECK(equal(buffer.span(), std::span(image).subspan(kPage, 2 * kBlock)));
    CHECK(equal(std::span(before).first(kPage), std::span(image).first(kPage)));
    CHECK(equal(std::span(before).subspan(kPage + 2 * kBlock),
                std::span(image).subspan(kPage + 2 * kBlock)));
  }
  CHECK(drive.statistics().repeats >= 2);
  CHECK(drive.statistics().total().read + drive.statistics().total().written == 2 * kBlock);
}

TEST_CASE("a write of nothing is tried again") {
  FaultDisk disk(kBlock);
  disk.shorten(Operation::kWrite, 0, 0);
  disk.shorten(Operation::kWrite, 1, 100);  // less than can be gone on from
  Drive drive(options_for(disk));
  const PageBuffer data(kBlock);
  fill_random(data.span(), 3);
  drive.write(0, data.span());
  CHECK(equal(disk.image(), data.span()));
}

TEST_CASE("reading past the end is an error") {
  FaultDisk disk(kBlock + kPage);
  Drive drive(options_for(disk));
  const PageBuffer buffer(2 * kBlock);
  CHECK_NOTHROW(drive.read(0, buffer.span(0, kBlock + kPage)));
  CHECK_THROWS_AS(drive.read(0, buffer.span()), IoError);
  CHECK_THROWS_AS(drive.read(10 * kBlock, buffer.span()), IoError);
  try {
    drive.read(kBlock, buffer.span(0, kBlock));
    FAIL("nothing was thrown");
  } catch (const IoError& error) {
    CHECK(error.errno_code() == ENODATA);
    CHECK(error.path() == "drive-under-test");
  }
}

TEST_CASE("errors name operation, path, offset and size") {
  FaultDisk disk(4 * kBlock);
  disk.fail(Operation::kRead, 0, 1, EIO);
  disk.fail(Operation::kWrite, 0, 1, ENOSPC);
  disk.fail(Operation::kSync, 0, 1, EIO);
  Drive drive(options_for(disk));
  const PageBuffer buffer(kPage);
  CHECK(message_of([&] { drive.read(8192, buffer.span()); }) ==
        "cannot read 'drive-under-test', 4096 bytes at offset 8192: Input/output error");
  CHECK(message_of([&] { drive.write(4096, buffer.span()); }) ==
        "cannot write 'drive-under-test', 4096 bytes at offset 4096: No space left on device");
  CHECK(message_of([&] { drive.sync(); }) == "cannot sync 'drive-under-test': Input/output error");
  CHECK(drive.statistics().errors == 3);
  // And it goes on.
  CHECK_NOTHROW(drive.read(8192, buffer.span()));
  CHECK_NOTHROW(drive.write(4096, buffer.span()));
  CHECK_NOTHROW(drive.sync());
  CHECK(drive.statistics().errors == 3);
}

TEST_CASE("a failed block fails its request alone and keeps the rest from starting") {
  FaultDisk disk(64 * kBlock);
  disk.hold();
  disk.fail(Operation::kWrite, 1, 1, EIO);
  Drive drive(options_for(disk, 2));
  const PageBuffer buffer(32 * kBlock);
  Results results;
  Request request{.operation = Operation::kWrite,
                  .data = buffer.data(),
                  .size_bytes = 16 * kBlock,
                  .tag = 1,
                  .sink = results.sink()};
  drive.submit(request);
  request.offset_bytes = 32 * kBlock;
  request.tag = 2;
  drive.submit(request);
  disk.release();
  results.wait_for(2);
  const auto errors = results.errors_by_tag();
  CHECK(errors.at(1) == EIO);
  CHECK(errors.at(2) == 0);
  // Two were in flight when the second failed; at most two more had been started by then.
  CHECK(disk.history().size() <= 4 + 16);
  for (const Result& result : results.all()) {
    if (result.ok()) {
      CHECK(result.size_bytes == 16 * kBlock);
    } else {
      CHECK(result.size_bytes < 16 * kBlock);
    }
  }
}

TEST_CASE("EINTR and storms of EAGAIN pass unseen") {
  FaultDisk disk(random_image(4 * kBlock, 4));
  const int code = GENERATE(EINTR, EAGAIN);
  disk.fail(Operation::kRead, 0, 100, code);
  disk.fail(Operation::kSync, 0, 10, code);
  Drive drive(options_for(disk));
  const PageBuffer buffer(4 * kBlock);
  drive.read(0, buffer.span());
  drive.sync();
  CHECK(equal(buffer.span(), disk.image()));
  CHECK(drive.statistics().repeats == 110);
}

TEST_CASE("a storm without end is an error in the end") {
  FaultDisk disk(4 * kBlock);
  DriveOptions options = options_for(disk);
  options.patience = std::chrono::milliseconds(30);
  Drive drive(options);
  const PageBuffer buffer(kBlock);
  SECTION("EAGAIN") {
    disk.fail(Operation::kRead, 0, ~uint64_t{0}, EAGAIN);
    CHECK(message_of([&] { drive.read(0, buffer.span()); }) ==
          "cannot read 'drive-under-test', 16384 bytes at offset 0: Resource temporarily "
          "unavailable");
  }
  SECTION("a queue that takes nothing") {
    disk.set_queue_depth(0);
    CHECK(message_of([&] { drive.read(0, buffer.span()); }) ==
          "cannot read 'drive-under-test', 16384 bytes at offset 0: Device or resource busy");
  }
  SECTION("writes that write nothing") {
    for (uint64_t n = 0; n < 100000; ++n) disk.shorten(Operation::kWrite, n, 0);
    CHECK(message_of([&] { drive.write(0, buffer.span()); }) ==
          "cannot write 'drive-under-test', 16384 bytes at offset 0: Input/output error");
  }
}

TEST_CASE("a backend with less room than the drive's depth is enough") {
  FaultDisk disk(64 * kBlock);
  disk.set_queue_depth(1);
  Drive drive(options_for(disk, 8));
  const PageBuffer data(64 * kBlock);
  fill_random(data.span(), 5);
  drive.write(0, data.span());
  CHECK(equal(disk.image(), data.span()));
  CHECK(drive.statistics().depth_max == 1);
}

TEST_CASE("any mix of faults and orders leaves every byte right") {
  constexpr uint64_t kSeeds = trials(24, 6);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    constexpr size_t kRequests = 100;
    constexpr size_t kSpan = 3 * kBlock;
    FaultDisk disk(kRequests * kSpan);
    disk.set_noise(
        {.seed = seed, .interrupted = 0.1, .again = 0.1, .shortened = 0.3, .refused = 0.1});
    disk.reorder(seed + 1000, seed % 8);
    Drive drive(options_for(disk, 1 + static_cast<unsigned>(seed % 9)));
    const PageBuffer data(kRequests * kSpan);
    fill_random(data.span(), seed);
    std::mt19937_64 random(seed);
    for (const Operation operation : {Operation::kWrite, Operation::kRead}) {
      const PageBuffer target(kRequests * kSpan);
      const PageBuffer& memory = operation == Operation::kWrite ? data : target;
      Results results;
      std::vector<size_t> sizes;
      for (size_t i = 0; i < kRequests; ++i) {
        sizes.push_back(kPage * (random() % (kSpan / kPage + 1)));
        drive.submit({.operation = operation,
                      .offset_bytes = static_cast<int64_t>(i * kSpan),
                      .data = memory.data() + i * kSpan,
                      .size_bytes = sizes.back(),
                      .priority = static_cast<Priority>(random() % kPriorities),
                      .tag = i,
                      .sink = results.sink()});
      }
      drive.drain();
      REQUIRE(results.count() == kRequests);
      const std::vector<std::byte> image = disk.image();
      for (const Result& result : results.all()) {
        REQUIRE(result.ok());
        REQUIRE(result.size_bytes == sizes[result.tag]);
        REQUIRE(equal(memory.span(result.tag * kSpan, result.size_bytes),
                      std::span(image).subspan(result.tag * kSpan, result.size_bytes)));
      }
    }
  }
}

TEST_CASE("a full queue makes callers wait, and nothing fails") {
  FaultDisk disk(64 * kBlock);
  disk.hold();
  DriveOptions options = options_for(disk, 2);
  options.queue_capacity = 4;
  Drive drive(options);
  const PageBuffer buffer(16 * kPage);
  Results results;
  for (size_t i = 0; i < 4; ++i) {
    REQUIRE(drive.try_submit(page_request(Operation::kRead, i, buffer, results)));
  }
  CHECK_FALSE(drive.try_submit(page_request(Operation::kRead, 4, buffer, results)));

  std::atomic<int> accepted = 0;
  std::thread caller([&] {
    for (size_t i = 4; i < 12; ++i) {
      drive.submit(page_request(Operation::kRead, i, buffer, results));
      ++accepted;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(accepted == 0);
  CHECK(results.count() == 0);
  disk.release();
  caller.join();
  results.wait_for(12);
  for (const Result& result : results.all()) CHECK(result.ok());
}

TEST_CASE("no more transfers are in flight than the depth") {
  FaultDisk disk(64 * kBlock);
  disk.reorder(1, 5);
  for (const unsigned depth : {1U, 2U, 7U}) {
    Drive drive(options_for(disk, depth));
    const PageBuffer buffer(64 * kBlock);
    drive.read(0, buffer.span());
    CHECK(drive.statistics().depth_max == depth);
    CHECK(drive.statistics().mean_depth() <= depth);
    CHECK(drive.statistics().blocks == 64);
  }
}

TEST_CASE("weight reads go before state reads go before write-back, each in order") {
  FaultDisk disk(64 * kPage);
  disk.hold();
  Drive drive(options_for(disk, 1));
  const PageBuffer buffer(64 * kPage);
  Results results;
  const auto submit = [&](Operation operation, Priority priority, size_t page) {
    Request request = page_request(operation, page, buffer, results);
    request.priority = priority;
    drive.submit(request);
  };
  submit(Operation::kWrite, Priority::kWriteBack, 0);
  while (disk.history().empty()) std::this_thread::yield();  // the first is with the backend
  for (size_t i = 0; i < 3; ++i) {
    submit(Operation::kWrite, Priority::kWriteBack, 30 + i);
    submit(Operation::kRead, Priority::kStateRead, 20 + i);
    submit(Operation::kRead, Priority::kWeightRead, 10 + i);
  }
  disk.release();
  results.wait_for(10);
  std::vector<size_t> order;
  for (const Transfer& transfer : disk.history()) {
    order.push_back(static_cast<size_t>(transfer.offset_bytes) / kPage);
  }
  CHECK(order == std::vector<size_t>{0, 10, 11, 12, 20, 21, 22, 30, 31, 32});
}

TEST_CASE("a read comes between the blocks of a long write-back") {
  FaultDisk disk(64 * kBlock);
  disk.hold();
  Drive drive(options_for(disk, 1));
  const PageBuffer buffer(32 * kBlock);
  const PageBuffer page(kPage);
  Results results;
  drive.submit({.operation = Operation::kWrite,
                .data = buffer.data(),
                .size_bytes = 32 * kBlock,
                .priority = Priority::kWriteBack,
                .sink = results.sink()});
  while (disk.history().empty()) std::this_thread::yield();
  drive.submit({.offset_bytes = 40 * kBlock,
                .data = page.data(),
                .size_bytes = kPage,
                .priority = Priority::kWeightRead,
                .sink = results.sink()});
  disk.release();
  results.wait_for(2);
  REQUIRE(disk.history().size() == 33);
  CHECK(disk.history()[1].operation == Operation::kRead);
}

TEST_CASE("a sync waits for the writes before it and for nothing else") {
  FaultDisk disk(64 * kPage);
  disk.hold();
  Drive drive(options_for(disk, 1));
  const PageBuffer buffer(64 * kPage);
  Results results;
  const auto submit = [&](Operation operation, size_t page) {
    drive.submit(page_request(operation, page, buffer, results));
  };
  const auto sync = [&](uint64_t tag) {
    drive.submit({.operation = Operation::kSync, .tag = tag, .sink = results.sink()});
  };
  submit(Operation::kRead, 0);
  while (disk.history().empty()) std::this_thread::yield();
  submit(Operation::kWrite, 1);
  submit(Operation::kWrite, 2);
  sync(100);
  submit(Operation::kWrite, 3);
  sync(101);
  sync(102);
  submit(Operation::kRead, 4);
  disk.release();
  results.wait_for(8);
  std::vector<uint64_t> order;
  for (const Result& result : results.all()) order.push_back(result.tag);
  CHECK(order == std::vector<uint64_t>{0, 1, 2, 100, 3, 101, 102, 4});
  // What the syncs covered survives whatever the power cut does.
  CHECK(equal(disk.power_cut(1), disk.image()));
}

TEST_CASE("a later write that overtakes does not count for a sync") {
  FaultDisk disk(64 * kPage);
  disk.hold();
  Drive drive(options_for(disk, 1));
  const PageBuffer buffer(64 * kPage);
  Results results;
  drive.submit(page_request(Operation::kRead, 0, buffer, results));
  while (disk.history().empty()) std::this_thread::yield();
  drive.submit(page_request(Operation::kWrite, 1, buffer, results));
  drive.submit(page_request(Operation::kWrite, 2, buffer, results));
  drive.submit({.operation = Operation::kSync, .tag = 100, .sink = results.sink()});
  Request urgent = page_request(Operation::kWrite, 3, buffer, results);
  urgent.priority = Priority::kWeightRead;
  drive.submit(urgent);
  disk.release();
  results.wait_for(5);
  std::vector<uint64_t> order;
  for (const Result& result : results.all()) order.push_back(result.tag);
  CHECK(order == std::vector<uint64_t>{0, 3, 1, 2, 100});
}

TEST_CASE("a sync waits for a failing write as well") {
  FaultDisk disk(64 * kBlock);
  disk.fail(Operation::kWrite, 3, 1, EIO);
  disk.reorder(5, 4);
  Drive drive(options_for(disk));
  const PageBuffer buffer(16 * kBlock);
  Results results;
  drive.submit({.operation = Operation::kWrite,
                .data = buffer.data(),
                .size_bytes = 16 * kBlock,
                .tag = 1,
                .sink = results.sink()});
  drive.submit({.operation = Operation::kSync, .tag = 2, .sink = results.sink()});
  results.wait_for(2);
  CHECK(results.all()[0].tag == 1);
  CHECK(results.all()[0].error == EIO);
  CHECK(results.all()[1].ok());
}

TEST_CASE("a handler may submit") {
  struct Chain {
    Drive* drive = nullptr;
    std::byte* data = nullptr;
    size_t size_bytes = 0;
    std::atomic<int> left = 100;
    std::atomic<int> refused = 0;
    static void next(void* context, const Result& result) noexcept {
      auto* chain = static_cast<Chain*>(context);
      if (!result.ok() || --chain->left <= 0) return;
      if (!chain->drive->try_submit({.data = chain->data,
                                     .size_bytes = chain->size_bytes,
                                     .sink = {&Chain::next, chain}})) {
        ++chain->refused;
      }
    }
  };
  FaultDisk disk(kBlock);
  DriveOptions options = options_for(disk);
  options.queue_capacity = 1;
  Drive drive(options);
  const PageBuffer buffer(kPage);
  Chain chain;
  chain.drive = &drive;
  chain.data = buffer.data();
  chain.size_bytes = GENERATE(size_t{0}, kPage);
  drive.submit(
      {.data = chain.data, .size_bytes = chain.size_bytes, .sink = {&Chain::next, &chain}});
  while (chain.left > 0 && chain.refused == 0) std::this_thread::yield();
  CHECK(chain.refused == 0);
  CHECK(chain.left == 0);
}

TEST_CASE(
    "drain waits for what was accepted before it, and close for everything, errors included") {
  FaultDisk disk(64 * kPage);
  disk.fail(Operation::kRead, 5, 3, EIO);
  disk.reorder(3, 6);
  const PageBuffer buffer(64 * kPage);
  Results results;
  {
    Drive drive(options_for(disk));
    for (size_t i = 0; i < 20; ++i) {
      drive.submit(page_request(Operation::kRead, i, buffer, results));
    }
    drive.drain();
    CHECK(results.count() == 20);
    drive.drain();
    for (size_t i = 20; i < 40; ++i) {
      drive.submit(page_request(Operation::kWrite, i, buffer, results));
    }
    drive.close();
    CHECK(results.count() == 40);
    drive.close();
  }
  {
    Drive drive(options_for(disk));
    for (size_t i = 40; i < 60; ++i) {
      drive.submit(page_request(Operation::kWrite, i, buffer, results));
    }
  }
  CHECK(results.count() == 60);
  int failed = 0;
  for (const Result& result : results.all()) failed += result.ok() ? 0 : 1;
  CHECK(failed == 3);
}

TEST_CASE("several threads share a drive") {
  constexpr size_t kThreads = 4;
  constexpr size_t kPages = 64;
  FaultDisk disk(kThreads * kPages * kPage);
  disk.set_noise({.seed = 9, .interrupted = 0.05, .again = 0.05, .shortened = 0.1});
  disk.reorder(10, 4);
  DriveOptions options = options_for(disk);
  options.queue_capacity = 3;
  Drive drive(options);
  const PageBuffer data(kThreads * kPages * kPage);
  fill_random(data.span(), 11);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const PageBuffer back(kPage);
      for (size_t i = 0; i < kPages; ++i) {
        const size_t at = (t * kPages + i) * kPage;
        drive.write(static_cast<int64_t>(at), data.span(at, kPage));
        if (i % 8 == 0) drive.sync();
        drive.read(static_cast<int64_t>(at), back.span());
        if (!equal(back.span(), data.span(at, kPage))) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(equal(disk.image(), data.span()));
}

TEST_CASE("bytes are counted by what they are for") {
  FaultDisk disk(64 * kBlock);
  disk.fail(Operation::kRead, 2, 1, EIO);
  Drive drive(options_for(disk));
  const PageBuffer buffer(4 * kBlock);
  drive.write(0, buffer.span(), Priority::kWriteBack, Traffic::kMoment1);
  const DriveStatistics before = drive.statistics();
  drive.read(0, buffer.span(0, kPage), Priority::kWeightRead, Traffic::kWeight);
  drive.read(0, buffer.span(0, kBlock), Priority::kStateRead, Traffic::kMoment2);
  CHECK_THROWS(drive.read(0, buffer.span(0, kPage), Priority::kStateRead, Traffic::kBoundary));
  drive.sync();
  drive.drain();
  const DriveStatistics all = drive.statistics();
  const DriveStatistics step = all.since(before);
  const auto of = [](const DriveStatistics& statistics, Traffic traffic) {
    return statistics.bytes[static_cast<size_t>(traffic)];
  };
  CHECK(of(all, Traffic::kMoment1).written == 4 * kBlock);
  CHECK(of(step, Traffic::kMoment1).written == 0);
  CHECK(of(step, Traffic::kWeight).read == kPage);
  CHECK(of(step, Traffic::kMoment2).read == kBlock);
  CHECK(of(step, Traffic::kBoundary).read == 0);
  CHECK(step.total().read == kPage + kBlock);
  CHECK(step.total().written == 0);
  CHECK(step.errors == 1);
  CHECK(step.read_latency.count() == 2);
  CHECK(step.write_latency.count() == 0);
  CHECK(all.write_latency.count() == 4);
  CHECK(step.sync_latency.count() == 1);
  CHECK(step.read_latency.percentile_s(0.5) > 0);
}

TEST_CASE("latencies are kept to an eighth of an octave") {
  CHECK(LatencyHistogram::bucket_of(0) == 0);
  CHECK(LatencyHistogram::bucket_of(1023) == 0);
  CHECK(LatencyHistogram::bucket_of(1024) == 1);
  CHECK(LatencyHistogram::bucket_of(~uint64_t{0}) == LatencyHistogram::kBuckets - 1);
  size_t last = 0;
  for (double ns = 1024; ns < 3e12; ns *= 1.003) {
    const size_t bucket = LatencyHistogram::bucket_of(static_cast<uint64_t>(ns));
    REQUIRE(bucket >= last);
    REQUIRE(bucket <= last + 1);
    last = bucket;
    const double bound = LatencyHistogram::upper_bound_s(bucket) * 1e9;
    REQUIRE(bound >= std::floor(ns));
    REQUIRE(bound <= std::ceil(ns) * 1.126);
  }
  LatencyHistogram histogram;
  CHECK(histogram.percentile_s(0.5) == 0);
  histogram.counts[LatencyHistogram::bucket_of(2000)] = 98;
  histogram.counts[LatencyHistogram::bucket_of(50000)] = 1;
  histogram.counts[LatencyHistogram::bucket_of(9000000)] = 1;
  CHECK(histogram.percentile_s(0.5) == Approx(2e-6).epsilon(0.13));
  CHECK(histogram.percentile_s(0.98) == Approx(2e-6).epsilon(0.13));
  CHECK(histogram.percentile_s(0.99) == Approx(50e-6).epsilon(0.13));
  CHECK(histogram.max_s() == Approx(9e-3).epsilon(0.13));
}

TEST_CASE("a backend that cannot be opened is the constructor's error") {
  FaultDisk disk(kBlock);
  DriveOptions options = options_for(disk);
  options.backend = [](const BackendOptions& backend) -> std::unique_ptr<Backend> {
    throw IoError("open", backend.path.string(), ENOENT);
  };
  CHECK(message_of([&] { const Drive drive(options); }) ==
        "cannot open 'drive-under-test': No such file or directory");
  options = options_for(disk);
  options.block_size_bytes = 6000;
  CHECK(message_of([&] { const Drive drive(options); }) ==
        "the block size of 'drive-under-test' must be a multiple of 4096 bytes");
}

// The disk of the tests themselves.

TEST_CASE("a power cut keeps what was synced and any part of the rest") {
  constexpr size_t kSize = 8 * kPage;
  std::vector<std::byte> first(kSize, std::byte{1});
  FaultDisk disk(kSize);
  Drive drive(options_for(disk));
  const PageBuffer buffer(kSize);
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{1});
  drive.write(0, buffer.span());
  drive.sync();
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{2});
  drive.write(0, buffer.span(0, kSize / 2));
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{3});
  drive.write(0, buffer.span(0, kSize / 4));
  const std::vector<std::byte> image = disk.power_cut(7);
  CHECK(image == disk.power_cut(7));
  CHECK(image != disk.power_cut(8));
  std::array<int, 4> quarter{};
  std::array<int, 4> second_quarter{};
  for (size_t at = 0; at < kSize; at += FaultDisk::kSectorBytes) {
    const auto value = static_cast<size_t>(image[at]);
    for (size_t i = 1; i < FaultDisk::kSectorBytes; ++i) REQUIRE(image[at + i] == image[at]);
    REQUIRE(value >= 1);
    REQUIRE(value <= 3);
    if (at < kSize / 4) {
      ++quarter.at(value);
    } else if (at < kSize / 2) {
      ++second_quarter.at(value);
    } else {
      REQUIRE(value == 1);
    }
  }
  for (const int value : {1, 2, 3}) CHECK(quarter.at(static_cast<size_t>(value)) > 0);
  CHECK(second_quarter[1] > 0);
  CHECK(second_quarter[2] > 0);
  CHECK(second_quarter[3] == 0);
  CHECK_THROWS_AS(drive.read(0, buffer.span()), IoError);
}

TEST_CASE("writes in flight at a power cut may be there in part") {
  FaultDisk disk(8 * kPage);
  Drive drive(options_for(disk));
  const PageBuffer buffer(8 * kPage);
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{5});
  Results results;
  disk.power().cut_after(0);
  disk.hold();
  drive.submit({.operation = Operation::kWrite,
                .data = buffer.data(),
                .size_bytes = 4 * kPage,
                .sink = results.sink()});
  while (disk.history().empty()) std::this_thread::yield();
  const auto count = [](const std::vector<std::byte>& image) {
    return std::count(image.begin(), image.end(), std::byte{5});
  };
  const auto in_flight = disk.power_cut(3);
  CHECK(count(in_flight) > 0);
  CHECK(count(in_flight) < static_cast<ptrdiff_t>(4 * kPage));
  disk.release();
  results.wait_for(1);
  CHECK(results.all()[0].error == EIO);
  CHECK(disk.power_cut(3) == in_flight);
}

TEST_CASE("disks on one supply lose power together") {
  const auto power = std::make_shared<PowerSupply>();
  FaultDisk a(std::vector<std::byte>(kBlock), power);
  FaultDisk b(std::vector<std::byte>(kBlock), power);
  Drive drive_a(options_for(a));
  Drive drive_b(options_for(b));
  const PageBuffer buffer(kPage);
  power->cut_after(3);
  drive_a.write(0, buffer.span());
  drive_b.write(0, buffer.span());
  drive_a.sync();
  CHECK(power->is_cut());
  CHECK(power->transfers() == 3);
  CHECK_THROWS_AS(drive_a.write(0, buffer.span()), IoError);
  CHECK_THROWS_AS(drive_b.sync(), IoError);
}

TEST_CASE("a flipped bit is read back flipped") {
  FaultDisk disk(kPage);
  disk.flip_bit(8 * 100 + 3);
  Drive drive(options_for(disk));
  const PageBuffer buffer(kPage);
  drive.read(0, buffer.span());
  for (size_t i = 0; i < kPage; ++i) {
    REQUIRE(buffer.data()[i] == (i == 100 ? std::byte{8} : std::byte{0}));
  }
}

namespace {

/// Wakes slowly, and knows whether it was closed meanwhile.
class SlowToWake : public Backend {
 public:
  struct Seen {
    std::atomic<int> waking = 0;
    std::atomic<bool> was_slow = false, closed_while_waking = false;
  };
  SlowToWake(std::unique_ptr<Backend> inner, Seen& seen) : inner_(std::move(inner)), seen_(seen) {
    info_ = inner_->info();
  }
  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    return inner_->try_submit(transfer);
  }
  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    return inner_->reap(completions, wait);
  }
  void wake() noexcept override {
    ++seen_.waking;
    inner_->wake();
    if (!seen_.was_slow.exchange(true)) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    --seen_.waking;
  }
  [[nodiscard]] int close() noexcept override {
    if (seen_.waking > 0) seen_.closed_while_waking = true;
    return inner_->close();
  }

 private:
  std::unique_ptr<Backend> inner_;
  Seen& seen_;
};

}  // namespace

TEST_CASE("a drive may be closed as soon as its requests have ended") {
  FaultDisk disk(kMiB);
  SlowToWake::Seen seen;
  Drive drive({.path = "disk", .backend = [&](const BackendOptions& options) {
                 return std::make_unique<SlowToWake>(disk.factory()(options), seen);
               }});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it is asleep
  PageBuffer buffer(4096);
  Results results;
  std::thread submitter(
      [&] { drive.submit({.data = buffer.data(), .size_bytes = 4096, .sink = results.sink()}); });
  results.wait_for(1);
  drive.close();
  submitter.join();
  CHECK(seen.was_slow);
  CHECK_FALSE(seen.closed_while_waking);
}

namespace {

/// In a process of its own: a drive is closed while a request waits for room.
[[noreturn]] void close_while_full() {
  FaultDisk disk(kMiB);
  disk.hold();
  Drive drive({.path = "disk", .queue_capacity = 1, .backend = disk.factory()});
  PageBuffer buffer(4096);
  Results results;
  const Request request{.data = buffer.data(), .size_bytes = 4096, .sink = results.sink()};
  drive.submit(request);
  std::thread late([&] { drive.submit(request); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it waits
  std::thread closer([&] { drive.close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until it waits too
  disk.release();
  late.join();
  closer.join();
  ::_exit(0);
}

}  // namespace

TEST_CASE("a drive that is closed while a request waits for room does not swallow it") {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::signal(SIGABRT, SIG_DFL);  // not the test's
    ::close(STDERR_FILENO);
    ::alarm(10);
    close_while_full();
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}

}  // namespace strata::nvme
