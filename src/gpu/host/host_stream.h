// Streams and events of the host device: each stream is one thread that works through a ring of
// small closures.
//
// A stream counts what has been enqueued and what has ended; the count of an item is its ticket. A
// recording of an event is a stream and a ticket, so that recording enqueues nothing and a wait
// captures two words, whatever becomes of the event later.
//
// Threads: enqueue and everything of events may be called from any thread, except from work on a
// stream. Nothing here allocates after construction.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "gpu/device.h"
#include "gpu/sticky_error.h"

namespace strata::gpu::host {

/// How far a stream has got.
class StreamProgress {
 public:
  [[nodiscard]] uint64_t ended();
  /// Counts one more item as ended.
  void advance();
  /// Blocks until the item of this ticket has ended; returns how many have.
  uint64_t wait(uint64_t ticket);

 private:
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  std::mutex mutex_;
  std::condition_variable reached_;
  uint64_t ended_ = 0;
  uint64_t lowest_awaited_ = kNone;  // so that the stream wakes nobody in vain
};

/// What the streams of a device share. Outlives them.
class StreamGroup {
 public:
  StreamGroup() = default;
  ~StreamGroup();
  StreamGroup(const StreamGroup&) = delete;
  StreamGroup& operator=(const StreamGroup&) = delete;

  [[nodiscard]] StickyError& error() noexcept { return error_; }

 private:
  friend class HostStream;
  struct ReturnProgress {
    StreamGroup* group;
    void operator()(StreamProgress* progress) const noexcept;
  };
  using ProgressLease = std::unique_ptr<StreamProgress, ReturnProgress>;

  /// A counter for a new stream. It lives as long as the group, since events and waits point to it;
  /// a later stream counts on from where an earlier one ended.
  [[nodiscard]] ProgressLease lease_progress();

  StickyError error_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<StreamProgress>> all_;
  std::vector<StreamProgress*> unused_;
};

/// Reusable and free to be destroyed at any time, also while streams wait for a recording of it.
class HostEvent final : public Event {
 public:
  struct Recording {
    StreamProgress* progress = nullptr;  // null: never recorded
    uint64_t ticket = 0;
  };
  void record(Recording recording);
  [[nodiscard]] Recording latest() const;

 private:
  mutable std::mutex mutex_;
  Recording latest_;
};

class HostStream final : public Stream {
 public:
  static constexpr uint64_t kRingItems = 4096;
  static constexpr size_t kWorkBytes = 240;
  static constexpr size_t kWorkAlignment = 16;

  /// Starts the thread and names it; `group` must outlive the stream.
  HostStream(std::string name, StreamGroup& group);
  /// Blocks until all work has ended.
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  /// Copies `work` into the ring; blocks while kRingItems have not ended. The stream's thread calls
  /// it once, unless the group has an error by then; what it throws becomes the group's error.
  template <class Work>
  void enqueue(const Work& work) {
    static_assert(std::is_trivially_copyable_v<Work> && std::is_trivially_destructible_v<Work>);
    static_assert(sizeof(Work) <= kWorkBytes && alignof(Work) <= kWorkAlignment);
    push([](void* stored) { (*static_cast<Work*>(stored))(); }, &work, sizeof(Work), true);
  }

  /// The point that is reached when all work now in the stream has ended.
  [[nodiscard]] HostEvent::Recording recording();
  /// Later work begins when the recording is reached, after errors as well: the memory of work
  /// ahead of it may be given back only then.
  void enqueue_wait(HostEvent::Recording recording);

  /// Blocks until the recording is reached.
  static void wait(HostEvent::Recording recording);

 private:
  struct Slot {
    void (*run)(void*);
    bool skipped_after_error;
    alignas(kWorkAlignment) std::byte work[kWorkBytes];
  };
  static_assert(sizeof(Slot) == 256);

  void push(void (*run)(void*), const void* work, size_t size_bytes, bool skipped_after_error);
  void run_thread();
  /// Blocks until there is work beyond `taken`; returns how much there is, `taken` at the end.
  [[nodiscard]] uint64_t wait_for_work(uint64_t taken);

  StreamGroup& group_;
  StreamGroup::ProgressLease progress_;
  std::unique_ptr<Slot[]> ring_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable enqueued_;
  uint64_t queued_;      // ticket of the last item
  uint64_t ended_seen_;  // at least so many have ended
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace strata::gpu::host
