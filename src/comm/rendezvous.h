// How the ranks of a run find each other: rank 0 listens, all others connect to it, and when all
// have come each one knows every rank's host and process.
//
// There is no authentication: whoever reaches the port can speak. Use it within a network whose
// machines trust each other, as for MPI and NCCL.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "comm/message.h"
#include "comm/rank_watch.h"

namespace strata::comm {

/// Called when the run is over because a rank was lost or gave up. `should_print` is true on the
/// one rank that has to tell the user; where rank 0 is lost, on one rank of each host.
using FailureHandler = std::function<void(const std::string& message, bool should_print)>;

struct ControlOptions {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;  // which of a host's ranks tells that rank 0 is out of reach: 0
  std::string host;    // this machine's name in messages; empty: the system's
  std::chrono::milliseconds connect_timeout{std::chrono::seconds(300)};
  /// How long a rank may be silent; rank 0's holds for all. At least 100 ms.
  std::chrono::milliseconds heartbeat_timeout{std::chrono::seconds(30)};
  /// What to do, at the end of each message.
  std::string advice = "start again with --resume auto to go on from the last commit or checkpoint";
  FailureHandler on_failure;
};

/// An error that all ranks get, each with the same message or one about its own view of it.
class RankFailure : public Error {
 public:
  RankFailure(const std::string& message, bool should_print)
      : Error(ErrorKind::kFailed, message), should_print_(should_print) {}
  /// Whether this is the rank that has to tell the user.
  [[nodiscard]] bool should_print() const noexcept { return should_print_; }

 private:
  bool should_print_;
};

/// Where rank 0 waits for the others. It may exist long before they are waited for.
class ControlListener {
 public:
  /// Listens at every address of this machine, or at the loopback alone where `address` is
  /// localhost, 127.0.0.1 or ::1. Port 0: the system chooses one. A taken port throws a failure.
  ControlListener(const std::string& address, int port);
  [[nodiscard]] int port() const noexcept { return port_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  UniqueFd fd_;
  int port_;
};

/// What a rendezvous leaves.
struct Star {
  std::vector<Connection> connections;  // of rank 0: to rank i + 1; of any other: to rank 0
  std::vector<Member> members;          // [rank]
  std::chrono::milliseconds heartbeat_timeout{0};
};

/// A run of one rank.
[[nodiscard]] Star alone(const ControlOptions& options);

/// Rank 0's side. Blocks until all have come. Throws RankFailure, and tells it to those that have
/// come, where ranks are missing after connect_timeout, where two claim the same place, or where
/// one comes from a run of another number of ranks or another version. What is no rank at all is
/// turned away, and mentioned only where a rank is missing.
[[nodiscard]] Star gather_ranks(const ControlListener& listener, const ControlOptions& options);

/// The others' side. Tries until connect_timeout is over, then throws RankFailure; also where rank
/// 0 refuses.
[[nodiscard]] Star join_ranks(const std::string& address, int port, const ControlOptions& options);

/// Messages larger than this are refused.
inline constexpr size_t kMostMessageBytes = size_t{1} << 30;

}  // namespace strata::comm
