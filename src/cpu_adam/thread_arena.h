// The threads of the optimizer: how many, and on which CPUs.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include <memory>
#include <vector>

namespace strata::cpu_adam {

struct ThreadOptions {
  int count = 0;            // the calling thread among them; 0: one for each CPU it may run on
  int numa_node = -1;       // only on this node's CPUs; -1: any
  std::vector<int> cpus{};  // only on these; empty: any
};

/// A oneTBB arena whose threads run on given CPUs for as long as they work in it, the calling
/// thread among them; it gets its own set back when it leaves. State is read fastest from the
/// node's own memory: place it there before (first touch by these threads).
class ThreadArena {
 public:
  /// Throws a usage error for a node that is not there, and for CPUs that this process may not use.
  explicit ThreadArena(const ThreadOptions& options);
  ~ThreadArena();
  ThreadArena(const ThreadArena&) = delete;
  ThreadArena& operator=(const ThreadArena&) = delete;

  [[nodiscard]] tbb::task_arena& arena() noexcept { return arena_; }

 private:
  class Pinning;
  tbb::task_arena arena_;
  std::unique_ptr<Pinning> pinning_;
};

}  // namespace strata::cpu_adam
