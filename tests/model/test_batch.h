// Micro-batches and executors for tests of a Llama.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/random.h"
#include "gpu/host/host_device.h"
#include "model/llama.h"
#include "pipeline/executor.h"

namespace strata::model {

/// Owns the arrays of one micro-batch.
struct TestBatch {
  std::vector<int32_t> tokens, targets, positions, offsets{0};

  /// Documents of the given lengths with random tokens, small ones more often (so that there is
  /// something to learn); about one target in eight is masked.
  static TestBatch random(const std::vector<int32_t>& lengths, int64_t vocabulary,
                          uint64_t stream) {
    TestBatch batch;
    CounterRandom random(17, stream);
    const auto draw = [&](int64_t bound) {
      return static_cast<int32_t>(random.next_below(static_cast<uint64_t>(bound)));
    };
    const auto token = [&] {
      return std::min({draw(vocabulary), draw(vocabulary), draw(vocabulary)});
    };
    for (const int32_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) {
        batch.tokens.push_back(token());
        batch.targets.push_back(draw(8) == 0 ? -1 : token());
        batch.positions.push_back(i);
      }
      batch.offsets.push_back(batch.offsets.back() + length);
    }
    return batch;
  }

  [[nodiscard]] pipeline::HostMicroBatch view() const {
    return {tokens, targets, positions, offsets};
  }
  [[nodiscard]] int64_t unmasked() const {
    int64_t sum = 0;
    for (const int32_t target : targets) sum += target >= 0;
    return sum;
  }
};

/// All bytes of one kind of state of all units, one after the other.
inline std::vector<std::byte> state_of(const Llama& llama, pipeline::Executor& executor,
                                       pipeline::StateKind kind) {
  std::vector<std::byte> all;
  for (int unit = 0; unit < static_cast<int>(llama.units().size()); ++unit) {
    const size_t size = executor.state_size_bytes(unit, kind);
    if (size == 0) continue;
    const size_t at = all.size();
    all.resize(at + size);
    executor.read_state(unit, kind, 0, std::span(all).subspan(at));
  }
  return all;
}

}  // namespace strata::model
