// A micro-batch of random tokens, one document a sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "base/random.h"
#include "pipeline/executor.h"

namespace strata::bench {

struct RandomBatch {
  std::vector<int32_t> tokens, targets, positions, offsets;

  /// `stream` tells batches apart; the same arguments give the same tokens.
  RandomBatch(int64_t sequences, int64_t sequence_length, int64_t vocabulary, uint64_t stream) {
    CounterRandom random(3, stream);
    const auto draw = [&] {
      return static_cast<int32_t>(random.next_below(static_cast<uint64_t>(vocabulary)));
    };
    for (int64_t i = 0; i < sequences * sequence_length; ++i) {
      tokens.push_back(draw());
      targets.push_back(draw());
      positions.push_back(static_cast<int32_t>(i % sequence_length));
    }
    for (int64_t i = 0; i <= sequences; ++i) {
      offsets.push_back(static_cast<int32_t>(i * sequence_length));
    }
  }
  [[nodiscard]] pipeline::HostMicroBatch view() const {
    return {tokens, targets, positions, offsets};
  }
};

}  // namespace strata::bench
