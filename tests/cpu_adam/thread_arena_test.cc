#include "cpu_adam/thread_arena.h"

#include <oneapi/tbb/global_control.h>
#include <sched.h>

#include <mutex>
#include <set>

#include "base/error.h"
#include "base/parallel.h"
#include "catch.h"

namespace strata::cpu_adam {
namespace {

std::vector<int> cpus_of_this_thread() {
  cpu_set_t set;
  CPU_ZERO(&set);
  REQUIRE(sched_getaffinity(0, sizeof(set), &set) == 0);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

/// The CPU sets that threads have while they work in the arena.
std::set<std::vector<int>> sets_within(ThreadArena& threads) {
  std::set<std::vector<int>> seen;
  std::mutex mutex;
  for_each_index(threads.arena(), 2000, [&](int64_t) {
    const std::vector<int> mine = cpus_of_this_thread();
    const std::lock_guard lock(mutex);
    seen.insert(mine);
  });
  return seen;
}

}  // namespace

TEST_CASE("threads run on the CPUs they are given, and the caller gets its own back") {
  const tbb::global_control more(tbb::global_control::max_allowed_parallelism, 8);
  const std::vector<int> all = cpus_of_this_thread();
  ThreadArena pinned({.count = 3, .cpus = {all.back()}});
  CHECK(pinned.arena().max_concurrency() == 3);
  CHECK(sets_within(pinned) == std::set<std::vector<int>>{{all.back()}});
  CHECK(cpus_of_this_thread() == all);

  ThreadArena free({});
  CHECK(free.arena().max_concurrency() == static_cast<int>(all.size()));
  CHECK(sets_within(free) == std::set<std::vector<int>>{all});

  ThreadArena one_each({.cpus = all});
  CHECK(one_each.arena().max_concurrency() == static_cast<int>(all.size()));
}

TEST_CASE("a nested arena leaves the outer one's CPUs as they were") {
  const std::vector<int> all = cpus_of_this_thread();
  ThreadArena outer({.count = 1, .cpus = {all.front()}});
  ThreadArena inner({.count = 1, .cpus = {all.back()}});
  outer.arena().execute([&] {
    CHECK(cpus_of_this_thread() == std::vector<int>{all.front()});
    inner.arena().execute([&] { CHECK(cpus_of_this_thread() == std::vector<int>{all.back()}); });
    CHECK(cpus_of_this_thread() == std::vector<int>{all.front()});
  });
  CHECK(cpus_of_this_thread() == all);
}

TEST_CASE("CPUs and nodes that are not there are refused") {
  CHECK_THROWS_WITH(ThreadArena({.cpus = {CPU_SETSIZE - 1}}), Catch::Contains("CPU 1023"));
  CHECK_THROWS_WITH(ThreadArena({.cpus = {-1}}), Catch::Contains("CPU -1"));
  CHECK_THROWS_WITH(ThreadArena({.numa_node = 100'000}), Catch::Contains("NUMA node 100000"));
}

TEST_CASE("a NUMA node's CPUs are those its threads run on") {
  try {
    ThreadArena node({.numa_node = 0});
    const std::set<std::vector<int>> seen = sets_within(node);
    REQUIRE(seen.size() == 1);
    CHECK(node.arena().max_concurrency() == static_cast<int>(seen.begin()->size()));
  } catch (const Error& error) {
    WARN("skipped: " << error.what());
  }
}

}  // namespace strata::cpu_adam
