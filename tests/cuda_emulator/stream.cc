#include "cuda_emulator/stream.h"

#include <utility>

namespace strata::gpu::cuda::emulator {

void Ticket::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  time_ = std::chrono::steady_clock::now();
  changed_.notify_all();
}

void Ticket::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}

bool Ticket::reached() const {
  const std::lock_guard lock(mutex_);
  return reached_;
}

Ticket::Time Ticket::time() const {
  const std::lock_guard lock(mutex_);
  return time_;
}

StreamThread::StreamThread() : thread_([this] { run(); }) {}

StreamThread::~StreamThread() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StreamThread::push(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    ++unfinished_;
  }
  changed_.notify_all();
}

void StreamThread::push(TicketPtr ticket) {
  {
    const std::lock_guard lock(mutex_);
    work_.emplace_back();
    tickets_.push_back(std::move(ticket));
  }
  changed_.notify_all();
}

TicketPtr StreamThread::mark() {
  auto ticket = std::make_shared<Ticket>();
  push(ticket);
  return ticket;
}

bool StreamThread::idle() const {
  const std::lock_guard lock(mutex_);
  return unfinished_ == 0;
}

void StreamThread::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return closing_ || !work_.empty(); });
    if (work_.empty()) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    if (work == nullptr) {
      const TicketPtr ticket = std::move(tickets_.front());
      tickets_.pop_front();
      ticket->reach();
      continue;
    }
    lock.unlock();
    work();
    work = nullptr;  // What it holds is released before the stream counts as idle.
    lock.lock();
    --unfinished_;
  }
}

}  // namespace strata::gpu::cuda::emulator
