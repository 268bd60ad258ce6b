// The first error of a device's asynchronous work, until a synchronisation throws it.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>

namespace strata::gpu {

/// The first error of all that are kept; later ones are dropped. Thread-safe.
class StickyError {
 public:
  void keep(std::exception_ptr error) noexcept;
  [[nodiscard]] bool is_set() const noexcept { return set_.load(std::memory_order_acquire); }
  void rethrow_if_set() const;

 private:
  std::atomic<bool> set_ = false;
  mutable std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace strata::gpu
