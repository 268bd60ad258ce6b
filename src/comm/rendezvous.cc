#include "comm/rendezvous.h"

#include <fmt/format.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <thread>

#include "comm/launch.h"
#include "comm/socket.h"

namespace strata::comm {
namespace {

using std::chrono::milliseconds;

constexpr size_t kMostHandshakeBytes = 4096;
constexpr size_t kMostWaitingConnections = 256;
constexpr milliseconds kAttempt{2000};
constexpr milliseconds kFirstPause{20};
constexpr milliseconds kLongestPause{500};
// Rank 0's own patience may have begun a little later than that of who waits for its word.
constexpr milliseconds kMargin{5000};

struct Hello {
  int64_t rank = 0;
  int64_t ranks = 0;
  Member member;

  [[nodiscard]] std::string text() const {
    return fmt::format("rank {} of {} (host {}, pid {})", rank, ranks, member.host, member.pid);
  }
};

SharedBody pack(const Hello& hello) {
  return Packer()
      .number(hello.rank)
      .number(hello.ranks)
      .number(hello.member.pid)
      .text(hello.member.host)
      .take();
}

Hello unpack_hello(const Message& message) {
  Unpacker from(message.body);
  Hello hello;
  hello.rank = from.number();
  hello.ranks = from.number();
  hello.member.pid = from.number();
  hello.member.host = from.text();
  return hello;
}

Hello hello_of(const ControlOptions& options) {
  return {
      options.rank, options.ranks, {options.host.empty() ? host_name() : options.host, ::getpid()}};
}

/// Polls with the events of each connection, until the deadline at most.
void wait_for(std::vector<pollfd>& polled, Clock::time_point deadline) {
  if (::poll(polled.data(), polled.size(), poll_ms(Clock::now(), deadline)) < 0 && errno != EINTR) {
    throw failure("cannot wait for the connections of other ranks: too little memory");
  }
}

class Gathering {
 public:
  Gathering(const ControlListener& listener, const ControlOptions& options)
      : listener_(listener),
        options_(options),
        seats_(static_cast<size_t>(options.ranks - 1)),
        members_(static_cast<size_t>(options.ranks)) {
    members_[0] = hello_of(options).member;
  }

  Star run() {
    const auto deadline = Clock::now() + options_.connect_timeout;
    while (missing() > 0) {
      if (Clock::now() >= deadline) refuse_all(missing_text());
      wait(deadline);
      drop_gone_ranks();
      accept_all();
      hear_newcomers();
    }
    return welcome();
  }

 private:
  struct Newcomer {
    Connection connection;
    SocketAddress from;
  };

  [[nodiscard]] size_t missing() const {
    return static_cast<size_t>(std::count(seats_.begin(), seats_.end(), std::nullopt));
  }

  void wait(Clock::time_point deadline) {
    polled_.assign(1, {.fd = listener_.fd(), .events = POLLIN, .revents = 0});
    for (const Newcomer& newcomer : newcomers_) {
      polled_.push_back({.fd = newcomer.connection.fd(), .events = POLLIN, .revents = 0});
    }
    for (const auto& seat : seats_) {
      if (seat) polled_.push_back({.fd = seat->fd(), .events = POLLIN, .revents = 0});
    }
    wait_for(polled_, deadline);
  }

  /// A rank that ended while it waited may come again.
  void drop_gone_ranks() {
    std::vector<Message> ignored;
    for (auto& seat : seats_) {
      if (!seat) continue;
      seat->receive(ignored);
      if (!seat->is_open()) seat.reset();
    }
  }

  void accept_all() {
    while (true) {
      SocketAddress from;
      UniqueFd fd = accept_one(listener_.fd(), from);
      if (!fd) return;
      // Strangers that say nothing must not use up the descriptors.
      if (newcomers_.size() >= kMostWaitingConnections) newcomers_.erase(newcomers_.begin());
      newcomers_.push_back({Connection(std::move(fd), kMostHandshakeBytes), from});
    }
  }

  void hear_newcomers() {
    std::vector<Newcomer> silent;
    for (size_t i = 0; i < newcomers_.size(); ++i) {
      current_ = i;
      Newcomer& newcomer = newcomers_[i];
      std::vector<Message> messages;
      newcomer.connection.receive(messages, 1);
      if (!messages.empty()) {
        hear(newcomer, messages.front());
      } else if (newcomer.connection.state() == Connection::State::kOtherVersion) {
        refuse_all(fmt::format("{} runs another version of strata; all ranks need the same",
                               newcomer.from.text()));
      } else if (newcomer.connection.is_open()) {
        silent.push_back(std::move(newcomer));
      } else {
        turn_away(newcomer);
      }
    }
    newcomers_ = std::move(silent);
  }

  /// Its connection ends with the round.
  void turn_away(const Newcomer& newcomer) {
    last_stranger_ = newcomer.from.text();
    ++strangers_;
  }

  void hear(Newcomer& newcomer, const Message& message) {
    std::optional<Hello> hello;
    try {
      if (message.type == MessageType::kHello) hello = unpack_hello(message);
    } catch (const Error&) {
      // A stranger by chance.
    }
    if (!hello) return turn_away(newcomer);
    if (hello->ranks != options_.ranks) {
      refuse_all(
          fmt::format("{} came to a run of {} ranks; all need the same WORLD_SIZE, and a run "
                      "of its own needs another MASTER_PORT",
                      hello->text(), options_.ranks));
    }
    if (hello->rank < 0 || hello->rank >= options_.ranks) return turn_away(newcomer);
    const auto place = static_cast<size_t>(hello->rank);
    if (place == 0 || seats_[place - 1]) {
      refuse_all(
          fmt::format("a second {} came, from host {}, pid {}; each process needs a RANK of "
                      "its own",
                      Hello{hello->rank, hello->ranks, members_[place]}.text(), hello->member.host,
                      hello->member.pid));
    }
    members_[place] = hello->member;
    newcomer.connection.set_most_body_bytes(kMostMessageBytes);
    newcomer.connection.send(MessageType::kSeen);
    newcomer.connection.flush();
    seats_[place - 1].emplace(std::move(newcomer.connection));
  }

  [[nodiscard]] std::string missing_text() const {
    constexpr size_t kNamed = 8;
    std::string names;
    size_t count = 0;
    for (size_t i = 0; i < seats_.size(); ++i) {
      if (seats_[i] || ++count > kNamed) continue;
      names += fmt::format("{}{}", names.empty() ? "" : ", ", i + 1);
    }
    if (count > kNamed) names += fmt::format(" and {} more", count - kNamed);
    std::string text = fmt::format(
        "rank{} {} of {} {} not come to port {} of host {} within {}; see whether {} started, and "
        "with this MASTER_ADDR and MASTER_PORT",
        count == 1 ? "" : "s", names, options_.ranks, count == 1 ? "has" : "have", listener_.port(),
        members_[0].host, seconds_text(options_.connect_timeout),
        count == 1 ? "it was" : "they were");
    if (strangers_ > 0) {
      text +=
          fmt::format(" ({} connection{} came that {} no rank, the last from {})", strangers_,
                      strangers_ == 1 ? "" : "s", strangers_ == 1 ? "was" : "were", last_stranger_);
    }
    return text;
  }

  [[noreturn]] void refuse_all(const std::string& why) {
    const SharedBody body = Packer().text(why).take();
    const auto refuse = [&](Connection& connection) {
      connection.send(MessageType::kVerdict, body);
      connection.flush();
    };
    for (auto& seat : seats_) {
      if (seat) refuse(*seat);
    }
    if (current_ < newcomers_.size()) refuse(newcomers_[current_].connection);
    throw RankFailure(why, true);
  }

  Star welcome() {
    Packer packer;
    packer.number(options_.heartbeat_timeout.count());
    for (const Member& member : members_) packer.number(member.pid).text(member.host);
    const SharedBody body = packer.take();
    Star star{
        .connections = {}, .members = members_, .heartbeat_timeout = options_.heartbeat_timeout};
    for (auto& seat : seats_) {
      seat->send(MessageType::kWelcome, body);
      seat->flush();  // what the system does not take yet, the watcher sends
      star.connections.push_back(std::move(*seat));
    }
    return star;
  }

  const ControlListener& listener_;
  const ControlOptions& options_;
  std::vector<std::optional<Connection>> seats_;  // [rank - 1]
  std::vector<Member> members_;                   // [rank]
  std::vector<Newcomer> newcomers_;
  size_t current_ = 0;
  std::vector<pollfd> polled_;
  int strangers_ = 0;
  std::string last_stranger_;
};

class Joining {
 public:
  Joining(const std::string& address, int port, const ControlOptions& options)
      : address_(address), port_(port), options_(options) {}

  Star run() {
    const auto deadline = Clock::now() + options_.connect_timeout;
    milliseconds pause = kFirstPause;
    while (true) {
      const Resolved resolved = resolve(address_, port_);
      if (resolved.addresses.empty()) {
        why_ = fmt::format("the name '{}' has no address ({})", address_, resolved.error);
      }
      for (const SocketAddress& at : resolved.addresses) {
        if (std::optional<Star> star = attempt(at, deadline)) return std::move(*star);
      }
      if (Clock::now() + pause >= deadline) break;
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
    fail(fmt::format(
        "{} cannot reach rank 0 at {}:{} within {}: {}; check MASTER_ADDR and "
        "MASTER_PORT, and that rank 0 was started",
        hello_of(options_).text(), address_, port_, seconds_text(options_.connect_timeout), why_));
  }

 private:
  [[noreturn]] void fail(const std::string& message) const {
    // Rank 0 need not live, so one rank of each host tells.
    throw RankFailure(message, options_.local_rank == 0 || options_.rank == 1);
  }

  std::optional<Star> attempt(const SocketAddress& at, Clock::time_point deadline) {
    Connected connected = connect_until(at, std::min(deadline, Clock::now() + kAttempt));
    if (!connected.fd) {
      why_ = connected.error;
      return std::nullopt;
    }
    Connection connection(std::move(connected.fd), kMostMessageBytes);
    connection.send(MessageType::kHello, pack(hello_of(options_)));
    bool is_seen = false;
    while (Clock::now() < deadline) {
      connection.flush();
      std::vector<pollfd> polled{
          {.fd = connection.fd(),
           .events = static_cast<short>(POLLIN | (connection.has_unsent() ? POLLOUT : 0)),
           .revents = 0}};
      wait_for(polled, deadline);
      std::vector<Message> messages;
      connection.receive(messages, 1);  // what comes after a welcome is the watcher's
      for (const Message& message : messages) {
        if (message.type == MessageType::kSeen) {
          is_seen = true;
          deadline = Clock::now() + options_.connect_timeout + kMargin;
        } else if (message.type == MessageType::kVerdict) {
          throw RankFailure(Unpacker(message.body).text(), false);
        } else if (message.type == MessageType::kWelcome) {
          return welcomed(std::move(connection), message);
        }
      }
      if (connection.is_open()) continue;
      if (is_seen) {
        fail(fmt::format("rank 0 at {}:{} ended before all ranks had come", address_, port_));
      }
      if (connection.state() == Connection::State::kOtherVersion) {
        fail(fmt::format("rank 0 at {}:{} runs another version of strata; all ranks need the same",
                         address_, port_));
      }
      if (connection.state() == Connection::State::kNotOurs) {
        fail(fmt::format("another program than rank 0 answers at {}:{}; choose another MASTER_PORT",
                         address_, port_));
      }
      why_ = "what listens there ends the connection";
      return std::nullopt;
    }
    if (is_seen) {
      fail(fmt::format("rank 0 at {}:{} has not said within {} that all ranks have come", address_,
                       port_, seconds_text(options_.connect_timeout)));
    }
    why_ = "what listens there does not answer as rank 0 does";
    return std::nullopt;
  }

  Star welcomed(Connection connection, const Message& message) const {
    Unpacker from(message.body);
    Star star;
    star.heartbeat_timeout = milliseconds(from.number());
    for (int i = 0; i < options_.ranks; ++i) {
      Member& member = star.members.emplace_back();
      member.pid = from.number();
      member.host = from.text();
    }
    star.connections.push_back(std::move(connection));
    return star;
  }

  const std::string& address_;
  int port_;
  const ControlOptions& options_;
  std::string why_ = "no attempt was made";
};

}  // namespace

ControlListener::ControlListener(const std::string& address, int port)
    : fd_(listen_at(address, port)), port_(port_of(fd_.get())) {}

Star alone(const ControlOptions& options) {
  return {.connections = {},
          .members = {hello_of(options).member},
          .heartbeat_timeout = options.heartbeat_timeout};
}

Star gather_ranks(const ControlListener& listener, const ControlOptions& options) {
  return Gathering(listener, options).run();
}

Star join_ranks(const std::string& address, int port, const ControlOptions& options) {
  return Joining(address, port, options).run();
}

}  // namespace strata::comm
