// How the state of a model is divided among ranks (ZeRO), and which part of a unit is a rank's.
//
// Ranks form shard groups: each group of `shard_ranks` holds the whole state once, a rank of it the
// same 1/shard_ranks of every unit. Groups are replicas of each other. Ranks of one shard group are
// consecutive: rank = replica * shard_ranks + shard rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "cpu_adam/moments.h"

namespace strata::pipeline {

enum class Sharding : uint8_t {
  kNoShard,         // no_shard: every rank holds everything (DDP)
  kShardOptimizer,  // shard_optimizer: ZeRO-1
  kShardGradOp,     // shard_grad_op: ZeRO-2
  kFullShard,       // full_shard: ZeRO-3
  kHybridShard,     // hybrid_shard: full_shard in a group, replicated over groups
};
inline constexpr size_t kShardings = 5;
[[nodiscard]] std::string_view name_of(Sharding sharding) noexcept;

/// How many ranks there are and what each holds; the same on all of them.
struct RankLayout {
  Sharding sharding = Sharding::kNoShard;
  int ranks = 1;
  int shard_ranks = 1;  // divides `ranks`: 1 with kNoShard, `ranks` with the next three
  /// What gradients are summed over ranks in.
  DType reduce_dtype = DType::kF32;

  /// `group`: ranks of a shard group of kHybridShard, not used by the others. Throws a usage error
  /// where it does not divide the ranks.
  [[nodiscard]] static RankLayout of(Sharding sharding, int ranks, int group = 1,
                                     DType reduce_dtype = DType::kF32);
  [[nodiscard]] int replicas() const noexcept { return ranks / shard_ranks; }
  /// Whether each rank keeps whole weights from forward to backward (on the device), or gathers
  /// them again.
  [[nodiscard]] bool keeps_whole_weights() const noexcept {
    return sharding == Sharding::kShardOptimizer || sharding == Sharding::kShardGradOp;
  }
  friend bool operator==(const RankLayout&, const RankLayout&) = default;
};

/// Elements of a unit that are a rank's.
struct ElementRange {
  int64_t first = 0;
  int64_t count = 0;
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

/// Elements that one rank of a shard group holds of a unit, padding included: the same on every
/// rank. A multiple of 64, and with moments that round stochastically of
/// cpu_adam::kChunkElements, so that blocks and random numbers do not depend on the number of
/// ranks. With one rank: `parameter_count`.
[[nodiscard]] int64_t shard_elements(int64_t parameter_count, int shard_ranks,
                                     cpu_adam::MomentFormat moments) noexcept;
/// What is not padding of the `shard_rank`th's; may be empty.
[[nodiscard]] ElementRange shard_range(int64_t parameter_count, int shard_ranks, int shard_rank,
                                       cpu_adam::MomentFormat moments) noexcept;

}  // namespace strata::pipeline
