// What becomes of a drive when the kernel turns against its ring: a filter on the drive's thread
// makes io_uring_enter fail from some transfer on, for ever.
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <string>

#include "base/error.h"
#include "catch.h"
#include "nvme/drive.h"
#include "nvme/test_requests.h"
#include "nvme/thread_backend.h"
#include "nvme/uring_backend.h"
#include "temporary_directory.h"

namespace strata::nvme {
namespace {

constexpr size_t kBlock = 64 * kKiB;

/// For the calling thread, until its end. False where that is not allowed.
bool refuse_io_uring_enter(int errno_code) {
  std::array<sock_filter, 4> filter{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_enter, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(errno_code)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{filter.size(), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

struct Breaking {
  int after = 0;  // transfers that are submitted before
  int errno_code = 0;
  std::atomic<bool> could_break = true;
  std::atomic<int> reaps = 0;
};

/// io_uring until it breaks.
class BreakingBackend final : public Backend {
 public:
  BreakingBackend(std::unique_ptr<Backend> inner, Breaking& breaking)
      : inner_(std::move(inner)), breaking_(breaking) {
    info_ = inner_->info();
  }
  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    if (submitted_++ == breaking_.after) {
      breaking_.could_break = refuse_io_uring_enter(breaking_.errno_code);
    }
    return inner_->try_submit(transfer);
  }
  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    ++breaking_.reaps;
    return inner_->reap(completions, wait);
  }
  void wake() noexcept override { inner_->wake(); }
  [[nodiscard]] int close() noexcept override { return inner_->close(); }

 private:
  std::unique_ptr<Backend> inner_;
  Breaking& breaking_;
  int submitted_ = 0;
};

/// Reads 12 blocks, of which 4 are under way at once, then one more, and closes the drive. Empty
/// where io_uring cannot be had or broken.
std::vector<Result> read_blocks(Breaking& breaking, DirectIo direct) {
  const TemporaryDirectory directory;
  const std::string path = directory.write("file", std::string(12 * kBlock, 'u'));
  const PageBuffer buffer(12 * kBlock);
  Results results;
  DriveOptions options{.path = path,
                       .direct = direct,
                       .block_size_bytes = kBlock,
                       .depth = 4,
                       .patience = std::chrono::milliseconds(200)};
  options.backend = [&](const BackendOptions& backend) -> std::unique_ptr<Backend> {
    return std::make_unique<BreakingBackend>(open_uring_backend(backend), breaking);
  };
  try {
    Drive drive(options);
    for (uint64_t i = 0; i < 12; ++i) {
      drive.submit({.offset_bytes = static_cast<int64_t>(i * kBlock),
                    .data = buffer.data() + i * kBlock,
                    .size_bytes = kBlock,
                    .tag = i,
                    .sink = results.sink()});
    }
    drive.drain();
    // Idle, and then woken.
    const std::string message = message_of([&] { drive.read(0, buffer.span(0, kBlock)); });
    CHECK(message.empty() != breaking.could_break);
    drive.close();
  } catch (const IoError& error) {
    WARN("skipped: io_uring: " << error.what());
    return {};
  }
  if (!breaking.could_break) {
    WARN("skipped: seccomp filters are not allowed");
    return {};
  }
  for (const Result& result : results.all()) {
    if (result.ok()) CHECK(buffer.data()[result.tag * kBlock] == std::byte{'u'});
  }
  return results.all();
}

}  // namespace

TEST_CASE("io_uring: when the ring breaks every transfer ends, and the drive can be closed") {
  for (const DirectIo direct : {DirectIo::kAuto, DirectIo::kOff}) {
    for (const int after : {0, 2, 9}) {
      INFO("after " << after);
      Breaking breaking{.after = after, .errno_code = ENXIO};
      const std::vector<Result> results = read_blocks(breaking, direct);
      if (results.empty()) return;
      REQUIRE(results.size() == 12);
      int failed = 0;
      for (const Result& result : results) {
        if (result.ok()) continue;
        CHECK(result.error == ENXIO);
        ++failed;
      }
      CHECK(failed >= 12 - after);
      CHECK(breaking.reaps < 2000);
    }
  }
}

TEST_CASE(
    "io_uring: a kernel that says EAGAIN for ever is asked now and then, until patience ends") {
  for (const int after : {0, 5}) {
    Breaking breaking{.after = after, .errno_code = EAGAIN};
    const std::vector<Result> results = read_blocks(breaking, DirectIo::kAuto);
    if (results.empty()) return;
    REQUIRE(results.size() == 12);
    int failed = 0;
    for (const Result& result : results) {
      if (result.ok()) continue;
      CHECK(result.error == ETIMEDOUT);
      ++failed;
    }
    CHECK(failed >= 12 - after);
    // About a thousand in a second; without a pause it would be as many in a millisecond.
    CHECK(breaking.reaps < 2000);
  }
}

TEST_CASE("backends: a wake is for a reap that blocks, not for one that does not") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("file", "");
  std::vector<std::unique_ptr<Backend>> backends;
  backends.push_back(open_thread_backend({.path = path, .depth = 1}));
  try {
    backends.push_back(open_uring_backend({.path = path, .depth = 1}));
  } catch (const IoError& error) {
    WARN("skipped: io_uring: " << error.what());
  }
  for (const auto& backend : backends) {
    INFO(backend->info().name);
    std::array<RawCompletion, 1> completions;
    for (int i = 0; i < 3; ++i) {
      backend->wake();
      CHECK(backend->reap(completions, false) == 0);
      CHECK(backend->reap(completions, true) == 0);  // returns
    }
    CHECK(backend->close() == 0);
  }
}

}  // namespace strata::nvme
