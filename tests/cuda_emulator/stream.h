// Streams as threads, and the points in them that events mark.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace strata::gpu::cuda::emulator {

/// A point in a stream, reached once.
class Ticket {
 public:
  using Time = std::chrono::steady_clock::time_point;

  void reach();
  void wait() const;
  [[nodiscard]] bool reached() const;
  /// When it was reached.
  [[nodiscard]] Time time() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  Time time_;
};

using TicketPtr = std::shared_ptr<Ticket>;

/// Work in order on a thread of its own. Destroying it waits for the work.
class StreamThread {
 public:
  StreamThread();
  ~StreamThread();
  StreamThread(const StreamThread&) = delete;
  StreamThread& operator=(const StreamThread&) = delete;

  void push(std::function<void()> work);
  /// Makes the ticket be reached when all work pushed so far has ended.
  void push(TicketPtr ticket);
  TicketPtr mark();
  /// Whether all work has ended. So it has once a ticket that was pushed after it is reached.
  [[nodiscard]] bool idle() const;

 private:
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::deque<TicketPtr> tickets_;  // For the empty functions among the work.
  size_t unfinished_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace strata::gpu::cuda::emulator

// What the runtime's handles point to.
struct CUstream_st {
  /// Ordered with the default stream, as streams are unless created as non-blocking.
  bool blocking = true;
  int priority = 0;
  strata::gpu::cuda::emulator::StreamThread thread;
};

struct CUevent_st {
  bool timing = true;
  strata::gpu::cuda::emulator::TicketPtr ticket;  // Null: never recorded.
};
