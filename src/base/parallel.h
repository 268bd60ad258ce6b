// The one way work is spread over threads.
#pragma once

#include <oneapi/tbb/parallel_for.h>
#include <oneapi/tbb/task_arena.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace strata {

#ifdef __SANITIZE_THREAD__
/// Calls `loop` with its frames far below the caller's. What oneTBB keeps on the stack is last
/// touched by its other threads, in an order that ThreadSanitizer does not see; what is called
/// after the loop must not come to lie there.
template <class Loop>
[[gnu::noinline]] void call_on_own_stack(const Loop& loop) {
  constexpr size_t kApartBytes = size_t{256} << 10;
  *static_cast<volatile char*>(__builtin_alloca(kApartBytes)) = 0;
  loop();
}
#else
template <class Loop>
void call_on_own_stack(const Loop& loop) {
  loop();
}
#endif

/// Calls body(i) for each i of [0, count) on the threads of `arena`, the calling one among them, in
/// any order; blocks until all have ended. May be nested. Does not allocate but for oneTBB's own
/// task pool.
template <class Body>
void for_each_index(tbb::task_arena& arena, int64_t count, const Body& body) {
  if (count <= 0) return;
  // oneTBB itself orders the calls after what came before this one and ahead of what follows it,
  // but in a library that ThreadSanitizer does not see into: these two atomics say the same in its
  // terms.
  std::atomic<bool> begun = false;
  std::atomic<int64_t> ended = 0;
  begun.store(true, std::memory_order_release);
  call_on_own_stack([&] {
    arena.execute([&] {
      tbb::parallel_for(int64_t{0}, count, [&](int64_t i) {
        static_cast<void>(begun.load(std::memory_order_acquire));
        body(i);
        ended.fetch_add(1, std::memory_order_release);
      });
    });
  });
  static_cast<void>(ended.load(std::memory_order_acquire));
}

}  // namespace strata
