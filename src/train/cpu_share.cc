#include "train/cpu_share.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace strata::train {

CpuShare cpu_share(std::span<const cpu_set_t> ranks, size_t rank, int online) {
  STRATA_CHECK(rank < ranks.size(), "a rank of this host");
  const cpu_set_t& own = ranks[rank];
  const auto sharing = std::count_if(ranks.begin(), ranks.end(), [&](const cpu_set_t& other) {
    return CPU_EQUAL(&own, &other) != 0;
  });
  CpuShare share;
  share.threads = std::max(1, CPU_COUNT(&own) / static_cast<int>(sharing));

  // All alike: what the machine or its container leaves them, and nobody has bound them.
  if (sharing == static_cast<std::ptrdiff_t>(ranks.size())) return share;
  cpu_set_t together;
  CPU_ZERO(&together);
  for (const cpu_set_t& other : ranks) CPU_OR(&together, &together, &other);
  const int bound = CPU_COUNT(&together);
  if (bound >= online) return share;
  share.note = fmt::format(
      "the launcher has bound the {} ranks of this host to {} of its {} CPUs; 'mpirun --bind-to "
      "none' leaves them all",
      ranks.size(), bound, online);
  return share;
}

}  // namespace strata::train
