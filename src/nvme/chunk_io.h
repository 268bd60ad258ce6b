// Between the store and its drives: a request is some chunks, each one transfer on one drive, each
// with a checksum. Reads are verified and writes are summed up on one thread for each drive, so
// that the drive's own has nothing to do but keep the drive busy (XXH3 takes 19 GB/s of one core:
// on the drive's thread that would be a third of its time with a drive of 6 GB/s).
//
// Threads: everything but the constructor and the destructor may be called from any thread that is
// not one of its own or of a drive. After set-up nothing allocates but messages of errors.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nvme/drive.h"
#include "nvme/store.h"

namespace strata::nvme {

/// One chunk to be transferred.
struct ChunkTransfer {
  int record = 0;
  int64_t chunk = 0;
  int64_t offset_bytes = 0;  // on the drive
  std::byte* data = nullptr;
  size_t stored_bytes = 0;       // transferred
  size_t content_bytes = 0;      // of these: covered by the checksum
  uint64_t* checksum = nullptr;  // read: to be compared with; write: set when the chunk is written
  uint8_t* written = nullptr;    // write: likewise set to 1
  bool may_be_lost = false;      // read: a wrong checksum is the request's error and no other's
};

class ChunkIo {
 public:
  /// Makes " (chunk 3 of the moment1 of unit 2)" for messages.
  using Describe = std::string (*)(const void* context, int record, int64_t chunk);

  struct Limits {
    size_t chunks = 0;  // for each drive
    size_t requests = 0;
  };

  /// The drives outlive this, and are idle when it is destroyed.
  ChunkIo(std::vector<std::unique_ptr<Drive>>& drives, Limits limits, Describe describe,
          const void* context);
  /// Waits for everything accepted.
  ~ChunkIo();
  ChunkIo(const ChunkIo&) = delete;
  ChunkIo& operator=(const ChunkIo&) = delete;

  struct RequestSpec {
    Operation operation = Operation::kRead;
    Priority priority = Priority::kStateRead;
    Traffic traffic = Traffic::kOther;
    uint64_t tag = 0;
    StoreSink sink;
    size_t chunks = 0;                                // exactly so many add() follow; at least one
    std::optional<size_t> read_group = std::nullopt;  // from enter_read
  };
  /// Blocks while too many requests are under way.
  [[nodiscard]] uint32_t begin(const RequestSpec& spec);
  /// Blocks while too many chunks are under way on the drive. The sink is called after the last.
  void add(uint32_t request, int drive, const ChunkTransfer& transfer);

  /// Counts a read that is about to begin, in the present group of reads.
  [[nodiscard]] size_t enter_read();
  /// From now on reads are counted in the other group, which is empty; returns the one before.
  [[nodiscard]] size_t change_read_group();
  /// Blocks until every read of the group has ended and its sink has returned.
  void wait_for_reads(size_t read_group);

  /// Blocks until every write that began has ended and its sink has returned.
  void wait_for_writes();
  void wait_for_all();

  /// Keeps the first of all errors.
  void keep_error(const std::string& message);
  [[nodiscard]] bool has_failed() const noexcept {
    return has_failed_.load(std::memory_order_acquire);
  }
  [[nodiscard]] std::optional<std::string> first_error() const;

 private:
  struct ActiveRequest {
    RequestSpec spec;
    size_t chunks_left = 0;
    std::string error;
  };
  struct ActiveChunk {
    ChunkTransfer transfer;
    uint32_t request = 0;
    Operation operation = Operation::kRead;
    Result result;
  };
  /// What there is for each drive.
  struct Lane {
    ChunkIo* owner = nullptr;
    Drive* drive = nullptr;
    std::mutex mutex;
    std::condition_variable room;   // a chunk has become free
    std::condition_variable ended;  // a transfer has ended, or the thread is to end
    std::vector<ActiveChunk> chunks;
    std::vector<uint32_t> free;
    std::vector<uint32_t> queue;  // ring of chunks whose transfer has ended
    size_t first = 0, count = 0;
    bool stop = false;
    std::thread thread;
  };

  static void transfer_ended(void* context, const Result& result) noexcept;
  void run(Lane& lane) noexcept;
  /// The error, or an empty string.
  [[nodiscard]] std::string settle(const Lane& lane, const ActiveChunk& chunk) const;
  void end_chunk(uint32_t request, const std::string& error) noexcept;
  void stop_lanes() noexcept;

  Describe describe_;
  const void* describe_context_;
  std::vector<std::unique_ptr<Lane>> lanes_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a request has ended
  std::vector<ActiveRequest> requests_;
  std::vector<uint32_t> free_requests_;
  size_t writes_ = 0;              // under way
  std::array<size_t, 2> reads_{};  // likewise, by group; those that enter_read counted
  size_t read_group_ = 0;
  std::string first_error_;
  std::atomic<bool> has_failed_ = false;
};

}  // namespace strata::nvme
