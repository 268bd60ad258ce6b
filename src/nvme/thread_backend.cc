#include "nvme/thread_backend.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "nvme/opened_file.h"

namespace strata::nvme {
namespace {

constexpr unsigned kMaxThreads = 16;

/// First in, first out, of fixed capacity; whoever puts knows that there is room.
template <class T>
class Ring {
 public:
  explicit Ring(size_t capacity) : items_(capacity) {}
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  void put(const T& item) noexcept { items_[(first_ + count_++) % items_.size()] = item; }
  [[nodiscard]] T take() noexcept {
    --count_;
    return items_[std::exchange(first_, (first_ + 1) % items_.size())];
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0;
  size_t count_ = 0;
};

class ThreadBackend final : public Backend {
 public:
  explicit ThreadBackend(const BackendOptions& options)
      : depth_(options.depth), submitted_(options.depth), ended_(options.depth) {
    OpenedFile file = open_file(options);
    info_ = std::move(file.info);
    info_.name = "threads";
    file_ = std::move(file.fd);
    const unsigned threads = std::min(depth_, kMaxThreads);
    threads_.reserve(threads);
    try {
      for (unsigned i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
      stop();
      throw;
    }
  }
  ~ThreadBackend() override { stop(); }

  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      if (in_flight_ >= depth_) return EBUSY;
      ++in_flight_;
      submitted_.put(transfer);
    }
    to_do_.notify_one();
    return 0;
  }

  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    std::unique_lock lock(mutex_);
    if (wait) {
      done_.wait(lock, [this] { return woken_ || !ended_.empty(); });
      woken_ = false;
    }
    size_t count = 0;
    while (count < completions.size() && !ended_.empty()) completions[count++] = ended_.take();
    in_flight_ -= static_cast<unsigned>(count);
    return count;
  }

  void wake() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      woken_ = true;
    }
    done_.notify_one();
  }

  [[nodiscard]] int close() noexcept override {
    stop();
    return ::close(file_.release()) == 0 || errno == EINTR ? 0 : errno;
  }

 private:
  void work() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "strata-io");
    std::unique_lock lock(mutex_);
    for (;;) {
      to_do_.wait(lock, [this] { return stopping_ || !submitted_.empty(); });
      if (submitted_.empty()) return;
      const Transfer transfer = submitted_.take();
      lock.unlock();
      const RawCompletion completion{transfer.tag, perform(transfer)};
      lock.lock();
      ended_.put(completion);
      done_.notify_one();
    }
  }

  [[nodiscard]] int64_t perform(const Transfer& transfer) const noexcept {
    int64_t result = 0;
    switch (transfer.operation) {
      case Operation::kRead:
        result = ::pread(file_.get(), transfer.data, transfer.size_bytes, transfer.offset_bytes);
        break;
      case Operation::kWrite:
        result = ::pwrite(file_.get(), transfer.data, transfer.size_bytes, transfer.offset_bytes);
        break;
      case Operation::kSync:
        result = ::fdatasync(file_.get());
        break;
    }
    return result < 0 ? -errno : result;
  }

  void stop() noexcept {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    to_do_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  UniqueFd file_;
  const unsigned depth_;
  std::mutex mutex_;
  std::condition_variable to_do_;
  std::condition_variable done_;
  Ring<Transfer> submitted_;
  Ring<RawCompletion> ended_;
  unsigned in_flight_ = 0;
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Backend> open_thread_backend(const BackendOptions& options) {
  return std::make_unique<ThreadBackend>(options);
}

}  // namespace strata::nvme
