#include "nvme/engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <utility>

#include "base/error.h"

namespace strata::nvme {
namespace {

// The first few attempts are made at once: EINTR is over when it is seen.
constexpr unsigned kAttemptsAtOnce = 3;
constexpr std::chrono::microseconds kLongestPause{1000};

}  // namespace

Drive::Engine::Engine(DriveOptions options)
    : options_(std::move(options)), queue_(options_.queue_capacity, options_.block_size_bytes) {
  STRATA_CHECK(options_.depth > 0, "a drive needs room for at least one transfer");
  STRATA_CHECK(options_.block_size_bytes > 0 && options_.block_size_bytes <= kGiB,
               "the kernel takes blocks of up to 1 GiB");
  flights_.resize(options_.depth);
  completions_.resize(options_.depth);
  again_.reserve(options_.depth);
  ended_.reserve(options_.queue_capacity);
  for (uint32_t i = options_.depth; i-- > 0;) free_flights_.push_back(i);
  thread_ = std::thread([this] { open_and_run(); });
  {
    std::unique_lock lock(mutex_);
    opened_.wait(lock, [this] { return is_open_ || open_error_; });
  }
  if (open_error_) {
    thread_.join();
    std::rethrow_exception(open_error_);
  }
}

Drive::Engine::~Engine() { close(); }

void Drive::Engine::open_and_run() noexcept {
  // Signals are for the threads of the program, and would only interrupt transfers here.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "strata-drive");

  std::unique_lock lock(mutex_);
  try {
    backend_ = options_.backend({.path = options_.path,
                                 .read_only = options_.read_only,
                                 .direct = options_.direct,
                                 .depth = options_.depth,
                                 .buffers = options_.buffers,
                                 .patience = options_.patience});
    info_ = backend_->info();
    step_bytes_ = info_.alignment_bytes;
    info_.alignment_bytes = std::max(step_bytes_, kMinAlignmentBytes);
    if (options_.block_size_bytes % info_.alignment_bytes != 0) {
      throw usage_error("the block size of '" + options_.path.string() +
                        "' must be a multiple of " + std::to_string(info_.alignment_bytes) +
                        " bytes");
    }
    is_open_ = true;
  } catch (...) {
    backend_.reset();
    open_error_ = std::current_exception();
  }
  opened_.notify_all();
  if (!is_open_) return;
  run(lock);
  close_error_ = backend_->close();
  backend_.reset();
}

bool Drive::Engine::submit(const Request& request, bool wait) {
  check(request);
  std::unique_lock lock(mutex_);
  STRATA_CHECK(!is_closing_, "a request to a closed drive");
  if (queue_.is_full()) {
    if (!wait) return false;
    STRATA_CHECK(std::this_thread::get_id() != thread_.get_id(),
                 "a completion handler must not wait for its own drive");
    ++submitters_waiting_;
    room_.wait(lock, [this] { return !queue_.is_full(); });
    --submitters_waiting_;
    STRATA_CHECK(!is_closing_, "a drive was closed while a request waited for room");
  }
  queue_.accept(request);
  // Woken with the lock held: without it the request could have ended, and the drive been closed
  // by whoever waited for that.
  if (std::exchange(is_asleep_, false)) backend_->wake();
  return true;
}

void Drive::Engine::check(const Request& request) const {
  STRATA_CHECK(request.sink.done != nullptr, "a request without a completion handler");
  const size_t mask = info_.alignment_bytes - 1;
  STRATA_CHECK((static_cast<size_t>(request.offset_bytes) & mask) == 0 &&
                   (request.size_bytes & mask) == 0 &&
                   (std::bit_cast<uintptr_t>(request.data) & mask) == 0,
               "offset, size and address of a request must be aligned");
  STRATA_CHECK(request.offset_bytes >= 0, "a request before the beginning of its file");
  STRATA_CHECK(request.operation != Operation::kSync || request.size_bytes == 0,
               "a sync has no size");
}

void Drive::Engine::drain() {
  std::unique_lock lock(mutex_);
  const uint64_t number = queue_.next_number();
  ++drains_waiting_;
  handled_.wait(lock, [&] { return !is_handling_ && !queue_.has_older_than(number); });
  --drains_waiting_;
}

int Drive::Engine::close() {
  if (!thread_.joinable()) return 0;
  {
    // With the lock held, as in submit: the thread must not end, and its backend with it.
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
    backend_->wake();
  }
  thread_.join();
  return close_error_;
}

DriveStatistics Drive::Engine::statistics() const noexcept {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void Drive::Engine::run(std::unique_lock<std::mutex>& lock) noexcept {
  for (;;) {
    start_blocks(lock);
    // While handlers ran, requests may have come that nobody was woken for.
    if (call_handlers(lock)) continue;
    if (is_closing_ && queue_.is_empty()) return;
    is_asleep_ = again_.empty() && !free_flights_.empty();
    const bool wait = again_.empty() || in_flight_ > 0;
    lock.unlock();
    const size_t count = backend_->reap(completions_, wait);
    lock.lock();
    is_asleep_ = false;
    for (size_t i = 0; i < count; ++i) {
      --in_flight_;
      settle(static_cast<uint32_t>(completions_[i].tag), completions_[i].result);
    }
    call_handlers(lock);
    back_off(lock);
  }
}

void Drive::Engine::start_blocks(std::unique_lock<std::mutex>& lock) noexcept {
  size_t repeated = 0;
  while (repeated < again_.size() && hand_over(again_[repeated], lock)) ++repeated;
  again_.erase(again_.begin(), again_.begin() + static_cast<ptrdiff_t>(repeated));
  while (again_.empty() && !free_flights_.empty()) {
    const uint32_t index = free_flights_.back();
    Flight& flight = flights_[index];
    if (!queue_.next_block(flight.block)) return;
    free_flights_.pop_back();
    flight.rest = flight.block.transfer;
    flight.rest.tag = index;
    flight.started = Clock::now();
    flight.attempts = 0;
    if (!hand_over(index, lock)) again_.push_back(index);
  }
}

/// False where the backend has no room for it now.
bool Drive::Engine::hand_over(uint32_t index, std::unique_lock<std::mutex>& lock) noexcept {
  Flight& flight = flights_[index];
  lock.unlock();  // it may take the kernel a while, for which no caller should wait
  const int code = backend_->try_submit(flight.rest);
  lock.lock();
  if (code == EAGAIN || code == EBUSY) {
    // Room comes when something ends; where nothing is under way it may never come.
    if (in_flight_ > 0 || !is_out_of_patience(flight)) return false;
  }
  if (code != 0) {
    end(index, code);
    return true;
  }
  ++in_flight_;
  ++statistics_.blocks;
  statistics_.depth_sum += in_flight_;
  statistics_.depth_max = std::max<uint64_t>(statistics_.depth_max, in_flight_);
  return true;
}

/// The one place where a transfer's end is judged.
void Drive::Engine::settle(uint32_t index, int64_t result) noexcept {
  Flight& flight = flights_[index];
  const Operation operation = flight.rest.operation;
  if (result == -EINTR || result == -EAGAIN)
    return try_again(index, static_cast<int>(-result), false);
  if (result < 0) return end(index, static_cast<int>(-result));
  if (operation == Operation::kSync) return end(index, 0);

  const auto transferred = static_cast<size_t>(result);
  if (transferred > flight.rest.size_bytes) return end(index, EIO);
  if (transferred == flight.rest.size_bytes) {
    flight.rest.size_bytes = 0;
    return end(index, 0);
  }
  // Direct transfers can only go on at a multiple of the alignment: a little is done twice.
  const size_t progress = transferred - transferred % step_bytes_;
  if (operation == Operation::kRead && progress == 0) return end(index, ENODATA);
  flight.rest.offset_bytes += static_cast<int64_t>(progress);
  flight.rest.data += progress;
  flight.rest.size_bytes -= progress;
  try_again(index, EIO, progress > 0);
}

void Drive::Engine::try_again(uint32_t index, int errno_code, bool has_progressed) noexcept {
  Flight& flight = flights_[index];
  if (has_progressed) {
    flight.attempts = 0;
  } else if (is_out_of_patience(flight)) {
    return end(index, errno_code);
  }
  ++statistics_.repeats;
  again_.push_back(index);
}

/// Counts one more attempt without progress.
bool Drive::Engine::is_out_of_patience(Flight& flight) noexcept {
  if (flight.attempts++ == 0) {
    flight.stalled = Clock::now();
    return false;
  }
  return Clock::now() - flight.stalled > options_.patience;
}

void Drive::Engine::end(uint32_t index, int error) noexcept {
  const Flight& flight = flights_[index];
  const size_t transferred = flight.block.transfer.size_bytes - flight.rest.size_bytes;
  const Request& request = queue_.request(flight.block.slot);
  if (error == 0) {
    const auto nanoseconds =
        static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - flight.started).count());
    const size_t bucket = LatencyHistogram::bucket_of(nanoseconds);
    TrafficBytes& bytes = statistics_.bytes[static_cast<size_t>(request.traffic)];
    switch (request.operation) {
      case Operation::kRead:
        bytes.read += transferred;
        ++statistics_.read_latency.counts[bucket];
        break;
      case Operation::kWrite:
        bytes.written += transferred;
        ++statistics_.write_latency.counts[bucket];
        break;
      case Operation::kSync:
        ++statistics_.sync_latency.counts[bucket];
        break;
    }
  }
  queue_.end_block(flight.block, error, transferred);
  free_flights_.push_back(index);
}

void Drive::Engine::back_off(std::unique_lock<std::mutex>& lock) noexcept {
  if (again_.empty()) return;
  unsigned attempts = 0;
  for (const uint32_t index : again_) attempts = std::max(attempts, flights_[index].attempts);
  if (attempts <= kAttemptsAtOnce) return;
  const auto pause = std::min<std::chrono::microseconds>(
      kLongestPause, std::chrono::microseconds(int64_t{1} << std::min(attempts, 10U)));
  lock.unlock();
  std::this_thread::sleep_for(pause);
  lock.lock();
}

/// False where there was nothing to call.
bool Drive::Engine::call_handlers(std::unique_lock<std::mutex>& lock) noexcept {
  ended_.clear();
  Ended one;
  while (queue_.take_ended(one)) {
    if (one.result.error != 0) ++statistics_.errors;
    ended_.push_back(one);
  }
  if (ended_.empty()) return false;
  is_handling_ = true;
  if (submitters_waiting_ > 0) room_.notify_all();
  lock.unlock();
  for (const Ended& each : ended_) each.sink.done(each.sink.context, each.result);
  lock.lock();
  is_handling_ = false;
  if (drains_waiting_ > 0) handled_.notify_all();
  return true;
}

}  // namespace strata::nvme
