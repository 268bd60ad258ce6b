#include "comm/communicator.h"

namespace strata::comm {

std::string_view name_of(Collective collective) noexcept {
  constexpr std::array<std::string_view, kCollectives> names{"all-gather", "reduce-scatter",
                                                             "all-reduce", "broadcast"};
  return names[static_cast<size_t>(collective)];
}

size_t collective_bytes(Collective collective, size_t size_bytes, int ranks) noexcept {
  if (ranks <= 1) return 0;
  if (collective == Collective::kBroadcast) return size_bytes;
  const auto count = static_cast<size_t>(ranks);
  const size_t once = size_bytes / count * (count - 1) + size_bytes % count * (count - 1) / count;
  return collective == Collective::kAllReduce ? 2 * once : once;
}

}  // namespace strata::comm
