#include "gpu/sticky_error.h"

#include <utility>

namespace strata::gpu {

void StickyError::keep(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  if (error_) return;
  error_ = std::move(error);
  set_.store(true, std::memory_order_release);
}

void StickyError::rethrow_if_set() const {
  if (!is_set()) return;
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = error_;
  }
  std::rethrow_exception(error);
}

}  // namespace strata::gpu
