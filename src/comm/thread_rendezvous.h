// Where the ranks of a group meet that are threads of one process: what each brings, and until
// when the others may look at it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace strata::comm {

/// What a rank calls, with which memory.
struct GroupCall {
  enum class Kind : uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kBarrier };
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kF32;  // of sums
  int root = 0;
  int64_t count = 0;  // bytes of a gather (of one rank) and of a broadcast, elements of a sum
  const void* in = nullptr;
  void* out = nullptr;
};

/// Thread-safe. Allocates nothing after construction but words for errors.
class ThreadRendezvous {
 public:
  explicit ThreadRendezvous(int ranks);

  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(calls_.size()); }

  /// Blocks until every rank has come with its call. Throws a failure, on all ranks, where the
  /// calls differ or the group is aborted before all are there. After it each rank must come to
  /// meet() as often as the others, and soon: abort() ends no meet(), since others may still read
  /// this rank's memory.
  void open(int rank, const GroupCall& call);
  /// Blocks until every rank has come here.
  void meet();
  /// After open() and until the rank's last meet().
  [[nodiscard]] const GroupCall& call(int rank) const noexcept {
    return calls_[static_cast<size_t>(rank)];
  }

  /// What waits in open() and what comes there later throws, on every rank.
  void abort(int rank) noexcept;

 private:
  /// Counts this rank; whether it is the last, which has let the others go.
  bool arrive();
  /// What differs among the calls, in words; empty where nothing does.
  [[nodiscard]] std::string difference() const;

  std::vector<GroupCall> calls_;  // written in open() by their ranks, under the lock
  std::mutex mutex_;              // guards what follows
  std::condition_variable all_arrived_;
  int arrived_ = 0;
  uint64_t round_ = 0;
  int aborted_by_ = -1;
  std::string difference_;
};

}  // namespace strata::comm
