// What ranks say to each other on the control plane, and a connection that carries it.
//
// A message is a header (magic, version, type, size) and a body of numbers and byte strings in the
// machine's order; another order fails at the magic.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"

namespace strata::comm {

enum class MessageType : uint16_t {
  kHello = 1,  // rank to 0: who I am
  kSeen,       // 0 to rank: you are one of mine; the others have yet to come
  kWelcome,    // 0 to rank: all are here
  kBeat,       // both ways: I live, and this is what I do
  kCollect,    // rank to 0: my part of a collective
  kResult,     // 0 to rank: all parts
  kFail,       // rank to 0: I have to give up, because
  kVerdict,    // 0 to rank: all end, because
  kGoodbye,    // rank to 0: I am done; 0 to rank: all are
};

struct Message {
  MessageType type{};
  std::vector<std::byte> body;
};

using SharedBody = std::shared_ptr<const std::vector<std::byte>>;

class Packer {
 public:
  Packer& number(int64_t value);
  Packer& bytes(std::span<const std::byte> data);
  Packer& text(std::string_view data);
  [[nodiscard]] SharedBody take();

 private:
  std::vector<std::byte> body_;
};

/// Throws a failure where the body ends too soon.
class Unpacker {
 public:
  explicit Unpacker(std::span<const std::byte> body) : rest_(body) {}
  [[nodiscard]] int64_t number();
  [[nodiscard]] std::span<const std::byte> bytes();
  [[nodiscard]] std::string text();

 private:
  std::span<const std::byte> take(size_t size_bytes);
  std::span<const std::byte> rest_;
};

/// A socket with messages under way in both directions. Never blocks. Not thread-safe.
class Connection {
 public:
  enum class State {
    kOpen,
    kClosed,        // by the other side, or its process has ended
    kLost,          // an error of the network: see error()
    kNotOurs,       // what came is no message
    kOtherVersion,  // a message of another version of Strata
  };

  /// Larger messages are refused as not ours.
  Connection(UniqueFd fd, size_t most_body_bytes)
      : fd_(std::move(fd)), most_body_bytes_(most_body_bytes) {}

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  [[nodiscard]] State state() const noexcept { return state_; }
  [[nodiscard]] bool is_open() const noexcept { return state_ == State::kOpen; }
  [[nodiscard]] const std::string& error() const noexcept { return error_; }
  void set_most_body_bytes(size_t value) noexcept { most_body_bytes_ = value; }

  /// Queues a message for flush(). Nothing happens where the other side does not read any more.
  void send(MessageType type, SharedBody body = nullptr);
  [[nodiscard]] bool has_unsent() const noexcept { return !unsent_.empty(); }
  /// Sends what the system takes now. A failure to send shows in the state only after all that had
  /// come before is received.
  void flush();
  /// Appends what has come, until `out` has `most` messages. Returns whether any byte came.
  bool receive(std::vector<Message>& out, size_t most = SIZE_MAX);
  /// No more will be sent; the other side sees the end after what was sent.
  void finish_sending() noexcept;
  void close() noexcept { fd_.reset(); }

 private:
  struct Header {
    uint32_t magic;
    uint16_t version;
    uint16_t type;
    uint64_t size_bytes;
  };
  struct Unsent {
    Header header;
    SharedBody body;
    size_t sent_bytes = 0;
  };
  bool begin_body();
  void end_with(int errno_code);

  UniqueFd fd_;
  size_t most_body_bytes_;
  State state_ = State::kOpen;
  std::string error_;
  std::deque<Unsent> unsent_;
  bool can_send_ = true;
  Header header_{};
  size_t header_bytes_ = 0;
  Message message_;
  size_t body_bytes_ = 0;
};

}  // namespace strata::comm
