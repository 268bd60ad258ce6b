// The thread that owns a rank's connections after the rendezvous: it carries messages, sends beats,
// watches, and ends the run where a rank is lost. Control is what others use.
//
// Rank 0 watches all and decides; the others watch rank 0. A rank is lost when its connection ends
// without a goodbye, when nothing has come from it for heartbeat_timeout, or when it has made no
// progress for longer than its phase allows. Rank 0 then sends the verdict to all and gives them a
// moment to hear it, and its handler is called first, so that it has printed before a launcher sees
// another rank end. A rank that was itself stopped (SIGSTOP, a suspended machine) holds nobody
// guilty for that time; where the others have ended meanwhile it ends as soon as it runs again.
//
// Threads: all functions may be called from any thread; get() from one at a time.
#pragma once

#include <poll.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/rendezvous.h"

namespace strata::comm {

/// How a run ended that could not go on.
struct Verdict {
  std::string message;
  bool should_print = false;  // this rank has to tell the user, and nobody has yet
};

class Watcher {
 public:
  using Clock = std::chrono::steady_clock;

  Watcher(Star star, const ControlOptions& options);
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;
  /// Without close() the other ranks hold this one for dead.
  ~Watcher();

  [[nodiscard]] const std::vector<Member>& members() const noexcept { return members_; }

  /// peer: its place in Star::connections.
  void send(size_t peer, MessageType type, SharedBody body);
  /// The next kCollect, kResult or kGoodbye of a peer. Blocks; throws RankFailure where the run
  /// ends before it comes, after the handler has returned.
  [[nodiscard]] Message get(size_t peer);

  void set_task(std::string_view task) noexcept;
  void set_phase(std::string_view phase, std::chrono::milliseconds limit) noexcept;
  void set_waiting(bool is_waiting) noexcept;

  /// See Control::fail.
  [[nodiscard]] Verdict fail(std::string_view cause);
  /// After goodbyes: ends the thread and the connections, with all that was sent.
  void close();

 private:
  struct Peer {
    Peer(Connection with, RankWatch watched) : connection(std::move(with)), watch(watched) {}
    Connection connection;
    RankWatch watch;
    std::deque<Message> inbox;
    bool is_open = true;
    bool said_goodbye = false;
  };
  struct Report {
    std::string cause;
    const RankWatch* watch = nullptr;
    Clock::time_point at;
  };
  template <size_t kBytes>
  class Text {
   public:
    void set(std::string_view text) noexcept;
    [[nodiscard]] std::string get() const { return {bytes_.data(), size_}; }

   private:
    std::array<char, kBytes> bytes_{};
    size_t size_ = 0;
  };
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] bool is_zero() const noexcept { return rank_ == 0; }
  void wake() noexcept;
  [[nodiscard]] RankStatus status(Clock::time_point now);

  // The thread's; called with mutex_ held.
  void run() noexcept;
  void watch(Lock& lock);
  void turn(Lock& lock, Clock::time_point until);
  void notice_pause(Clock::time_point now, Clock::time_point awaited);
  void hear(Peer& peer, Message message, Clock::time_point now);
  void note_end(Peer& peer, Clock::time_point now);
  void beat(Clock::time_point now);
  void judge(Clock::time_point now);
  void decide(const std::string& what, const Peer* unanswering = nullptr);
  void spread(Lock& lock);
  void tell(Lock& lock);
  void drain(Lock& lock, std::chrono::milliseconds at_most, const Peer* except);

  const int rank_;
  const std::string advice_;
  const FailureHandler on_failure_;
  const std::vector<Member> members_;
  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds beat_interval_;

  std::mutex status_mutex_;
  Text<160> task_;
  Text<64> phase_;
  std::chrono::milliseconds limit_{0};
  bool is_waiting_ = false;
  Clock::time_point progress_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  RankWatch own_;
  std::optional<Report> report_;  // of a rank that gave up; rank 0 only
  std::optional<Verdict> verdict_;
  const Peer* unanswering_ = nullptr;
  bool is_from_zero_ = false;  // the verdict is rank 0's
  bool is_failing_ = false;    // fail() waits for the verdict
  bool was_told_ = false;      // the handler was
  bool is_closing_ = false;
  bool is_stopping_ = false;
  bool has_ended_ = false;

  // The thread's own.
  std::vector<pollfd> polled_;
  std::vector<Message> messages_;
  Clock::time_point awake_;
  Clock::time_point next_beat_;
  Clock::time_point overdue_since_;  // some rank has been, by its own beats
  Clock::time_point pause_end_;
  std::chrono::milliseconds pause_{0};

  UniqueFd wake_;
  std::thread thread_;
};

}  // namespace strata::comm
