// How many of a host's CPUs each of its ranks has.
#pragma once

#include <sched.h>

#include <span>
#include <string>

namespace strata::train {

struct CpuShare {
  int threads = 1;  // as many CPUs as the rank has for itself
  std::string
      note;  // one sentence, where a launcher has bound ranks to a part of the host; or none
};

/// `ranks` are the CPUs that each rank of this host may use (sched_getaffinity), in order of ranks;
/// `rank` is the place of this one among them, and `online` how many CPUs the host has. Ranks that
/// may use the same CPUs share them equally.
[[nodiscard]] CpuShare cpu_share(std::span<const cpu_set_t> ranks, size_t rank, int online);

}  // namespace strata::train
