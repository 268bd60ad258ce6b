#include "comm/thread_rendezvous.h"

#include <fmt/format.h>

#include <array>
#include <string_view>

#include "base/error.h"

namespace strata::comm {
namespace {

std::string words_of(const GroupCall& call) {
  constexpr std::array<std::string_view, 5> names{"all-gather", "reduce-scatter", "all-reduce",
                                                  "broadcast", "barrier"};
  const std::string_view name = names[static_cast<size_t>(call.kind)];
  switch (call.kind) {
    case GroupCall::Kind::kAllGather:
      return fmt::format("{} of {} bytes a rank", name, call.count);
    case GroupCall::Kind::kReduceScatter:
    case GroupCall::Kind::kAllReduce:
      return fmt::format("{} of {} {} elements", name, call.count, name_of(call.dtype));
    case GroupCall::Kind::kBroadcast:
      return fmt::format("{} of {} bytes from rank {}", name, call.count, call.root);
    case GroupCall::Kind::kBarrier:
      break;
  }
  return std::string(name);
}

}  // namespace

ThreadRendezvous::ThreadRendezvous(int ranks) {
  STRATA_CHECK(ranks > 0, "a group has at least one rank");
  calls_.resize(static_cast<size_t>(ranks));
}

bool ThreadRendezvous::arrive() {
  if (++arrived_ < ranks()) return false;
  arrived_ = 0;
  ++round_;
  return true;
}

void ThreadRendezvous::open(int rank, const GroupCall& call) {
  std::unique_lock lock(mutex_);
  calls_[static_cast<size_t>(rank)] = call;
  const uint64_t round = round_;
  if (aborted_by_ < 0) {
    if (arrive()) {
      difference_ = difference();
      all_arrived_.notify_all();
    } else {
      all_arrived_.wait(lock, [&] { return round_ != round || aborted_by_ >= 0; });
    }
  }
  // All that were there go on together, whatever has happened since.
  if (round_ == round) {
    throw failure(fmt::format("rank {} of {} cannot do its {}: rank {} has given up the group",
                              rank, ranks(), words_of(call), aborted_by_));
  }
  if (!difference_.empty()) throw failure(difference_);
}

void ThreadRendezvous::meet() {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  if (arrive()) {
    all_arrived_.notify_all();
  } else {
    all_arrived_.wait(lock, [&] { return round_ != round; });
  }
}

void ThreadRendezvous::abort(int rank) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (aborted_by_ < 0) aborted_by_ = rank;
  }
  all_arrived_.notify_all();
}

std::string ThreadRendezvous::difference() const {
  const GroupCall& first = calls_.front();
  for (int rank = 1; rank < ranks(); ++rank) {
    const GroupCall& other = call(rank);
    if (other.kind == first.kind && other.dtype == first.dtype && other.root == first.root &&
        other.count == first.count) {
      continue;
    }
    return fmt::format("the ranks of a group call different collectives: rank 0 {}, rank {} {}",
                       words_of(first), rank, words_of(other));
  }
  return {};
}

}  // namespace strata::comm
