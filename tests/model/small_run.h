// A small model trained for some steps, and all that came of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "model/test_batch.h"
#include "model/weights.h"

namespace strata::model {

inline LlamaConfig small_config(bool tied) {
  LlamaConfig config;
  config.hidden_size = 48;
  config.intermediate_size = 72;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.vocab_size = 131;
  config.tie_word_embeddings = tied;
  return config;
}

/// All that a run computed.
struct Trajectory {
  std::vector<double> losses, norms, eval_losses;
  std::vector<std::vector<std::byte>> state;
  int clipped = 0, replayed = 0;
  /// All but how it was come by: what was replayed, and gradients, which not all placements keep.
  bool operator==(const Trajectory& other) const {
    return losses == other.losses && norms == other.norms && eval_losses == other.eval_losses &&
           state == other.state && clipped == other.clipped;
  }
};

/// Of its blocks two have more than one part of 32768 parameters.
inline LlamaConfig parted_config(bool tied) {
  LlamaConfig config = small_config(tied);
  config.hidden_size = 96;
  config.intermediate_size = 232;
  config.num_hidden_layers = 3;
  config.head_dim = 16;
  config.vocab_size = 401;
  return config;
}

/// Trains on random documents of four lengths in each of three micro-batches. Some steps are
/// clipped, and the gradient of one is made infinite.
inline Trajectory train_small(gpu::Device& device, const LlamaConfig& config,
                              const pipeline::Placement& placement, int steps, int threads,
                              DType dtype = DType::kBf16, const pipeline::NvmeOptions& nvme = {}) {
  using pipeline::StateKind;
  constexpr int64_t kMicroBatches = 3;
  const std::vector<int32_t> lengths{19, 1, 33, 11};
  const Llama llama(config, dtype, 64);
  pipeline::Executor executor(
      device, llama,
      pipeline::build_plan(llama, device.operators(),
                           {.micro_batches = kMicroBatches, .tokens = 64, .max_sequences = 5},
                           placement),
      {.cpu_threads = threads, .nvme = nvme});
  initialize_weights(5, llama, executor);
  Trajectory trajectory;
  constexpr int kBadStep = 11;
  int64_t optimizer_steps = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<TestBatch> batches;
    std::vector<pipeline::HostMicroBatch> views;
    int64_t unmasked = 0;
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      batches.push_back(TestBatch::random(lengths, config.vocab_size,
                                          static_cast<uint64_t>(step * kMicroBatches + m)));
      unmasked += batches.back().unmasked();
    }
    for (const TestBatch& batch : batches) views.push_back(batch.view());
    constexpr double kMaxNorm = 0.65;
    const pipeline::StepResult result =
        executor.train_step(views,
                            step == kBadStep ? std::numeric_limits<float>::infinity()
                                             : 1.0F / static_cast<float>(unmasked),
                            {.hyper = {.learning_rate = 3e-3, .weight_decay = 0.1},
                             .step = optimizer_steps + 1,
                             .max_grad_norm = kMaxNorm,
                             .seed = 11});
    trajectory.losses.push_back(result.loss_sum);
    optimizer_steps += result.finite;
    trajectory.norms.push_back(result.finite ? result.gradient_norm : -1);
    trajectory.clipped += result.clipped;
    trajectory.replayed += result.replayed;
    if (step % 7 == 3) trajectory.eval_losses.push_back(executor.evaluate(views));
  }
  for (const StateKind kind :
       {StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1, StateKind::kMoment2}) {
    trajectory.state.push_back(state_of(llama, executor, kind));
  }
  return trajectory;
}

}  // namespace strata::model
