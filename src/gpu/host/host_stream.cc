#include "gpu/host/host_stream.h"

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/error.h"

namespace strata::gpu::host {

uint64_t StreamProgress::ended() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void StreamProgress::advance() {
  {
    const std::lock_guard lock(mutex_);
    if (++ended_ < lowest_awaited_) return;
    lowest_awaited_ = kNone;  // those who must wait longer put theirs back
  }
  reached_.notify_all();
}

uint64_t StreamProgress::wait(uint64_t ticket) {
  std::unique_lock lock(mutex_);
  while (ended_ < ticket) {
    lowest_awaited_ = std::min(lowest_awaited_, ticket);
    reached_.wait(lock);
  }
  return ended_;
}

StreamGroup::~StreamGroup() {
  STRATA_CHECK(unused_.size() == all_.size(), "streams must be destroyed before their device");
}

StreamGroup::ProgressLease StreamGroup::lease_progress() {
  const std::lock_guard lock(mutex_);
  if (unused_.empty()) {
    unused_.reserve(all_.size() + 1);  // so that giving back cannot fail
    all_.push_back(std::make_unique<StreamProgress>());
    return {all_.back().get(), ReturnProgress{this}};
  }
  StreamProgress* progress = unused_.back();
  unused_.pop_back();
  return {progress, ReturnProgress{this}};
}

void StreamGroup::ReturnProgress::operator()(StreamProgress* progress) const noexcept {
  const std::lock_guard lock(group->mutex_);
  group->unused_.push_back(progress);
}

void HostEvent::record(Recording recording) {
  const std::lock_guard lock(mutex_);
  latest_ = recording;
}

HostEvent::Recording HostEvent::latest() const {
  const std::lock_guard lock(mutex_);
  return latest_;
}

HostStream::HostStream(std::string name, StreamGroup& group)
    : Stream(std::move(name)),
      group_(group),
      progress_(group.lease_progress()),
      ring_(std::make_unique_for_overwrite<Slot[]>(kRingItems)),
      queued_(progress_->ended()),
      ended_seen_(queued_),
      thread_([this] { run_thread(); }) {
  constexpr size_t kLongestThreadName = 15;
  pthread_setname_np(thread_.native_handle(), this->name().substr(0, kLongestThreadName).c_str());
}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  enqueued_.notify_one();
  thread_.join();
}

HostEvent::Recording HostStream::recording() {
  const std::lock_guard lock(mutex_);
  return {.progress = progress_.get(), .ticket = queued_};
}

void HostStream::enqueue_wait(HostEvent::Recording recording) {
  // A stream is in order with itself.
  if (recording.progress == nullptr || recording.progress == progress_.get()) return;
  if (recording.progress->ended() >= recording.ticket) return;
  push([](void* stored) { wait(*static_cast<HostEvent::Recording*>(stored)); }, &recording,
       sizeof(recording), false);
}

void HostStream::wait(HostEvent::Recording recording) {
  if (recording.progress != nullptr) recording.progress->wait(recording.ticket);
}

void HostStream::push(void (*run)(void*), const void* work, size_t size_bytes,
                      bool skipped_after_error) {
  std::unique_lock lock(mutex_);
  while (queued_ - ended_seen_ >= kRingItems) {
    const uint64_t oldest = queued_ - kRingItems + 1;
    lock.unlock();  // the thread needs it to learn of the work that makes room
    const uint64_t ended = progress_->wait(oldest);
    lock.lock();
    ended_seen_ = std::max(ended_seen_, ended);
  }
  Slot& slot = ring_[queued_ % kRingItems];
  slot.run = run;
  slot.skipped_after_error = skipped_after_error;
  std::memcpy(slot.work, work, size_bytes);
  ++queued_;
  lock.unlock();
  enqueued_.notify_one();
}

uint64_t HostStream::wait_for_work(uint64_t taken) {
  std::unique_lock lock(mutex_);
  enqueued_.wait(lock, [&] { return queued_ > taken || stop_; });
  return queued_;
}

void HostStream::run_thread() {
  // Throttled copies sleep in small pieces; the default slack of 50 us would slow them down.
  prctl(PR_SET_TIMERSLACK, 1000UL);
  uint64_t taken = progress_->ended();
  while (true) {
    const uint64_t queued = wait_for_work(taken);
    if (queued == taken) return;
    for (; taken < queued; ++taken) {
      Slot& slot = ring_[taken % kRingItems];
      if (!slot.skipped_after_error || !group_.error().is_set()) {
        try {
          slot.run(slot.work);
        } catch (...) {
          group_.error().keep(std::current_exception());
        }
      }
      progress_->advance();
    }
  }
}

}  // namespace strata::gpu::host
