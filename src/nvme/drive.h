// One file on one drive, and the thread that reads and writes it at the drive's speed.
//
// Requests are values with a tag. They wait in a bounded queue, are served by priority and, within
// one priority, in the order they came, cut into blocks of which a bounded number is in flight at
// once. A request ends once, when all of it has been transferred or a part of it has failed. Short
// transfers, EINTR and EAGAIN are dealt with inside and never seen.
//
// Order: requests on the same bytes are not ordered against each other, and neither is a sync
// against later writes. Whoever needs an order waits for the completion.
//
// Threads: all members may be called from any thread, except that from a completion handler only
// try_submit, statistics and the plain getters may be. After set-up nothing allocates, but for the
// message of an exception.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "nvme/backend.h"
#include "nvme/statistics.h"

namespace strata::nvme {

/// Who is served first. A lower class is served only when no higher one waits: reads of a step can
/// hold up write-back for as long as they keep coming.
enum class Priority : uint8_t { kWeightRead, kStateRead, kWriteBack };
inline constexpr size_t kPriorities = 3;

/// How a request ended.
struct [[nodiscard]] Result {
  uint64_t tag = 0;
  int error = 0;          // an errno, or 0. ENODATA: the file ends before the request does
  size_t size_bytes = 0;  // all that was asked for; after an error what was transferred, which need
                          // not be its beginning
  [[nodiscard]] bool ok() const noexcept { return error == 0; }
};

/// Called once for each request, on the drive's thread, which does nothing else meanwhile: long
/// work belongs elsewhere. The request's buffer is the caller's again when it is called.
struct CompletionSink {
  void (*done)(void* context, const Result& result) noexcept = nullptr;
  void* context = nullptr;
};

/// Offset, size and address are multiples of Drive::alignment_bytes(). Size zero is allowed and
/// completes like any other.
///
/// A kSync waits for every write submitted before it, then makes all of them durable (fdatasync).
/// Its result says nothing of those writes: they report their own errors. After a sync that failed,
/// nothing is known of what had been written since the last that did not; repeating it would not
/// tell (the kernel forgets the error).
struct Request {
  Operation operation = Operation::kRead;
  int64_t offset_bytes = 0;
  std::byte* data = nullptr;  // for kWrite only read from; must live until the completion
  size_t size_bytes = 0;
  Priority priority = Priority::kStateRead;
  Traffic traffic = Traffic::kOther;
  uint64_t tag = 0;
  CompletionSink sink{};
};

struct DriveOptions {
  std::filesystem::path path{};  // an existing file, which is not made longer or shorter by opening
  bool read_only = false;
  DirectIo direct = DirectIo::kAuto;
  size_t block_size_bytes = kMiB;  // what one transfer carries at most; a multiple of the alignment
  unsigned depth = 32;             // transfers in flight at once
  size_t queue_capacity = 256;     // requests accepted and not yet ended; one more has to wait
  // Registered once; requests may use other memory too. Huge pages are worth having: a block of
  // scattered small ones has more segments than one command to the drive takes (reading 1 MiB
  // blocks: 1.15 GB/s with 4 KiB pages, 2.8 with 2 MiB).
  std::vector<BufferRegion> buffers{};
  BackendFactory backend = open_backend;
  // How long a block may make no progress at all (EAGAIN again and again) before that is its error.
  std::chrono::milliseconds patience{10000};
};

class Drive {
 public:
  /// Every drive asks for at least this alignment, so that what works on one works on all.
  static constexpr size_t kMinAlignmentBytes = 4096;

  /// Opens the file and starts the thread. Throws IoError.
  explicit Drive(DriveOptions options);
  /// Waits for all accepted requests and closes; what close() would have thrown is lost.
  ~Drive();
  Drive(const Drive&) = delete;
  Drive& operator=(const Drive&) = delete;

  /// Accepts a request; blocks while the queue is full. The order between the calls of one thread
  /// is the order of requests. Not from a completion handler (it would wait for itself).
  void submit(const Request& request);
  /// The same without blocking: false where the queue is full.
  [[nodiscard]] bool try_submit(const Request& request);

  /// Blocking forms of a request. Throw IoError with path, offset and size.
  void read(int64_t offset_bytes, std::span<std::byte> out,
            Priority priority = Priority::kStateRead, Traffic traffic = Traffic::kOther);
  void write(int64_t offset_bytes, std::span<const std::byte> data,
             Priority priority = Priority::kWriteBack, Traffic traffic = Traffic::kOther);
  void sync();

  /// Blocks until every request accepted before this call has ended and its handler has returned.
  void drain();

  /// Waits for all accepted requests, ends the thread and closes the file; throws IoError where
  /// close(2) fails. A second call does nothing; no request may follow.
  void close();

  [[nodiscard]] DriveStatistics statistics() const noexcept;

  [[nodiscard]] const std::filesystem::path& path() const noexcept;
  /// Of offsets, sizes and addresses of requests: a power of two, at least kMinAlignmentBytes.
  [[nodiscard]] size_t alignment_bytes() const noexcept;
  /// Of the file when it was opened.
  [[nodiscard]] int64_t size_bytes() const noexcept;
  [[nodiscard]] bool is_direct() const noexcept;
  /// "io_uring" or "threads".
  [[nodiscard]] const std::string& backend_name() const noexcept;
  /// One line for each thing that is not as good as it could be: no direct I/O, no io_uring,
  /// buffers that could not be registered. For the app to print.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;

 private:
  class Engine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace strata::nvme
