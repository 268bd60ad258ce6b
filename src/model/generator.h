// Text from a model, one token after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu/device.h"
#include "model/llama.h"
#include "pipeline/executor.h"

namespace strata::model {

struct SamplingOptions {
  double temperature = 0.8;  // 0: always the likeliest token
  int64_t top_k = 0;         // draw from the k likeliest only; 0: from all
  uint64_t seed = 0;
};

/// Draws from softmax(logits / temperature), restricted to the top k. `draw` numbers the draws of a
/// text: (seed, draw, logits) decide the result. Ties go to the smaller id.
[[nodiscard]] int32_t sample(std::span<const float> logits, const SamplingOptions& options,
                             uint64_t draw);

/// The plan of an executor for a Generator: weights on the device, no training state, one document
/// of up to `context` tokens.
[[nodiscard]] pipeline::Plan generation_plan(const Llama& llama, const gpu::Operators& operators,
                                             int64_t context);

/// Continues token sequences. Of a sequence longer than the plan's context the last tokens count.
class Generator {
 public:
  /// The executor runs a generation_plan() of `llama` and holds its weights.
  Generator(const Llama& llama, pipeline::Executor& executor);

  /// The token after `tokens` (at least one).
  [[nodiscard]] int32_t next(std::span<const int32_t> tokens, const SamplingOptions& options);

 private:
  pipeline::Executor& executor_;
  int64_t context_;
  uint64_t draws_ = 0;
  std::vector<int32_t> window_, targets_, positions_;
  std::vector<float> logits_;
};

}  // namespace strata::model
