// A disk in memory that misbehaves as told: the replaceable seam under a Drive.
//
//   FaultDisk disk(16 * kMiB);
//   disk.fail(Operation::kWrite, 3, 1, EIO);
//   Drive drive({.path = "disk 0", .backend = disk.factory()});
//
// It keeps what reads see apart from what is on the medium: a write reaches the former when it
// completes, the latter when a sync submitted after that completes. A power cut leaves, of every
// sector, what was on the medium or any one of the writes that came since, whether acknowledged or
// still in flight.
//
// Transfers must be aligned to sectors, as for direct I/O.
//
// Threads: everything may be called while a drive runs. A disk outlives the drives on it and serves
// one at a time.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <vector>

#include "nvme/backend.h"

namespace strata::nvme {

/// What disks hang on that lose power at the same moment.
class PowerSupply {
 public:
  /// Power fails when this many more transfers, of all its disks together, have ended.
  void cut_after(uint64_t transfers) noexcept { left_ = transfers; }
  void cut() noexcept { left_ = 0; }
  [[nodiscard]] bool is_cut() const noexcept { return left_ == 0; }
  /// Transfers that have ended since creation.
  [[nodiscard]] uint64_t transfers() const noexcept { return transfers_; }

 private:
  friend class FaultDisk;
  [[nodiscard]] bool draw() noexcept;

  std::atomic<uint64_t> left_ = std::numeric_limits<uint64_t>::max();
  std::atomic<uint64_t> transfers_ = 0;
};

/// Chances, for each transfer, of what a kernel may do at any time.
struct Noise {
  uint64_t seed = 0;
  double interrupted = 0;  // EINTR
  double again = 0;        // EAGAIN
  double shortened = 0;    // transfers a part, in whole sectors, perhaps none
  double refused = 0;      // not taken: the queue is said to be full
};

class FaultDisk {
 public:
  static constexpr size_t kSectorBytes = 512;

  explicit FaultDisk(size_t size_bytes) : FaultDisk(std::vector<std::byte>(size_bytes)) {}
  explicit FaultDisk(std::vector<std::byte> image,
                     std::shared_ptr<PowerSupply> power = std::make_shared<PowerSupply>());
  FaultDisk(const FaultDisk&) = delete;
  FaultDisk& operator=(const FaultDisk&) = delete;

  /// For DriveOptions::backend. The path is not looked at.
  [[nodiscard]] BackendFactory factory();

  /// The `count` transfers of this operation from the `first` on (from 0, counted since creation in
  /// the order in which they end) fail and transfer nothing.
  void fail(Operation operation, uint64_t first, uint64_t count, int errno_code);
  /// The n-th transfer of this operation moves at most this many bytes.
  void shorten(Operation operation, uint64_t n, size_t bytes);
  void set_noise(const Noise& noise);
  /// Transfers end in random order, each after a random number of others (at most `window`).
  void reorder(uint64_t seed, size_t window);
  /// Transfers beyond this many are refused with EBUSY.
  void set_queue_depth(size_t depth);
  /// While held, nothing ends.
  void hold();
  void release();

  /// Turns over one bit, in what reads see and on the medium.
  void flip_bit(int64_t bit);
  /// What reads see.
  [[nodiscard]] std::vector<std::byte> image() const;

  [[nodiscard]] PowerSupply& power() noexcept { return *power_; }
  /// Cuts the power, unless it is cut already, and returns what is left on the medium: the same for
  /// the same seed. All transfers that had not ended fail with EIO. A sector is torn nowhere.
  [[nodiscard]] std::vector<std::byte> power_cut(uint64_t seed, size_t sector_bytes = kSectorBytes);

  /// All transfers taken so far, in the order in which they were submitted.
  [[nodiscard]] std::vector<Transfer> history() const;
  [[nodiscard]] uint64_t count(Operation operation) const;

 private:
  friend class FaultBackend;

  struct Pending {
    Transfer transfer;
    uint64_t completed_writes;  // when it was submitted: what a sync covers
    uint64_t due;               // `ended_` must have come this far
  };
  struct Write {
    int64_t offset_bytes;
    std::vector<std::byte> data;
  };
  struct Fault {
    Operation operation;
    uint64_t first;
    uint64_t count;
    int errno_code;      // 0: shortened instead
    size_t limit_bytes;  // of a shortened one
  };

  [[nodiscard]] int submit(const Transfer& transfer);
  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait);
  void wake();

  // All below with mutex_ held.
  [[nodiscard]] int64_t end(const Pending& pending);
  [[nodiscard]] int64_t apply(const Pending& pending, size_t size_bytes);
  [[nodiscard]] bool chance(double probability);
  [[nodiscard]] size_t next_pending();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<PowerSupply> power_;
  std::vector<std::byte> visible_;
  std::vector<std::byte> medium_;
  std::vector<Write> unsynced_;    // in the order of their completion
  std::vector<Write> unanswered_;  // in flight when the power was cut
  uint64_t completed_writes_ = 0;  // since creation
  uint64_t durable_writes_ = 0;    // of these: those no longer in unsynced_
  std::vector<Pending> pending_;
  std::vector<Fault> faults_;
  Noise noise_;
  std::mt19937_64 noise_random_;
  std::mt19937_64 order_random_;
  size_t window_ = 0;
  uint64_t ended_ = 0;
  size_t depth_ = std::numeric_limits<size_t>::max();
  bool held_ = false;
  bool woken_ = false;
  std::array<uint64_t, 3> counts_{};  // by operation
  std::vector<Transfer> history_;
};

}  // namespace strata::nvme
