// Bounds from below only: a machine may always be slower than a limit.
#include "nvme/throttled_backend.h"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "catch.h"
#include "nvme/drive.h"
#include "nvme/fault_backend.h"
#include "nvme/test_requests.h"
#include "temporary_directory.h"

namespace strata::nvme {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Counts how often a backend is asked for what has ended.
class Counting final : public Backend {
 public:
  Counting(std::unique_ptr<Backend> inner, std::atomic<int>& reaps)
      : inner_(std::move(inner)), reaps_(reaps) {
    info_ = inner_->info();
  }
  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    return inner_->try_submit(transfer);
  }
  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    ++reaps_;
    return inner_->reap(completions, wait);
  }
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] int close() noexcept override { return inner_->close(); }

 private:
  std::unique_ptr<Backend> inner_;
  std::atomic<int>& reaps_;
};

}  // namespace

TEST_CASE("throttled drive: never faster than its limits, which reads and writes share") {
  constexpr size_t kSize = 4 * kMiB;
  constexpr double kReads = 64e6;
  constexpr double kWrites = 32e6;
  FaultDisk disk(2 * kSize);
  std::atomic<int> reaps = 0;
  const auto counted = [&](const BackendOptions& options) -> std::unique_ptr<Backend> {
    return std::make_unique<Counting>(disk.factory()(options), reaps);
  };
  Drive drive({.path = "disk",
               .block_size_bytes = 256 * kKiB,
               .depth = 8,
               .backend = throttled(counted, kReads, kWrites)});
  REQUIRE(drive.notes().size() == 1);
  CHECK(drive.notes()[0] ==
        "'disk' is slowed down: it reads at 0.064 GB/s and writes at 0.032 GB/s");
  const PageBuffer data(kSize);
  const PageBuffer back(kSize);
  fill_random(data.span(), 1);

  auto begin = Clock::now();
  drive.write(0, data.span());
  CHECK(seconds_since(begin) >= kSize / kWrites);
  begin = Clock::now();
  drive.read(0, back.span());
  CHECK(seconds_since(begin) >= kSize / kReads);
  CHECK(equal(data.span(), back.span()));

  Results results;
  begin = Clock::now();
  for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
    const bool is_read = operation == Operation::kRead;
    drive.submit({.operation = operation,
                  .offset_bytes = is_read ? 0 : static_cast<int64_t>(kSize),
                  .data = (is_read ? back : data).data(),
                  .size_bytes = kSize,
                  .sink = results.sink()});
  }
  results.wait_for(2);
  CHECK(seconds_since(begin) >= kSize / kReads + kSize / kWrites);
  for (const Result& result : results.all()) CHECK(result.ok());
  CHECK(disk.count(Operation::kRead) + disk.count(Operation::kWrite) == 64);
  // It sleeps in between: for each of 64 blocks it looks twice before it sleeps and twice after,
  // and now and then a little early.
  CHECK(reaps < 64 * 10);
}

TEST_CASE("throttled drive: first come, first served, and a sync is no exception") {
  FaultDisk disk(kMiB);
  const auto backend = throttled(disk.factory(), 0, 1e6)({.path = "disk", .depth = 4});
  const PageBuffer data(100 * 4096);
  const auto begin = Clock::now();
  // The write takes 0.4 s; what comes after it none.
  REQUIRE(backend->try_submit({.operation = Operation::kWrite,
                               .data = data.data(),
                               .size_bytes = data.span().size(),
                               .tag = 70}) == 0);
  REQUIRE(backend->try_submit({.operation = Operation::kSync, .tag = 71}) == 0);
  REQUIRE(backend->try_submit({.data = data.data(), .size_bytes = 4096, .tag = 72}) == 0);
  std::array<RawCompletion, 4> completions;
  // Woken before anything is due: nothing, at once.
  backend->wake();
  const size_t early = backend->reap(completions, true);
  CHECK((early == 0 || seconds_since(begin) >= 0.4));
  std::thread waker([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    backend->wake();
  });
  size_t count = early;
  int reaps = 0;
  std::vector<RawCompletion> all(completions.begin(),
                                 completions.begin() + static_cast<ptrdiff_t>(early));
  while (count < 3) {
    const size_t more = backend->reap(completions, true);
    all.insert(all.end(), completions.begin(), completions.begin() + static_cast<ptrdiff_t>(more));
    count += more;
    ++reaps;
  }
  waker.join();
  CHECK(seconds_since(begin) >= 409600 / 1e6);
  CHECK(reaps < 10);
  std::array<int64_t, 3> by_tag{-1, -1, -1};
  for (const RawCompletion& completion : all) by_tag.at(completion.tag - 70) = completion.result;
  CHECK(by_tag == std::array<int64_t, 3>{409600, 0, 4096});
  CHECK(backend->close() == 0);
}

TEST_CASE("throttled drive: errors and repeats pass through") {
  FaultDisk disk(kMiB);
  disk.set_noise({.seed = 4, .interrupted = 0.1, .again = 0.1, .shortened = 0.2, .refused = 0.2});
  disk.reorder(5, 3);
  const PageBuffer data(kMiB);
  const PageBuffer back(kMiB);
  fill_random(data.span(), 2);
  Drive drive({.path = "disk",
               .block_size_bytes = 16 * kKiB,
               .depth = 5,
               .backend = throttled(disk.factory(), 2e9, 1e9)});
  drive.write(0, data.span());
  drive.read(0, back.span());
  CHECK(equal(data.span(), back.span()));
  disk.fail(Operation::kRead, disk.count(Operation::kRead), 1, EIO);
  CHECK_THAT(message_of([&] { drive.read(0, back.span()); }),
             Catch::Contains("Input/output error"));
}

TEST_CASE("throttled drive: on a file, and closed with requests under way") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("file", std::string(kMiB, 'z'));
  const PageBuffer buffer(kMiB);
  Results results;
  {
    Drive drive(
        {.path = path, .block_size_bytes = 64 * kKiB, .backend = throttled(open_backend, 10e6, 0)});
    drive.submit({.data = buffer.data(), .size_bytes = kMiB, .sink = results.sink()});
    drive.close();
  }
  REQUIRE(results.count() == 1);
  CHECK(results.all()[0].ok());
  CHECK(buffer.data()[kMiB - 1] == std::byte{'z'});
}

}  // namespace strata::nvme
