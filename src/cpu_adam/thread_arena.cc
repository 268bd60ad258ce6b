#include "cpu_adam/thread_arena.h"

#include <fmt/format.h>
#include <numa.h>
#include <oneapi/tbb/task_scheduler_observer.h>
#include <sched.h>

#include "base/error.h"

namespace strata::cpu_adam {
namespace {

cpu_set_t allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) throw failure("cannot tell this thread's CPUs");
  return set;
}

cpu_set_t cpus_of_node(int node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  bitmask* mask = numa_available() < 0 ? nullptr : numa_allocate_cpumask();
  const bool found =
      mask != nullptr && node <= numa_max_node() && numa_node_to_cpus(node, mask) == 0;
  for (unsigned cpu = 0; found && cpu < CPU_SETSIZE; ++cpu) {
    if (cpu < mask->size && numa_bitmask_isbitset(mask, cpu) != 0) CPU_SET(cpu, &set);
  }
  if (mask != nullptr) numa_free_cpumask(mask);
  if (!found) throw usage_error(fmt::format("there is no NUMA node {} on this machine", node));
  return set;
}

/// The CPUs that the options leave of those this thread may run on.
cpu_set_t chosen_cpus(const ThreadOptions& options) {
  cpu_set_t set = allowed_cpus();
  if (options.numa_node >= 0) {
    const cpu_set_t node = cpus_of_node(options.numa_node);
    CPU_AND(&set, &set, &node);
  }
  if (!options.cpus.empty()) {
    cpu_set_t asked;
    CPU_ZERO(&asked);
    for (const int cpu : options.cpus) {
      if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(static_cast<size_t>(cpu), &set)) {
        throw usage_error(
            fmt::format("CPU {} cannot be used: it is not among those that this process and the "
                        "NUMA node allow",
                        cpu));
      }
      CPU_SET(static_cast<size_t>(cpu), &asked);
    }
    set = asked;
  }
  if (CPU_COUNT(&set) == 0) throw usage_error("no CPU is left to run the optimizer's threads on");
  return set;
}

int thread_count(const ThreadOptions& options) {
  const cpu_set_t set = chosen_cpus(options);
  return options.count > 0 ? options.count : CPU_COUNT(&set);
}

}  // namespace

/// Moves threads to the chosen CPUs as they come into the arena, and back as they leave.
class ThreadArena::Pinning final : public tbb::task_scheduler_observer {
 public:
  Pinning(tbb::task_arena& arena, const cpu_set_t& cpus)
      : tbb::task_scheduler_observer(arena), cpus_(cpus) {
    observe(true);
  }
  ~Pinning() override { observe(false); }

  void on_scheduler_entry(bool /*is_worker*/) override {
    cpu_set_t before;
    CPU_ZERO(&before);
    sched_getaffinity(0, sizeof(before), &before);
    before_.push_back(before);
    sched_setaffinity(0, sizeof(cpus_), &cpus_);
  }
  void on_scheduler_exit(bool /*is_worker*/) override {
    if (before_.empty()) return;
    sched_setaffinity(0, sizeof(cpu_set_t), &before_.back());
    before_.pop_back();
  }

 private:
  cpu_set_t cpus_;
  static thread_local std::vector<cpu_set_t> before_;  // arenas nest
};

thread_local std::vector<cpu_set_t> ThreadArena::Pinning::before_;

ThreadArena::ThreadArena(const ThreadOptions& options) : arena_(thread_count(options)) {
  if (options.numa_node < 0 && options.cpus.empty()) return;
  pinning_ = std::make_unique<Pinning>(arena_, chosen_cpus(options));
}

ThreadArena::~ThreadArena() = default;

}  // namespace strata::cpu_adam
