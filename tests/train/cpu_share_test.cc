#include "train/cpu_share.h"

#include <catch2/catch.hpp>
#include <initializer_list>
#include <vector>

namespace strata::train {
namespace {

cpu_set_t cpus(int first, int count) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu = first; cpu < first + count; ++cpu) CPU_SET(cpu, &set);
  return set;
}

TEST_CASE("ranks that nobody has bound share a host's CPUs") {
  const std::vector<cpu_set_t> ranks(3, cpus(0, 16));
  for (size_t rank = 0; rank < 3; ++rank) {
    CHECK(cpu_share(ranks, rank, 16).threads == 5);
    CHECK(cpu_share(ranks, rank, 16).note.empty());
  }
  // More ranks than CPUs.
  CHECK(cpu_share(std::vector<cpu_set_t>(3, cpus(0, 2)), 1, 2).threads == 1);
  // In a container that has a part of the host's.
  CHECK(cpu_share(ranks, 0, 64).threads == 5);
  CHECK(cpu_share(ranks, 0, 64).note.empty());
}

TEST_CASE("ranks bound to CPUs of their own have those") {
  // A socket for two of them.
  const std::vector<cpu_set_t> sockets = {cpus(0, 32), cpus(0, 32), cpus(32, 32), cpus(32, 32)};
  CHECK(cpu_share(sockets, 0, 64).threads == 16);
  CHECK(cpu_share(sockets, 3, 64).threads == 16);
  CHECK(cpu_share(sockets, 0, 64).note.empty());
}

TEST_CASE("ranks bound to less than the host has are told") {
  const std::vector<cpu_set_t> cores = {cpus(0, 1), cpus(1, 1)};
  CHECK(cpu_share(cores, 1, 64).threads == 1);
  CHECK(cpu_share(cores, 1, 64).note ==
        "the launcher has bound the 2 ranks of this host to 2 of its 64 CPUs; 'mpirun --bind-to "
        "none' leaves them all");
  CHECK(cpu_share(cores, 0, 2).note.empty());
}

}  // namespace
}  // namespace strata::train
