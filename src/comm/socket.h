// TCP sockets for the control plane: names to addresses, listening, connecting. All sockets are
// non-blocking, closed on exec, and without Nagle's delay. IPv4 and IPv6.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

#include "base/file.h"

namespace strata::comm {

using Clock = std::chrono::steady_clock;

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size_bytes = 0;

  /// In numbers, with the port: `10.0.0.1:29500`, `[::1]:29500`.
  [[nodiscard]] std::string text() const;
};

/// A name's addresses, and why there are none. Blocks as long as the system's resolver does.
struct Resolved {
  std::vector<SocketAddress> addresses;
  std::string error;
};
[[nodiscard]] Resolved resolve(const std::string& host, int port);

/// A connection, and why there is none. Blocks until the deadline at most.
struct Connected {
  UniqueFd fd;
  std::string error;
};
[[nodiscard]] Connected connect_until(const SocketAddress& address, Clock::time_point deadline);

/// Listens at all of this machine's addresses, or only at the loopback where `host` is one of its
/// usual names. Port 0: one that the system chooses. Throws a failure that names the port.
[[nodiscard]] UniqueFd listen_at(const std::string& host, int port);
[[nodiscard]] int port_of(int fd);

/// The next connection that waits, with its peer's address; empty where there is none.
[[nodiscard]] UniqueFd accept_one(int listener, SocketAddress& peer);

/// poll's time to wait, in milliseconds rounded up and never negative.
[[nodiscard]] int poll_ms(Clock::time_point now, Clock::time_point until) noexcept;

}  // namespace strata::comm
