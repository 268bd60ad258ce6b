#include "comm/watcher.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "comm/socket.h"

namespace strata::comm {
namespace {

using std::chrono::milliseconds;

// A rank may give up because another has died, and say so before that death is seen.
constexpr milliseconds kGrace{200};
// How long rank 0 waits for the others to have heard its verdict, and these for rank 0's end.
constexpr milliseconds kHearing{1000};
constexpr milliseconds kPrinting{2000};
// The task that a message names may be as old as this.
constexpr milliseconds kLongestBeat{250};

}  // namespace

template <size_t kBytes>
void Watcher::Text<kBytes>::set(std::string_view text) noexcept {
  size_ = std::min(text.size(), kBytes);
  // Not in the middle of a character.
  if (size_ < text.size()) {
    while (size_ > 0 && (static_cast<unsigned char>(text[size_]) & 0xc0) == 0x80) --size_;
  }
  std::memcpy(bytes_.data(), text.data(), size_);
}

Watcher::Watcher(Star star, const ControlOptions& options)
    : rank_(options.rank),
      advice_(options.advice),
      on_failure_(options.on_failure),
      members_(std::move(star.members)),
      timeout_(star.heartbeat_timeout),
      beat_interval_(std::clamp(timeout_ / 8, milliseconds(1), kLongestBeat)),
      progress_(Clock::now()),
      own_(rank_, members_[static_cast<size_t>(rank_)], progress_),
      wake_(UniqueFd::adopt(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  if (!wake_) throw failure("no file descriptor is left; raise the limit with ulimit -n");
  for (size_t i = 0; i < star.connections.size(); ++i) {
    const int rank = is_zero() ? static_cast<int>(i) + 1 : 0;
    peers_.emplace_back(std::move(star.connections[i]),
                        RankWatch(rank, members_[static_cast<size_t>(rank)], progress_));
  }
  awake_ = next_beat_ = progress_;
  // Signals are for the threads of the application.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Watcher::~Watcher() {
  {
    const Lock lock(mutex_);
    is_stopping_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void Watcher::wake() noexcept {
  const uint64_t one = 1;
  static_cast<void>(!::write(wake_.get(), &one, sizeof one));
}

void Watcher::send(size_t peer, MessageType type, SharedBody body) {
  {
    const Lock lock(mutex_);
    peers_[peer].connection.send(type, std::move(body));
  }
  wake();
}

Message Watcher::get(size_t peer) {
  Lock lock(mutex_);
  std::deque<Message>& inbox = peers_[peer].inbox;
  changed_.wait(lock, [&] { return has_ended_ || !inbox.empty(); });
  if (has_ended_) {
    if (!verdict_) throw failure("a rank talks to the others after it has said goodbye");
    throw RankFailure(verdict_->message, verdict_->should_print && !was_told_);
  }
  Message message = std::move(inbox.front());
  inbox.pop_front();
  return message;
}

void Watcher::set_task(std::string_view task) noexcept {
  const auto now = Clock::now();
  const std::lock_guard lock(status_mutex_);
  task_.set(task);
  progress_ = now;
}

void Watcher::set_phase(std::string_view phase, milliseconds limit) noexcept {
  const auto now = Clock::now();
  const std::lock_guard lock(status_mutex_);
  phase_.set(phase);
  task_.set("");
  limit_ = limit;
  progress_ = now;
}

void Watcher::set_waiting(bool is_waiting) noexcept {
  const auto now = Clock::now();
  const std::lock_guard lock(status_mutex_);
  is_waiting_ = is_waiting;
  progress_ = now;
}

RankStatus Watcher::status(Clock::time_point now) {
  const std::lock_guard lock(status_mutex_);
  const auto since = std::max(progress_, pause_end_);
  return {
      .phase = phase_.get(),
      .task = task_.get(),
      .stalled = std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(now - since)),
      .limit = limit_,
      .is_waiting = is_waiting_};
}

Verdict Watcher::fail(std::string_view cause) {
  Lock lock(mutex_);
  if (has_ended_ && !verdict_) return {std::string(cause), true};
  is_failing_ = true;
  if (is_zero()) {
    if (!report_) report_ = Report{std::string(cause), &own_, Clock::now()};
  } else {
    peers_[0].connection.send(MessageType::kFail, Packer().text(cause).take());
  }
  wake();
  changed_.wait(lock, [&] { return has_ended_; });
  if (!verdict_) return {std::string(cause), true};  // it was closing
  return {verdict_->message, verdict_->should_print && !was_told_};
}

void Watcher::close() {
  {
    const Lock lock(mutex_);
    is_closing_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void Watcher::run() noexcept {
  Lock lock(mutex_);
  try {
    watch(lock);
    if (!verdict_ && is_closing_) {
      if (!is_zero()) peers_[0].connection.finish_sending();
      drain(lock, kHearing, nullptr);
    }
    if (verdict_) spread(lock);
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) lock.lock();
    if (!verdict_) verdict_ = Verdict{own_.failed(error.what()), true};
  }
  if (verdict_) tell(lock);
  for (Peer& peer : peers_) peer.connection.close();
  has_ended_ = true;
  changed_.notify_all();
}

void Watcher::watch(Lock& lock) {
  while (!is_stopping_ && !is_closing_ && !verdict_) {
    auto until = next_beat_;
    if (report_) until = std::min(until, report_->at + kGrace);
    turn(lock, until);
    const auto now = Clock::now();
    if (now >= next_beat_) {
      beat(now);
      next_beat_ = now + beat_interval_;
    }
    judge(now);
  }
}

/// Moves what there is to move, waiting until then at most for something to come.
void Watcher::turn(Lock& lock, Clock::time_point until) {
  polled_.assign(1, {.fd = wake_.get(), .events = POLLIN, .revents = 0});
  for (Peer& peer : peers_) {
    if (!peer.is_open) continue;
    peer.connection.flush();
    const int events = POLLIN | (peer.connection.has_unsent() ? POLLOUT : 0);
    polled_.push_back(
        {.fd = peer.connection.fd(), .events = static_cast<short>(events), .revents = 0});
  }
  lock.unlock();
  const int ready = ::poll(polled_.data(), polled_.size(), poll_ms(Clock::now(), until));
  const int error = errno;
  lock.lock();
  if (ready < 0 && error != EINTR) {
    throw failure(fmt::format("cannot watch the other ranks: {}", std::strerror(error)));
  }
  uint64_t ignored = 0;
  static_cast<void>(!::read(wake_.get(), &ignored, sizeof ignored));
  const auto now = Clock::now();
  notice_pause(now, until);
  for (Peer& peer : peers_) {
    if (!peer.is_open) continue;
    messages_.clear();
    if (peer.connection.receive(messages_)) peer.watch.heard(now);
    for (Message& message : messages_) hear(peer, std::move(message), now);
    if (!peer.connection.is_open()) {
      peer.is_open = false;
      note_end(peer, now);
    }
  }
}

void Watcher::notice_pause(Clock::time_point now, Clock::time_point awaited) {
  const auto late = std::chrono::duration_cast<milliseconds>(now - std::max(awaited, awake_));
  awake_ = now;
  if (late < timeout_ / 2) return;
  pause_ = late;
  pause_end_ = now;
  for (Peer& peer : peers_) peer.watch.forgive(now);
  own_.forgive(now);
}

void Watcher::hear(Peer& peer, Message message, Clock::time_point now) {
  switch (message.type) {
    case MessageType::kBeat:
      peer.watch.told(RankStatus::unpack(message), now);
      return;
    case MessageType::kGoodbye:
      peer.said_goodbye = true;
      [[fallthrough]];
    case MessageType::kCollect:
    case MessageType::kResult:
      peer.inbox.push_back(std::move(message));
      changed_.notify_all();
      return;
    case MessageType::kFail:
      if (!report_) report_ = Report{Unpacker(message.body).text(), &peer.watch, now};
      return;
    case MessageType::kVerdict:
      if (verdict_) return;
      verdict_ = Verdict{Unpacker(message.body).text(), false};
      is_from_zero_ = true;
      return;
    default:
      return;
  }
}

void Watcher::note_end(Peer& peer, Clock::time_point now) {
  const Connection& connection = peer.connection;
  if (verdict_ || is_closing_ || peer.said_goodbye) return;
  if (report_ && report_->watch == &peer.watch) return;  // it said why
  // This process may have been stopped since it heard, of which others are the consequence.
  notice_pause(Clock::now(), now);
  if (pause_end_ != Clock::time_point() && now - pause_end_ < timeout_) {
    decide(own_.was_stopped(pause_));
  } else if (connection.state() == Connection::State::kClosed) {
    decide(peer.watch.died());
  } else {
    const std::string& error = connection.error();
    decide(peer.watch.lost(error.empty() ? "something else than a message came" : error));
  }
}

void Watcher::beat(Clock::time_point now) {
  RankStatus mine = status(now);
  const SharedBody body = mine.pack();
  own_.told(std::move(mine), now);
  for (Peer& peer : peers_) {
    // What waits for its turn is as good a sign of life.
    if (peer.is_open && !peer.connection.has_unsent()) {
      peer.connection.send(MessageType::kBeat, body);
    }
  }
}

void Watcher::judge(Clock::time_point now) {
  if (verdict_) return;
  const Peer* most_silent = nullptr;
  for (const Peer& peer : peers_) {
    if (!peer.is_open || peer.said_goodbye || peer.watch.silent(now) <= timeout_) continue;
    if (most_silent == nullptr || peer.watch.silent(now) > most_silent->watch.silent(now)) {
      most_silent = &peer;
    }
  }
  if (most_silent != nullptr) {
    return decide(most_silent->watch.is_silent(most_silent->watch.silent(now)), most_silent);
  }
  if (!is_zero()) return;
  // All stand still where one does. It was the first, once the beats of all have come.
  const RankWatch* first = own_.overdue().count() > 0 ? &own_ : nullptr;
  for (const Peer& peer : peers_) {
    const milliseconds overdue = peer.said_goodbye ? milliseconds(0) : peer.watch.overdue();
    if (overdue > (first == nullptr ? milliseconds(0) : first->overdue())) first = &peer.watch;
  }
  if (first == nullptr) {
    overdue_since_ = Clock::time_point();
  } else if (overdue_since_ == Clock::time_point()) {
    overdue_since_ = now;
  } else if (now >= overdue_since_ + beat_interval_) {
    return decide(first->is_overdue(first->overdue()));
  }
  if (report_ && now >= report_->at + kGrace) {
    decide(report_->watch->failed(report_->cause));
  }
}

/// This rank's own verdict: rank 0's about any, or another's about rank 0.
void Watcher::decide(const std::string& what, const Peer* unanswering) {
  bool should_print = true;
  for (int other = 1; other < rank_; ++other) {
    // One on each host, for without rank 0 they do not know of each other.
    const auto o = static_cast<size_t>(other), r = static_cast<size_t>(rank_);
    if (members_[o].host == members_[r].host) should_print = false;
  }
  verdict_ = Verdict{members_.size() == 1 ? fmt::format("{}; {}", what, advice_)
                                          : fmt::format("{}; all ranks end; {}", what, advice_),
                     should_print};
  unanswering_ = unanswering;
}

void Watcher::spread(Lock& lock) {
  if (is_zero()) {
    const SharedBody body = Packer().text(verdict_->message).take();
    for (Peer& peer : peers_) peer.connection.send(MessageType::kVerdict, body);
    drain(lock, std::min(kHearing, timeout_), unanswering_);
  } else if (is_from_zero_) {
    peers_[0].connection.flush();
    peers_[0].connection.finish_sending();
    drain(lock, kPrinting, nullptr);
  }
}

void Watcher::tell(Lock& lock) {
  if (is_failing_ || !on_failure_) return;
  was_told_ = true;
  lock.unlock();
  on_failure_(verdict_->message, verdict_->should_print);
  lock.lock();
}

/// Sends what is unsent and waits for the other sides' ends.
void Watcher::drain(Lock& lock, milliseconds at_most, const Peer* except) {
  const auto deadline = Clock::now() + at_most;
  while (!is_stopping_ && Clock::now() < deadline) {
    if (std::none_of(peers_.begin(), peers_.end(),
                     [&](const Peer& peer) { return peer.is_open && &peer != except; })) {
      return;
    }
    turn(lock, deadline);
  }
}

}  // namespace strata::comm
