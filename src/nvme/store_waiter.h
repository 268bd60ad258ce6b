// Blocking requests to a store, which itself only knows sinks.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>

#include "base/error.h"
#include "nvme/store.h"

namespace strata::nvme {

/// The sink of one request, and a place to wait for its result.
class StoreWaiter {
 public:
  [[nodiscard]] StoreSink sink() noexcept {
    return {[](void* context, const StoreResult& result) noexcept {
              auto& waiter = *static_cast<StoreWaiter*>(context);
              const std::lock_guard lock(waiter.mutex_);
              waiter.error_ = result.error;
              waiter.is_done_ = true;
              // With the lock held: the waiter may be gone as soon as it is released.
              waiter.done_.notify_one();
            },
            this};
  }

  /// Blocks until the request has ended; throws its failure.
  void wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return is_done_; });
    if (!error_.empty()) throw failure(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_done_ = false;
  std::string error_;
};

}  // namespace strata::nvme
