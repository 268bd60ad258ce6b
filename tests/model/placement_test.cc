// Where state lives never changes what is learned.

#include <cmath>

#include "catch.h"
#include "model/test_batch.h"
#include "model/weights.h"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::StateKind;
using pipeline::Tier;

constexpr int64_t kMicroBatches = 3;
constexpr int kSteps = 20;
const std::vector<int32_t> kLengths{19, 1, 33, 11};

LlamaConfig small_config(bool tied) {
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
  std::vector<double> losses, squares, eval_losses;
  std::vector<std::vector<std::byte>> state;
  int clipped = 0;
  bool operator==(const Trajectory&) const = default;
};

Trajectory train(const LlamaConfig& config, const Placement& placement, int threads,
                 const gpu::HostDeviceOptions& links = {}) {
  gpu::HostDeviceOptions options = links;
  options.threads = threads;
  const auto device = gpu::create_host_device(options);
  const Llama llama(config, DType::kBf16, 64);
  pipeline::Executor executor(
      *device, llama,
      pipeline::build_plan(llama, device->operators(),
                           {.micro_batches = kMicroBatches, .tokens = 64, .max_sequences = 5},
                           placement),
      threads);
  initialize_weights(5, llama, executor);
  Trajectory trajectory;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<TestBatch> batches;
    std::vector<pipeline::HostMicroBatch> views;
    int64_t unmasked = 0;
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      batches.push_back(TestBatch::random(kLengths, config.vocab_size,
                                          static_cast<uint64_t>(step * kMicroBatches + m)));
      unmasked += batches.back().unmasked();
    }
    for (const TestBatch& batch : batches) views.push_back(batch.view());
    const auto result = executor.forward_backward(views, 1.0F / static_cast<float>(unmasked));
    trajectory.losses.push_back(result.loss_sum);
    trajectory.squares.push_back(result.sum_of_squares);
    const double norm = std::sqrt(result.sum_of_squares);
    constexpr double kMaxNorm = 0.65;
    trajectory.clipped += norm > kMaxNorm;
    executor.set_pending_update(cpu_adam::step_constants(
        {.learning_rate = 3e-3, .weight_decay = 0.1}, step + 1, std::min(1.0, kMaxNorm / norm)));
    if (step % 7 == 3) trajectory.eval_losses.push_back(executor.evaluate(views));
  }
  for (const StateKind kind : {StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1,
                               StateKind::kMoment2, StateKind::kGradient}) {
    trajectory.state.push_back(state_of(llama, executor, kind));
  }
  return trajectory;
}

}  // namespace

TEST_CASE("placements, slots and threads give the same bits over twenty steps") {
  const bool tied = GENERATE(false, true);
  const LlamaConfig config = small_config(tied);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const Trajectory resident = train(config, Placement::all_on(Tier::kDevice, units), 2);
  REQUIRE(resident.losses.back() < resident.losses.front());
  REQUIRE(resident.clipped > 0);
  REQUIRE(resident.clipped < kSteps);

  for (const int slots : {1, 2, 3}) {
    INFO("tied " << tied << ", slots " << slots);
    CHECK(train(config, Placement::all_on(Tier::kHost, units, slots), 2) == resident);
  }
  Placement mixed = Placement::all_on(Tier::kHost, units, 2);
  mixed.unit_home[0] = mixed.unit_home[3] = mixed.unit_home[units - 1] = Tier::kDevice;
  CHECK(train(config, mixed, 1) == resident);
  // A slow link changes when things happen, not what.
  CHECK(train(config, Placement::all_on(Tier::kHost, units, 1), 3,
              {.upload_bytes_per_second = 40e6, .download_bytes_per_second = 20e6}) == resident);
}

}  // namespace strata::model
