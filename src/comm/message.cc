#include "comm/message.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace strata::comm {
namespace {

constexpr uint32_t kMagic = 0x43525453;  // "STRC"
constexpr uint16_t kVersion = 1;

const std::vector<std::byte>& content(const SharedBody& body) {
  static const std::vector<std::byte> kEmpty;
  return body ? *body : kEmpty;
}

}  // namespace

Packer& Packer::number(int64_t value) {
  const auto raw = std::as_bytes(std::span(&value, 1));
  body_.insert(body_.end(), raw.begin(), raw.end());
  return *this;
}

Packer& Packer::bytes(std::span<const std::byte> data) {
  number(static_cast<int64_t>(data.size()));
  body_.insert(body_.end(), data.begin(), data.end());
  return *this;
}

Packer& Packer::text(std::string_view data) { return bytes(std::as_bytes(std::span(data))); }

SharedBody Packer::take() {
  return std::make_shared<const std::vector<std::byte>>(std::move(body_));
}

std::span<const std::byte> Unpacker::take(size_t size_bytes) {
  if (size_bytes > rest_.size()) throw failure("a message of another rank is cut off");
  const auto taken = rest_.first(size_bytes);
  rest_ = rest_.subspan(size_bytes);
  return taken;
}

int64_t Unpacker::number() {
  int64_t value = 0;
  std::memcpy(&value, take(sizeof value).data(), sizeof value);
  return value;
}

std::span<const std::byte> Unpacker::bytes() { return take(static_cast<size_t>(number())); }

std::string Unpacker::text() {
  const auto data = bytes();
  return {reinterpret_cast<const char*>(data.data()), data.size()};
}

void Connection::send(MessageType type, SharedBody body) {
  if (!can_send_) return;
  const Header header{kMagic, kVersion, static_cast<uint16_t>(type), content(body).size()};
  unsent_.push_back({header, std::move(body)});
}

void Connection::flush() {
  while (!unsent_.empty()) {
    Unsent& first = unsent_.front();
    const std::vector<std::byte>& body = content(first.body);
    std::array<iovec, 2> parts{};
    size_t count = 0;
    const size_t from_body =
        first.sent_bytes > sizeof(Header) ? first.sent_bytes - sizeof(Header) : 0;
    if (first.sent_bytes < sizeof(Header)) {
      parts[count++] = {reinterpret_cast<char*>(&first.header) + first.sent_bytes,
                        sizeof(Header) - first.sent_bytes};
    }
    if (from_body < body.size()) {
      parts[count++] = {const_cast<std::byte*>(body.data()) + from_body, body.size() - from_body};
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      can_send_ = false;  // why, receive() will tell
      unsent_.clear();
      return;
    }
    first.sent_bytes += static_cast<size_t>(sent);
    if (first.sent_bytes == sizeof(Header) + body.size()) unsent_.pop_front();
  }
}

void Connection::finish_sending() noexcept {
  can_send_ = false;
  unsent_.clear();
  static_cast<void>(::shutdown(fd_.get(), SHUT_WR));
}

/// Reads a whole header's meaning; false where it has none.
bool Connection::begin_body() {
  if (header_.magic != kMagic) {
    state_ = State::kNotOurs;
  } else if (header_.version != kVersion) {
    state_ = State::kOtherVersion;
  } else if (header_.size_bytes > most_body_bytes_) {
    state_ = State::kNotOurs;
  }
  if (!is_open()) return false;
  message_.type = static_cast<MessageType>(header_.type);
  message_.body.resize(header_.size_bytes);
  body_bytes_ = 0;
  return true;
}

void Connection::end_with(int errno_code) {
  if (errno_code == ECONNRESET || errno_code == EPIPE) {
    state_ = State::kClosed;
  } else {
    state_ = State::kLost;
    error_ = std::strerror(errno_code);
  }
}

bool Connection::receive(std::vector<Message>& out, size_t most) {
  bool any = false;
  while (is_open() && out.size() < most) {
    const bool in_header = header_bytes_ < sizeof header_;
    void* const to = in_header ? reinterpret_cast<std::byte*>(&header_) + header_bytes_
                               : message_.body.data() + body_bytes_;
    const size_t wanted =
        in_header ? sizeof header_ - header_bytes_ : message_.body.size() - body_bytes_;
    if (wanted > 0) {
      const ssize_t got = ::recv(fd_.get(), to, wanted, 0);
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != EWOULDBLOCK) end_with(errno);
        return any;
      }
      if (got == 0) {
        state_ = State::kClosed;
        return any;
      }
      any = true;
      (in_header ? header_bytes_ : body_bytes_) += static_cast<size_t>(got);
    }
    if (in_header) {
      // The first bytes tell a stranger, who may not send a whole header.
      if (std::memcmp(&header_, &kMagic, std::min(header_bytes_, sizeof kMagic)) != 0) {
        state_ = State::kNotOurs;
        return any;
      }
      if (header_bytes_ == sizeof header_ && !begin_body()) return any;
    } else if (body_bytes_ == message_.body.size()) {
      out.push_back(std::move(message_));
      message_ = {};
      header_bytes_ = 0;
    }
  }
  return any;
}

}  // namespace strata::comm
