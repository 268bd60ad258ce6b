// The bounded table of requests under a Drive: who is next, and what has ended. Plain bookkeeping;
// the owner locks. Nothing allocates after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nvme/drive.h"

namespace strata::nvme {

/// A part of a request that is one transfer.
struct Block {
  uint32_t slot = 0;  // of its request
  Transfer transfer;
};

/// What is owed to a request's owner.
struct Ended {
  CompletionSink sink;
  Result result;
};

class RequestQueue {
 public:
  RequestQueue(size_t capacity, size_t block_size_bytes);

  [[nodiscard]] bool is_full() const noexcept { return free_ == kNone; }
  [[nodiscard]] bool is_empty() const noexcept { return size_ == 0; }
  /// The number of the next request; they count from 0.
  [[nodiscard]] uint64_t next_number() const noexcept { return next_number_; }
  /// Whether a request with a number below this one has not ended.
  [[nodiscard]] bool has_older_than(uint64_t number) const noexcept;

  /// Not while full.
  void accept(const Request& request) noexcept;
  /// The next block to start, by priority. False where nothing can be started now.
  [[nodiscard]] bool next_block(Block& block) noexcept;
  /// A block has ended. The first error of a request keeps its other blocks from being started.
  void end_block(const Block& block, int error, size_t transferred_bytes) noexcept;
  /// Takes out a request that has ended; false where there is none.
  [[nodiscard]] bool take_ended(Ended& ended) noexcept;

  [[nodiscard]] const Request& request(uint32_t slot) const noexcept {
    return slots_[slot].request;
  }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Slot {
    Request request;
    uint64_t number = 0;
    size_t started_bytes = 0;
    size_t transferred_bytes = 0;
    uint64_t awaited_writes = 0;  // of a sync: those before it that have not ended
    uint32_t blocks = 0;          // started and not ended
    uint32_t next = kNone;        // in the one list that it is in
    int error = 0;
    bool is_used = false;
    bool is_waiting = false;  // in a list of those that have blocks to start
  };
  struct List {
    uint32_t first = kNone;
    uint32_t last = kNone;
  };

  void append(List& list, uint32_t slot) noexcept;
  void remove_first(List& list) noexcept;
  void start(Slot& slot, uint32_t index, size_t size_bytes, Block& block) noexcept;
  void end_if_done(uint32_t index) noexcept;

  std::vector<Slot> slots_;
  const size_t block_size_bytes_;
  size_t size_ = 0;
  uint64_t next_number_ = 0;
  uint64_t unended_writes_ = 0;
  uint32_t free_ = kNone;  // linked by `next`
  List waiting_[kPriorities];
  List syncs_;
  List ended_;
};

}  // namespace strata::nvme
