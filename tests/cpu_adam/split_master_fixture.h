// The split master's round trip, for the test of some patterns and the slow one of all.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/bf16.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/adam_fixture.h"

namespace strata::cpu_adam {

/// Parameters without gradient, moments and decay, which a step does not move.
class StillParameters {
 public:
  StillParameters(size_t count, DType gradient_dtype, MomentFormat format)
      : state_(count, DType::kBf16, format), gradient_(count, gradient_dtype) {}

  /// How many of `count` fp32 patterns do not come back: from split and join, and, where finite,
  /// from a step.
  size_t count_wrong(const std::vector<uint32_t>& patterns) {
    size_t wrong = 0;
    for (size_t i = 0; i < patterns.size(); ++i) {
      const SplitMaster split = split_master(std::bit_cast<float>(patterns[i]));
      wrong += std::bit_cast<uint32_t>(join_master(split)) != patterns[i];
      state_.weight16[i] = split.weight.bits;
      state_.residual[i] = split.residual;
    }
    const Segment segment{static_cast<int64_t>(patterns.size()), false};
    const Shard shard = make_shard(gradient_, state_, state_);
    for (int64_t chunk = 0; chunk < chunk_count(shard); ++chunk) {
      update_chunk(shard, chunk, {&segment, 1}, constants_);
    }
    for (size_t i = 0; i < patterns.size(); ++i) {
      const SplitMaster split = split_master(std::bit_cast<float>(patterns[i]));
      const bool is_finite = std::isfinite(std::bit_cast<float>(patterns[i]));
      wrong += is_finite &&
               (state_.weight16[i] != split.weight.bits || state_.residual[i] != split.residual);
    }
    return wrong;
  }

 private:
  State state_;
  Gradient gradient_;
  StepConstants constants_ = step_constants({}, 1, 1);
};

}  // namespace strata::cpu_adam
