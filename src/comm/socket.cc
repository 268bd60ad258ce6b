#include "comm/socket.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "comm/launch.h"

namespace strata::comm {
namespace {

constexpr int kBacklog = 4096;

void set_no_delay(int fd) noexcept {
  const int on = 1;
  static_cast<void>(::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
}

const sockaddr* as_sockaddr(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

SocketAddress own_address(int fd) {
  SocketAddress address;
  address.size_bytes = sizeof address.storage;
  static_cast<void>(
      ::getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size_bytes));
  return address;
}

UniqueFd open_socket(int family) {
  return UniqueFd::adopt(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

/// Addresses to listen at, the best first.
std::vector<SocketAddress> listen_addresses(const std::string& host, int port) {
  if (host == "localhost" || host == "127.0.0.1" || host == "::1") {
    return resolve(host, port).addresses;
  }
  SocketAddress any6, any4;
  sockaddr_in6 six{};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(static_cast<uint16_t>(port));
  six.sin6_addr = in6addr_any;
  std::memcpy(&any6.storage, &six, sizeof six);
  any6.size_bytes = sizeof six;
  sockaddr_in four{};
  four.sin_family = AF_INET;
  four.sin_port = htons(static_cast<uint16_t>(port));
  std::memcpy(&any4.storage, &four, sizeof four);
  any4.size_bytes = sizeof four;
  return {any6, any4};  // the second for systems without IPv6
}

}  // namespace

std::string SocketAddress::text() const {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (::getnameinfo(as_sockaddr(*this), size_bytes, host.data(), host.size(), port.data(),
                    port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return storage.ss_family == AF_INET6 ? fmt::format("[{}]:{}", host.data(), port.data())
                                       : fmt::format("{}:{}", host.data(), port.data());
}

Resolved resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  Resolved resolved;
  const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) {
    resolved.error = code == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(code);
    return resolved;
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* entry = list; entry != nullptr; entry = entry->ai_next) {
    SocketAddress& address = resolved.addresses.emplace_back();
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size_bytes = entry->ai_addrlen;
  }
  return resolved;
}

Connected connect_until(const SocketAddress& address, Clock::time_point deadline) {
  Connected result;
  UniqueFd fd = open_socket(address.storage.ss_family);
  if (!fd) {
    result.error = std::strerror(errno);
    return result;
  }
  set_no_delay(fd.get());
  if (::connect(fd.get(), as_sockaddr(address), address.size_bytes) != 0) {
    if (errno != EINPROGRESS && errno != EINTR) {
      result.error = std::strerror(errno);
      return result;
    }
    pollfd waiting{.fd = fd.get(), .events = POLLOUT, .revents = 0};
    int ready = 0;
    do {
      ready = ::poll(&waiting, 1, poll_ms(Clock::now(), deadline));
    } while (ready < 0 && errno == EINTR);
    int error = ETIMEDOUT;
    socklen_t size = sizeof error;
    if (ready > 0 && ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) {
      error = errno;
    }
    if (ready < 0) error = errno;
    if (error != 0) {
      result.error = std::strerror(error);
      return result;
    }
  }
  // Trying a local port at which nobody listens, TCP may choose that very port to come from, and so
  // connect to itself.
  if (own_address(fd.get()).text() == address.text()) {
    result.error = std::strerror(ECONNREFUSED);
    return result;
  }
  result.fd = std::move(fd);
  return result;
}

UniqueFd listen_at(const std::string& host, int port) {
  int error = EADDRNOTAVAIL;
  for (const SocketAddress& address : listen_addresses(host, port)) {
    UniqueFd fd = open_socket(address.storage.ss_family);
    if (!fd) {
      error = errno;
      continue;
    }
    const int on = 1, off = 0;
    static_cast<void>(::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
    if (address.storage.ss_family == AF_INET6) {
      static_cast<void>(::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off));
    }
    if (::bind(fd.get(), as_sockaddr(address), address.size_bytes) == 0 &&
        ::listen(fd.get(), kBacklog) == 0) {
      return fd;
    }
    error = errno;
    if (error == EADDRINUSE || error == EACCES) break;
  }
  if (error == EADDRINUSE) {
    throw failure(
        fmt::format("port {} of host {} is taken by another process; choose another "
                    "MASTER_PORT",
                    port, host_name()));
  }
  throw failure(fmt::format("cannot listen at port {} of host {}: {}; choose another MASTER_PORT",
                            port, host_name(), std::strerror(error)));
}

int port_of(int fd) {
  const SocketAddress address = own_address(fd);
  if (address.storage.ss_family == AF_INET6) {
    sockaddr_in6 six{};
    std::memcpy(&six, &address.storage, sizeof six);
    return ntohs(six.sin6_port);
  }
  sockaddr_in four{};
  std::memcpy(&four, &address.storage, sizeof four);
  return ntohs(four.sin_port);
}

UniqueFd accept_one(int listener, SocketAddress& peer) {
  while (true) {
    peer.size_bytes = sizeof peer.storage;
    const int fd = ::accept4(listener, reinterpret_cast<sockaddr*>(&peer.storage), &peer.size_bytes,
                             SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      set_no_delay(fd);
      return UniqueFd::adopt(fd);
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno == EMFILE || errno == ENFILE) {
      throw failure(
          "no file descriptor is left for the connection of another rank; raise the "
          "limit with ulimit -n");
    }
    return {};
  }
}

int poll_ms(Clock::time_point now, Clock::time_point until) noexcept {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - now).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

}  // namespace strata::comm
