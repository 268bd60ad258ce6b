#include "nvme/throttled_backend.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"

namespace strata::nvme {
namespace {

using Clock = std::chrono::steady_clock;

/// Calls a backend's wake at a given time.
class Alarm {
 public:
  explicit Alarm(Backend& backend) : backend_(backend), thread_([this] { run(); }) {}
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;
  ~Alarm() { stop(); }

  void set(Clock::time_point time) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (time == time_) return;
      time_ = time;
    }
    changed_.notify_one();
  }
  void stop() noexcept {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void run() noexcept {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    pthread_setname_np(pthread_self(), "strata-throttle");
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (time_ == kNever) {
        changed_.wait(lock);
      } else if (Clock::now() < time_) {
        changed_.wait_until(lock, time_);
      } else {
        time_ = kNever;
        lock.unlock();
        backend_.wake();
        lock.lock();
      }
    }
  }

  static constexpr Clock::time_point kNever = Clock::time_point::max();
  Backend& backend_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Clock::time_point time_ = kNever;
  bool stopping_ = false;
  std::thread thread_;  // the last: it uses the others
};

class ThrottledBackend final : public Backend {
 public:
  ThrottledBackend(std::unique_ptr<Backend> inner, unsigned depth, double read_bytes_per_second,
                   double write_bytes_per_second)
      : inner_(std::move(inner)),
        speeds_{read_bytes_per_second, write_bytes_per_second},
        transfers_(depth),
        raw_(depth),
        alarm_(*inner_) {
    info_ = inner_->info();
    for (uint32_t i = depth; i-- > 0;) free_.push_back(i);
    ended_.reserve(depth);
  }

  [[nodiscard]] int try_submit(const Transfer& transfer) noexcept override {
    if (free_.empty()) return EBUSY;
    const uint32_t index = free_.back();
    Transfer numbered = transfer;
    numbered.tag = index;
    if (const int code = inner_->try_submit(numbered); code != 0) return code;
    free_.pop_back();
    busy_until_ = std::max(busy_until_, Clock::now()) + time_of(transfer);
    transfers_[index] = {transfer.tag, 0, busy_until_};
    return 0;
  }

  [[nodiscard]] size_t reap(std::span<RawCompletion> completions, bool wait) noexcept override {
    take_ended(false);
    const size_t count = hand_out(completions);
    if (count > 0 || !wait) return count;
    if (!ended_.empty()) {
      const auto first = std::min_element(
          ended_.begin(), ended_.end(),
          [&](uint32_t a, uint32_t b) { return transfers_[a].due < transfers_[b].due; });
      // Should it go off before the inner backend blocks, that will not block.
      alarm_.set(transfers_[*first].due);
    }
    take_ended(true);
    return hand_out(completions);
  }

  void wake() noexcept override { inner_->wake(); }

  [[nodiscard]] int close() noexcept override {
    alarm_.stop();
    return inner_->close();
  }

 private:
  struct Throttled {
    uint64_t tag = 0;
    int64_t result = 0;
    Clock::time_point due;
  };

  [[nodiscard]] Clock::duration time_of(const Transfer& transfer) const noexcept {
    if (transfer.operation == Operation::kSync) return {};
    const double speed = speeds_[transfer.operation == Operation::kRead ? 0 : 1];
    if (speed == 0) return {};
    return std::chrono::ceil<Clock::duration>(
        std::chrono::duration<double>(static_cast<double>(transfer.size_bytes) / speed));
  }

  void take_ended(bool wait) noexcept {
    const size_t count = inner_->reap(raw_, wait);
    for (size_t i = 0; i < count; ++i) {
      const auto index = static_cast<uint32_t>(raw_[i].tag);
      transfers_[index].result = raw_[i].result;
      ended_.push_back(index);
    }
  }

  size_t hand_out(std::span<RawCompletion> completions) noexcept {
    const Clock::time_point now = Clock::now();
    size_t count = 0;
    std::erase_if(ended_, [&](uint32_t index) {
      const Throttled& transfer = transfers_[index];
      if (transfer.due > now || count == completions.size()) return false;
      completions[count++] = {transfer.tag, transfer.result};
      free_.push_back(index);
      return true;
    });
    return count;
  }

  std::unique_ptr<Backend> inner_;
  const std::array<double, 2> speeds_;  // of reads and of writes
  std::vector<Throttled> transfers_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> ended_;  // with the inner backend, and not yet handed out
  std::vector<RawCompletion> raw_;
  Clock::time_point busy_until_;  // of the drive, with all that was submitted
  Alarm alarm_;                   // before the backend that it wakes is gone
};

std::string describe(double bytes_per_second) {
  return bytes_per_second == 0 ? "any speed" : fmt::format("{:.3g} GB/s", bytes_per_second / 1e9);
}

}  // namespace

BackendFactory throttled(BackendFactory inner, double read_bytes_per_second,
                         double write_bytes_per_second) {
  STRATA_CHECK(read_bytes_per_second >= 0 && write_bytes_per_second >= 0,
               "a drive is not slower than at rest");
  return [=](const BackendOptions& options) -> std::unique_ptr<Backend> {
    auto backend = std::make_unique<ThrottledBackend>(
        inner(options), options.depth, read_bytes_per_second, write_bytes_per_second);
    backend->info().notes.push_back(
        fmt::format("'{}' is slowed down: it reads at {} and writes at {}", options.path.string(),
                    describe(read_bytes_per_second), describe(write_bytes_per_second)));
    return backend;
  };
}

}  // namespace strata::nvme
