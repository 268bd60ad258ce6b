// Stacks to switch between, in a few nanoseconds, known to the sanitizers.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
// Functions of its runtime that its header leaves out.
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace strata::gpu::cuda::emulator {

/// A stack and where its execution stands. A default-constructed one stands for the stack of the
/// thread that switches away from it.
class Fiber {
 public:
  Fiber() = default;
  explicit Fiber(size_t stack_bytes);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes the next switch to this fiber call `entry`, which ends by a parking switch and a return.
  /// What the stack still held is forgotten without running destructors.
  void prepare(void (*entry)());

  /// Goes on where `to` left off (or at its entry); returns when someone switches to `from`, which
  /// is the fiber that runs now. `parks`: `from` is done, and the next to switch to it has prepared
  /// it anew.
  static void switch_between(Fiber& from, Fiber& to, bool parks = false);

 private:
  static void begin(void* context_of_previous);
  static void arrived(void* context_of_previous);

  void (*entry_)() = nullptr;
  bool parked_ = false;
  void* context_ = nullptr;
  std::byte* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* tsan_fiber_ = nullptr;
};

/// Idle fibers, kept because mapping stacks costs more than most kernels. Process-wide.
class FiberPool {
 public:
  static FiberPool& instance();
  /// Adds fibers until there are `count`.
  void take(std::vector<std::unique_ptr<Fiber>>& fibers, size_t count);
  void give_back(std::vector<std::unique_ptr<Fiber>> fibers);

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Fiber>> idle_;
};

// What the sanitizers are told; nothing without them.

/// While one lives, ThreadSanitizer ignores what this fiber does: the scheduler's own bookkeeping
/// is shared by lanes that it must otherwise take for concurrent.
class IgnoredByThreadSanitizer {
 public:
#if defined(__SANITIZE_THREAD__)
  IgnoredByThreadSanitizer() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~IgnoredByThreadSanitizer() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  IgnoredByThreadSanitizer() {}  // Not defaulted: an object that is only declared is then used.
  ~IgnoredByThreadSanitizer() {}
#endif
  IgnoredByThreadSanitizer(const IgnoredByThreadSanitizer&) = delete;
  IgnoredByThreadSanitizer& operator=(const IgnoredByThreadSanitizer&) = delete;
};

/// What one lane did before the release is seen by another after the acquire.
inline void release_for_sanitizer([[maybe_unused]] void* address) {
#if defined(__SANITIZE_THREAD__)
  __tsan_release(address);
#endif
}

inline void acquire_for_sanitizer([[maybe_unused]] void* address) {
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(address);
#endif
}

inline void poison([[maybe_unused]] const std::byte* begin, [[maybe_unused]] size_t size_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(begin, size_bytes);
#endif
}

inline void unpoison([[maybe_unused]] const std::byte* begin, [[maybe_unused]] size_t size_bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(begin, size_bytes);
#endif
}

}  // namespace strata::gpu::cuda::emulator
