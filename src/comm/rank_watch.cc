#include "comm/rank_watch.h"

#include <fmt/format.h>

#include <utility>

namespace strata::comm {

using std::chrono::milliseconds;

SharedBody RankStatus::pack() const {
  return Packer()
      .number(stalled.count())
      .number(limit.count())
      .number(is_waiting ? 1 : 0)
      .text(phase)
      .text(task)
      .take();
}

RankStatus RankStatus::unpack(const Message& message) {
  Unpacker from(message.body);
  RankStatus status;
  status.stalled = milliseconds(from.number());
  status.limit = milliseconds(from.number());
  status.is_waiting = from.number() != 0;
  status.phase = from.text();
  status.task = from.text();
  return status;
}

void RankWatch::told(RankStatus status, Clock::time_point now) {
  status_ = std::move(status);
  heard_ = now;
}

void RankWatch::forgive(Clock::time_point now) noexcept {
  heard_ = now;
  status_.stalled = milliseconds(0);
}

milliseconds RankWatch::silent(Clock::time_point now) const noexcept {
  return std::chrono::duration_cast<milliseconds>(now - heard_);
}

milliseconds RankWatch::overdue() const noexcept {
  const bool is_overdue =
      status_.limit.count() > 0 && !status_.is_waiting && status_.stalled > status_.limit;
  return is_overdue ? status_.stalled : milliseconds(0);
}

std::string RankWatch::name() const {
  return fmt::format("rank {} (host {}, pid {})", rank_, member_.host, member_.pid);
}

std::string RankWatch::place() const {
  if (!status_.task.empty()) return fmt::format(" during '{}'", status_.task);
  if (!status_.phase.empty()) return fmt::format(" in the phase '{}'", status_.phase);
  return "";
}

std::string RankWatch::died() const { return name() + " died" + place(); }

std::string RankWatch::lost(const std::string& error) const {
  return fmt::format("the connection to {} was lost{} ({})", name(), place(), error);
}

std::string RankWatch::is_silent(milliseconds for_ms) const {
  return fmt::format("{} has not answered for {} (stuck){}", name(), seconds_text(for_ms), place());
}

std::string RankWatch::is_overdue(milliseconds for_ms) const {
  const std::string task = status_.task.empty() ? "" : fmt::format(", at '{}'", status_.task);
  return fmt::format("{} has made no progress for {} in the phase '{}', which allows {} (stuck){}",
                     name(), seconds_text(for_ms), status_.phase, seconds_text(status_.limit),
                     task);
}

std::string RankWatch::failed(const std::string& cause) const {
  return fmt::format("{} failed{}: {}", name(), place(), cause);
}

std::string RankWatch::was_stopped(milliseconds for_ms) const {
  return fmt::format("{} was stopped for {}, and the other ranks have ended without it", name(),
                     seconds_text(for_ms));
}

std::string seconds_text(milliseconds duration) {
  const double seconds = static_cast<double>(duration.count()) / 1000;
  return seconds < 10 ? fmt::format("{:.1f} s", seconds) : fmt::format("{:.0f} s", seconds);
}

}  // namespace strata::comm
