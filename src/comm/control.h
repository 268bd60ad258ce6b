// The control plane of a run with several ranks: small collectives on the host, and the watch over
// all ranks that ends the run with one message where one of them dies, hangs or gives up. It is a
// star of TCP connections with rank 0 in the middle, apart from MPI and NCCL, so that it still
// works where those hang.
//
// Threads: collectives and close() from one thread at a time, in the same order on all ranks;
// set_task, set_phase and fail from any thread. A thread of its own sends beats (250 ms apart,
// or heartbeat_timeout / 8 where that is less) and calls the failure handler.
//
// The handler is called once, on every rank whose thread still runs, except where fail() is under
// way; that returns the verdict instead. It is there to print, where it is asked to, and to end the
// process with _Exit, for the other threads may hang. If it returns, this rank's collectives throw
// RankFailure, now and from then on. It must not destroy the Control.
//
// A process that is stopped can do nothing; the others end without it, and launchers kill what is
// left (it takes SIGKILL). Where none does, it ends as soon as it goes on.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "comm/launch.h"
#include "comm/rendezvous.h"
#include "comm/watcher.h"

namespace strata::comm {

class Control {
 public:
  /// Rank 0. Blocks until all ranks have come; throws RankFailure, see gather_ranks.
  Control(ControlListener listener, const ControlOptions& options);
  /// The only rank of its run.
  explicit Control(const ControlOptions& options);
  /// Any other rank. Throws RankFailure, see join_ranks.
  Control(const std::string& address, int port, const ControlOptions& options);
  /// By what the launcher told, which must include the address where there are several ranks; rank,
  /// ranks, local_rank and host of the options are set from it. Rank 0's listening may throw a
  /// failure: the port is taken.
  [[nodiscard]] static std::unique_ptr<Control> start(const RankInfo& info, ControlOptions options);

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int ranks() const noexcept { return static_cast<int>(watcher_.members().size()); }
  /// Host and process of each rank.
  [[nodiscard]] const std::vector<Member>& members() const noexcept { return watcher_.members(); }

  /// What each rank gave, by rank; sizes may differ. The sum of them is limited to 1 GiB. These and
  /// the following block until all ranks have called, however long that takes, and throw
  /// RankFailure where the run ends meanwhile.
  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> data);
  [[nodiscard]] std::vector<int64_t> all_gather(int64_t value);
  /// What `root` gave; data of other ranks is not looked at.
  [[nodiscard]] std::vector<std::byte> broadcast(std::span<const std::byte> data, int root = 0);
  void barrier();

  /// What this rank does now, for messages; counts as progress. A copy under an uncontended mutex,
  /// no allocation. Cut after 160 bytes.
  void set_task(std::string_view task) noexcept { watcher_.set_task(task); }
  /// In this phase a rank that makes no progress for longer than `limit` is held for stuck, be it
  /// alive or not; 0: it may take as long as it likes. Waiting in a collective of this class is not
  /// counted. Forgets the task. The name is cut after 64 bytes.
  void set_phase(std::string_view phase, std::chrono::milliseconds limit) noexcept {
    watcher_.set_phase(phase, limit);
  }

  /// This rank has to give up: `cause` is its error, one sentence without an end. Blocks until the
  /// others know (seconds at most, unless the handler is running: then until it returns), and
  /// returns the message of the whole run and whether this rank has to print it. The caller ends
  /// the process.
  [[nodiscard]] Verdict fail(std::string_view cause) { return watcher_.fail(cause); }

  /// The orderly end: waits for all ranks to come here, after which none is watched. Throws
  /// RankFailure as collectives do. Without it the others hold this rank for dead.
  void close();

 private:
  enum class Kind : int64_t { kAllGather, kBroadcast, kBarrier };
  std::vector<std::vector<std::byte>> gather(std::span<const std::byte> data, Kind kind, int root);
  std::vector<std::vector<std::byte>> gather_as_zero(std::span<const std::byte> data, Kind kind,
                                                     int root);
  [[noreturn]] void end_at_odds(size_t peer);

  int rank_;
  Watcher watcher_;
};

}  // namespace strata::comm
