#include <chrono>
#include <cmath>

#include "bench/lanes.h"
#include "bench/matmul_peak.h"
#include "bench/random_batch.h"
#include "model/llama.h"
#include "model/weights.h"
#include "pipeline/executor.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;

// Held fixed, and the same in bench/peer_torch.py, so that figures can be compared over time.
constexpr int64_t kSequence = 512;
constexpr int64_t kSequences = 8;
constexpr int64_t kMicroBatches = 1;
constexpr int64_t kTokens = kSequence * kSequences;

model::LlamaConfig fixed_model() {
  model::LlamaConfig config;
  config.hidden_size = 1024;
  config.intermediate_size = 2816;
  config.num_hidden_layers = 8;
  config.num_attention_heads = 16;
  config.num_key_value_heads = 16;
  config.head_dim = 64;
  config.vocab_size = 32000;
  return config;
}

/// What one optimizer step multiplies and adds in matrix products.
double step_flops(const model::Llama& llama) {
  const auto units = static_cast<int>(llama.units().size());
  double flops =
      llama.matmul_flops(units - 1, pipeline::Pass::kLossAndBackward, kTokens, kSequence);
  for (int unit = 0; unit + 1 < units; ++unit) {
    flops += llama.matmul_flops(unit, pipeline::Pass::kForward, kTokens, kSequence);
    flops += llama.matmul_flops(unit, pipeline::Pass::kBackward, kTokens, kSequence);
  }
  return flops * static_cast<double>(kMicroBatches);
}

}  // namespace

std::vector<Row> run_step(gpu::Device& device, const Options& options) {
  const model::Llama llama(fixed_model(), DType::kBf16, kSequence);
  const auto units = llama.units().size();
  const pipeline::StepShape shape{
      .micro_batches = kMicroBatches, .tokens = kTokens, .max_sequences = kSequences};
  pipeline::Executor executor(
      device, llama,
      pipeline::build_plan(llama, device.operators(), shape,
                           pipeline::Placement::all_on(pipeline::Tier::kDevice, units)),
      {.cpu_threads = options.threads});
  model::initialize_weights(1, llama, executor);
  std::vector<RandomBatch> batches;
  std::vector<pipeline::HostMicroBatch> views;
  for (int64_t m = 0; m < kMicroBatches; ++m) {
    batches.emplace_back(kSequences, kSequence, llama.vocabulary(), static_cast<uint64_t>(m));
  }
  for (const RandomBatch& batch : batches) views.push_back(batch.view());

  std::vector<MatmulTimer> peaks;
  peaks.emplace_back(device, MatmulShape{"cube 2048", 2048, 2048, 2048, false, true, DType::kBf16});
  peaks.emplace_back(device,
                     MatmulShape{"forward gate+up", 4096, 5632, 1024, false, true, DType::kBf16});
  std::vector<std::vector<double>> peak_rates(peaks.size());

  constexpr double kTokensOfStep = static_cast<double>(kMicroBatches * kTokens);
  std::vector<double> speeds;
  int64_t wrong = 0;
  double first_loss = 0;
  double last_loss = 0;
  for (int step = 0; step <= options.repetitions; ++step) {
    const auto start = Clock::now();
    const pipeline::StepResult result =
        executor.train_step(views, static_cast<float>(1 / kTokensOfStep),
                            {.hyper = {.learning_rate = 3e-4, .weight_decay = 0.1},
                             .step = step + 1,
                             .max_grad_norm = 1});
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    last_loss = result.loss_sum / kTokensOfStep;
    if (step == 0) first_loss = last_loss;
    if (!std::isfinite(last_loss) || !result.finite) ++wrong;
    // The first step has no update before it, and warms up.
    if (step > 0) speeds.push_back(kTokensOfStep / seconds);
    for (size_t i = 0; i < peaks.size(); ++i) {
      for (int j = 0; j < 3; ++j) {
        const double rate = peaks[i].run();
        if (step > 0) peak_rates[i].push_back(rate / 1e9);
      }
    }
  }
  executor.finish_update();
  // An untrained model knows nothing, and a trained one has learned the batch it saw each time.
  const double uniform = std::log(static_cast<double>(llama.vocabulary()));
  if (std::abs(first_loss - uniform) > 0.5) ++wrong;
  if (!(last_loss < first_loss)) ++wrong;

  std::vector<Row> rows;
  double ceiling = 0;
  for (size_t i = 0; i < peaks.size(); ++i) {
    rows.push_back(summarize("matmul/" + peaks[i].shape().name, "GFLOP/s", peak_rates[i]));
    rows.back().wrong = peaks[i].count_wrong();
    ceiling = std::max(ceiling, rows.back().median);
  }
  Row tokens = summarize("step/tokens", "tokens/s", speeds);
  tokens.wrong = wrong;
  std::vector<double> rates = speeds;
  for (double& rate : rates) rate *= step_flops(llama) / kTokensOfStep / 1e9;
  Row flops = summarize("step/flops", "GFLOP/s", rates);
  flops.of_ceiling = flops.median / ceiling;
  flops.wrong = wrong;
  rows.push_back(std::move(tokens));
  rows.push_back(std::move(flops));
  return rows;
}

}  // namespace strata::bench
