// The seam between Strata and what computes: memory, streams, events, copies, and (operators.h) the
// operators of a language model.
//
// Threads: a Device and its streams are used by one dispatching thread at a time;
// Event::synchronize paths are safe from any thread. Errors of asynchronous work are sticky: the
// first is kept and thrown by the next synchronize of any stream or event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

namespace strata::gpu {

class Operators;

/// Work in order: each piece begins when the one before has ended.
class Stream {
 public:
  virtual ~Stream() = default;
  [[nodiscard]] const std::string& name() const noexcept { return name_; }

 protected:
  explicit Stream(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

/// A point in a stream. Reusable: recording again moves it.
class Event {
 public:
  virtual ~Event() = default;
};

/// Page-aligned memory of exact size that is released with its owner: the device's own, or host
/// memory that the device can copy from and to without a detour (pinned).
class Arena {
 public:
  virtual ~Arena() = default;
  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] size_t size_bytes() const noexcept { return size_bytes_; }

 protected:
  Arena(std::byte* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}
  std::byte* data_;
  size_t size_bytes_;
};

enum class CopyDirection : uint8_t { kUpload, kDownload, kWithinDevice };

class Device {
 public:
  virtual ~Device() = default;

  /// "host" or "cuda".
  [[nodiscard]] virtual std::string_view kind() const noexcept = 0;
  /// What a person would call it: "CPU cores (2 threads)", "NVIDIA GeForce RTX 4090".
  [[nodiscard]] virtual std::string description() const = 0;
  /// The most that allocate_device_memory can give now.
  [[nodiscard]] virtual size_t free_memory_bytes() const = 0;

  /// Blocking; throws an Error of kind kDoesNotFit that says how much was free.
  [[nodiscard]] virtual std::unique_ptr<Arena> allocate_device_memory(size_t size_bytes) = 0;
  [[nodiscard]] virtual std::unique_ptr<Arena> allocate_host_memory(size_t size_bytes) = 0;

  [[nodiscard]] virtual std::unique_ptr<Stream> create_stream(std::string name) = 0;
  [[nodiscard]] virtual std::unique_ptr<Event> create_event() = 0;

  /// Returns at once; the event is reached when the work now in the stream has ended.
  virtual void record_async(Event& event, Stream& stream) = 0;
  /// Returns at once; later work of `stream` begins when the event's latest recording is reached.
  virtual void wait_async(Stream& stream, Event& event) = 0;
  /// Blocks until reached, then throws the device's first error if there is one. An event never
  /// recorded counts as reached.
  virtual void synchronize(Event& event) = 0;
  /// Blocks until all work of the stream has ended, then throws as above.
  virtual void synchronize(Stream& stream) = 0;
  /// Keeps an error of work that others have put into streams of this device as that of its own
  /// work: what comes later is skipped, and every synchronize throws it. From any thread.
  virtual void fail(std::exception_ptr error) noexcept = 0;

  /// Copies between arenas of this device. Both ranges must live and stay untouched until the copy
  /// has ended in stream order. Does not block for host memory from allocate_host_memory.
  virtual void copy_async(void* destination, const void* source, size_t size_bytes,
                          CopyDirection direction, Stream& stream) = 0;
  virtual void fill_zero_async(void* destination, size_t size_bytes, Stream& stream) = 0;
  /// When the stream gets there, std::chrono::steady_clock's nanoseconds are written to
  /// *nanoseconds, host memory that must live until then. Atomically: it may be looked at
  /// meanwhile.
  virtual void stamp_async(int64_t* nanoseconds, Stream& stream) = 0;

  [[nodiscard]] virtual Operators& operators() noexcept = 0;
};

}  // namespace strata::gpu
