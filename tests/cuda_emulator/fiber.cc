#include "cuda_emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <boost/context/detail/fcontext.hpp>
#include <new>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace strata::gpu::cuda::emulator {

namespace {

namespace context = boost::context::detail;

// Around a switch the sanitizer already counts accesses as the other fiber's.
#if defined(__SANITIZE_THREAD__)
#define STRATA_UNSEEN_BY_TSAN __attribute__((no_sanitize("thread")))
#else
#define STRATA_UNSEEN_BY_TSAN
#endif

// Set before a switch, read after it by whoever runs then on the same thread.
thread_local Fiber* switching_from = nullptr;
thread_local Fiber* switching_to = nullptr;

}  // namespace

Fiber::Fiber(size_t stack_bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  stack_bytes_ = (stack_bytes + page - 1) / page * page;
  mapping_bytes_ = stack_bytes_ + page;
  void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  if (mprotect(mapping_, page, PROT_NONE) != 0) {  // The guard: an overflow faults.
    munmap(mapping_, mapping_bytes_);
    throw std::bad_alloc();
  }
  stack_ = mapping_ + page;
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  if (tsan_fiber_ != nullptr && mapping_ != nullptr) __tsan_destroy_fiber(tsan_fiber_);
#endif
  if (mapping_ == nullptr) return;
  unpoison(mapping_, mapping_bytes_);
  munmap(mapping_, mapping_bytes_);
}

void Fiber::prepare(void (*entry)()) {
  entry_ = entry;
  if (std::exchange(parked_, false)) return;
  unpoison(static_cast<const std::byte*>(stack_), stack_bytes_);
  fake_stack_ = nullptr;
#if defined(__SANITIZE_THREAD__)
  // One that was left in the middle of its calls would go on with the shadow stack of those.
  if (tsan_fiber_ != nullptr) __tsan_destroy_fiber(tsan_fiber_);
  tsan_fiber_ = __tsan_create_fiber(0);
#endif
  context_ = context::make_fcontext(mapping_ + mapping_bytes_, stack_bytes_,
                                    [](context::transfer_t transfer) { begin(transfer.fctx); });
}

STRATA_UNSEEN_BY_TSAN void Fiber::begin(void* context_of_previous) {
  arrived(context_of_previous);
  Fiber* self = switching_to;
  for (;;) self->entry_();
}

STRATA_UNSEEN_BY_TSAN void Fiber::switch_between(Fiber& from, Fiber& to, bool parks) {
  switching_from = &from;
  switching_to = &to;
  from.parked_ = parks;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&from.fake_stack_, to.stack_, to.stack_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  if (from.tsan_fiber_ == nullptr) from.tsan_fiber_ = __tsan_get_current_fiber();
  // Without synchronisation: to the sanitizer the lanes of a block are concurrent.
  __tsan_switch_to_fiber(to.tsan_fiber_, __tsan_switch_to_fiber_no_sync);
#endif
  const context::transfer_t transfer = context::jump_fcontext(to.context_, nullptr);
  arrived(transfer.fctx);
}

STRATA_UNSEEN_BY_TSAN void Fiber::arrived(void* context_of_previous) {
  switching_from->context_ = context_of_previous;
#if defined(__SANITIZE_ADDRESS__)
  const void* previous_stack = nullptr;
  size_t previous_stack_bytes = 0;
  __sanitizer_finish_switch_fiber(switching_to->fake_stack_, &previous_stack,
                                  &previous_stack_bytes);
  // How the stack of a thread becomes known, to be switched back to.
  if (switching_from->mapping_ == nullptr) {
    switching_from->stack_ = previous_stack;
    switching_from->stack_bytes_ = previous_stack_bytes;
  }
#endif
}

FiberPool& FiberPool::instance() {
  static FiberPool* pool = new FiberPool;  // Never destroyed: streams may outlive static objects.
  return *pool;
}

void FiberPool::take(std::vector<std::unique_ptr<Fiber>>& fibers, size_t count) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr size_t kStackBytes = 512 * 1024;
#else
  constexpr size_t kStackBytes = 128 * 1024;
#endif
  const std::lock_guard lock(mutex_);
  while (fibers.size() < count) {
    if (idle_.empty()) {
      fibers.push_back(std::make_unique<Fiber>(kStackBytes));
    } else {
      fibers.push_back(std::move(idle_.back()));
      idle_.pop_back();
    }
  }
}

void FiberPool::give_back(std::vector<std::unique_ptr<Fiber>> fibers) {
  const std::lock_guard lock(mutex_);
  for (auto& fiber : fibers) idle_.push_back(std::move(fiber));
}

}  // namespace strata::gpu::cuda::emulator
