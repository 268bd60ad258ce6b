// The seam between a Drive and the kernel: raw transfers on one opened file, with the kernel's
// manners. A transfer may be short, may fail with any errno (EINTR and EAGAIN among them), and
// transfers end in any order. What is made of that is the Drive's affair; tests replace what is
// below here.
//
// Threads: a backend is created, used and destroyed on one thread, its drive's; only wake() may be
// called from others. No function but the factories allocates or throws. A blocking close of the
// file is part of close().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace strata::nvme {

enum class Operation : uint8_t {
  kRead,
  kWrite,
  kSync  // fdatasync: all writes that had completed before it was submitted are on the medium
};

/// One operation as handed to the kernel. For kSync offset, data and size are zero.
struct Transfer {
  Operation operation = Operation::kRead;
  int64_t offset_bytes = 0;
  std::byte* data = nullptr;  // written into or, for kWrite, only read from
  size_t size_bytes = 0;
  uint64_t tag = 0;  // comes back in the RawCompletion
};

struct RawCompletion {
  uint64_t tag = 0;
  int64_t result = 0;  // bytes transferred, or -errno
};

/// Memory that transfers will use often: registered with the kernel once. Not owned; must outlive
/// the backend.
struct BufferRegion {
  std::byte* data = nullptr;
  size_t size_bytes = 0;
};

enum class DirectIo : uint8_t {
  kAuto,  // past the page cache where the file system can
  kOff
};

struct BackendOptions {
  std::filesystem::path path{};  // an existing file
  bool read_only = false;
  DirectIo direct = DirectIo::kAuto;
  unsigned depth = 32;  // the most transfers in flight at once
  std::vector<BufferRegion> buffers{};
  // How long the kernel may refuse everything before that is every transfer's error.
  std::chrono::milliseconds patience{10000};
};

struct BackendInfo {
  std::string name;                // "io_uring", "threads"
  bool direct = false;             // transfers go past the page cache
  size_t alignment_bytes = 1;      // of offsets, sizes and addresses; a power of two
  int64_t size_bytes = 0;          // of the file when it was opened
  std::vector<std::string> notes;  // one line for each thing that is not as good as it could be
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  /// Nothing is in flight any more when a backend is destroyed.
  virtual ~Backend() = default;

  [[nodiscard]] BackendInfo& info() noexcept { return info_; }

  /// Takes a transfer, to be started by the next reap at the latest. Its data must live until its
  /// completion. Returns 0, or an errno where it was not taken: EAGAIN or EBUSY when the queue is
  /// full, others when it can never be.
  [[nodiscard]] virtual int try_submit(const Transfer& transfer) noexcept = 0;

  /// Starts all that was taken, then moves completions into `completions` and returns how many.
  /// With `wait` it blocks until there is at least one or wake() was called; it may return 0
  /// without a reason.
  [[nodiscard]] virtual size_t reap(std::span<RawCompletion> completions, bool wait) noexcept = 0;

  /// From any thread: makes the reap that is blocking, or else the next that would block, return.
  virtual void wake() noexcept = 0;

  /// Closes the file and returns 0 or an errno. Nothing is in flight; nothing is called after it
  /// but the destructor.
  [[nodiscard]] virtual int close() noexcept = 0;

 protected:
  BackendInfo info_;
};

/// Opens a backend on the calling thread, or throws IoError.
using BackendFactory = std::function<std::unique_ptr<Backend>(const BackendOptions& options)>;

/// io_uring, or threads where the kernel or a container forbids it; info().notes then says so.
[[nodiscard]] std::unique_ptr<Backend> open_backend(const BackendOptions& options);

/// `preferred`, or `other` with a note where that fails because io_uring cannot be had (ENOSYS,
/// EPERM, EACCES, EINVAL, ENOMEM, EOPNOTSUPP). Other errors are thrown on.
[[nodiscard]] BackendFactory with_fallback(BackendFactory preferred, BackendFactory other);

}  // namespace strata::nvme
