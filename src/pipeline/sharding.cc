#include "pipeline/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"

namespace strata::pipeline {

std::string_view name_of(Sharding sharding) noexcept {
  constexpr std::array<std::string_view, kShardings> names{
      "no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard"};
  return names[static_cast<size_t>(sharding)];
}

RankLayout RankLayout::of(Sharding sharding, int ranks, int group, DType reduce_dtype) {
  STRATA_CHECK(ranks >= 1, "at least one rank");
  RankLayout layout{.sharding = sharding, .ranks = ranks, .reduce_dtype = reduce_dtype};
  if (sharding == Sharding::kHybridShard) {
    if (group < 1 || ranks % group != 0) {
      throw usage_error(fmt::format(
          "hybrid_shard cannot divide {} ranks into groups of {}; choose a divisor", ranks, group));
    }
    layout.shard_ranks = group;
  } else if (sharding != Sharding::kNoShard) {
    layout.shard_ranks = ranks;
  }
  return layout;
}

int64_t shard_elements(int64_t parameter_count, int shard_ranks,
                       cpu_adam::MomentFormat moments) noexcept {
  if (shard_ranks <= 1) return parameter_count;
  const int64_t unit = moments == cpu_adam::MomentFormat::kF32 ? 64 : cpu_adam::kChunkElements;
  const int64_t least = (parameter_count + shard_ranks - 1) / shard_ranks;
  return (least + unit - 1) / unit * unit;
}

ElementRange shard_range(int64_t parameter_count, int shard_ranks, int shard_rank,
                         cpu_adam::MomentFormat moments) noexcept {
  const int64_t each = shard_elements(parameter_count, shard_ranks, moments);
  const int64_t first = std::min(parameter_count, each * shard_rank);
  return {first, std::min(parameter_count, first + each) - first};
}

}  // namespace strata::pipeline
