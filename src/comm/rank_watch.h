// What is known of a watched rank, when it counts as lost, and the sentence that says so. Knows no
// sockets and no clock of its own. Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "comm/message.h"

namespace strata::comm {

/// Whose process a rank is.
struct Member {
  std::string host;
  int64_t pid = 0;
};

/// What a rank tells of itself with each beat.
struct RankStatus {
  std::string phase;
  std::string task;
  std::chrono::milliseconds stalled{0};  // since its last progress
  std::chrono::milliseconds limit{0};    // how long that may be; 0: as long as it likes
  bool is_waiting = false;               // for other ranks, so that it is not to blame

  [[nodiscard]] SharedBody pack() const;
  [[nodiscard]] static RankStatus unpack(const Message& message);
};

class RankWatch {
 public:
  using Clock = std::chrono::steady_clock;

  RankWatch(int rank, Member member, Clock::time_point now)
      : rank_(rank), member_(std::move(member)), heard_(now) {}

  void heard(Clock::time_point now) noexcept { heard_ = now; }
  void told(RankStatus status, Clock::time_point now);
  /// The watcher itself was not running until now; what it missed counts against nobody.
  void forgive(Clock::time_point now) noexcept;

  [[nodiscard]] std::chrono::milliseconds silent(Clock::time_point now) const noexcept;
  /// How long it had made no progress at its last beat, where its phase allows less; else 0.
  [[nodiscard]] std::chrono::milliseconds overdue() const noexcept;

  /// `rank 2 (host b, pid 4711)`
  [[nodiscard]] std::string name() const;
  /// ` during 'step 12: backward of layers.3'`, as of its last beat.
  [[nodiscard]] std::string place() const;

  [[nodiscard]] std::string died() const;
  [[nodiscard]] std::string lost(const std::string& error) const;
  [[nodiscard]] std::string is_silent(std::chrono::milliseconds for_ms) const;
  [[nodiscard]] std::string is_overdue(std::chrono::milliseconds for_ms) const;
  [[nodiscard]] std::string failed(const std::string& cause) const;
  [[nodiscard]] std::string was_stopped(std::chrono::milliseconds for_ms) const;

 private:
  int rank_;
  Member member_;
  RankStatus status_;
  Clock::time_point heard_;
};

/// `30 s`, or `0.5 s` where it is short.
[[nodiscard]] std::string seconds_text(std::chrono::milliseconds duration);

}  // namespace strata::comm
