// Whole runs on the emulated CUDA device.

#include <cmath>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/random.h"
#include "catch.h"
#include "cuda_emulator/emulator.h"
#include "temporary_directory.h"
#include "train/checkpoint.h"
#include "train/trainer.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
namespace emulator = gpu::cuda::emulator;
using Catch::Matchers::Contains;

class Losses final : public TrainObserver {
 public:
  void planned(const RunSummary& run) override { device = run.device.kind(); }
  void stepped(const TrainMetrics& metrics) override { losses.push_back(metrics.loss); }
  void evaluated(const EvalMetrics& metrics) override { losses.push_back(metrics.eval_loss); }
  void saved(const fs::path& /*checkpoint*/) override {
    if (on_saved) on_saved();
  }
  void noted(std::string_view message) override { notes.emplace_back(message); }

  std::function<void()> on_saved;
  std::string device;
  std::vector<double> losses;
  std::vector<std::string> notes;
};

/// A tiny model and a text to train it on for four steps.
class Bench {
 public:
  Bench() {
    emulator::reset({.memory_bytes = 256 * kMiB, .print_diagnoses = false});
    std::ofstream(directory_.path("config.json"))
        << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "torch_dtype": "float32"})";
    std::ofstream text(directory_.path("text.txt"));
    CounterRandom random(3, 0);
    constexpr std::string_view kWords[] = {"the ", "lord ", "said ", "unto ", "moses ", "and "};
    for (int i = 0; i < 500; ++i) text << kWords[random.next_below(6)];
  }
  ~Bench() { emulator::reset(); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  [[nodiscard]] TrainConfig config(const std::string& name) const {
    TrainConfig config;
    config.model = directory_.path(".");
    config.datasets = {{directory_.path("text.txt")}};
    config.output_dir = output(name).string();
    config.val_set_size = 0.05;
    config.eval_max_batches = 1;
    config.sequence_len = 24;
    config.micro_batch_size = 2;
    config.max_steps = 4;
    config.save_steps = 2;
    config.learning_rate = 1e-2;
    config.max_grad_norm = 0.9;
    config.threads = 2;
    return config;
  }
  [[nodiscard]] fs::path output(const std::string& name) const { return directory_.path(name); }
  [[nodiscard]] std::string state(const std::string& name) const {
    return read_text_file(checkpoint_state_file(checkpoint_path(output(name), 4)));
  }

 private:
  TemporaryDirectory directory_;
};

Losses run(const TrainConfig& config) {
  Losses losses;
  static_cast<void>(train(config, losses, [] { return false; }));
  return losses;
}

}  // namespace

TEST_CASE("a run on cuda is the same wherever state rests, and near the host's", "[cuda]") {
  const Bench bench;
  TrainConfig config = bench.config("resident");
  config.offload = OffloadChoice::kNone;
  const Losses resident = run(config);
  CHECK(resident.device == "cuda");  // which is what auto takes
  CHECK(resident.losses.size() == 5);

  config = bench.config("offloaded");
  config.device = DeviceChoice::kCuda;
  config.offload = OffloadChoice::kHost;
  config.weight_slots = 1;
  CHECK(run(config).losses == resident.losses);
  CHECK(bench.state("offloaded") == bench.state("resident"));

  config = bench.config("host");
  config.device = DeviceChoice::kHost;
  const Losses host = run(config);
  CHECK(host.device == "host");
  for (size_t i = 0; i < resident.losses.size(); ++i) {
    CHECK(std::abs(resident.losses[i] - host.losses[i]) <= 0x1p-8 * host.losses[i]);
  }
}

TEST_CASE("a run whose device is lost goes on from its checkpoint to the same bits", "[cuda]") {
  const Bench bench;
  TrainConfig config = bench.config("whole");
  config.offload = OffloadChoice::kHost;
  static_cast<void>(run(config));

  config.output_dir = bench.output("lost").string();
  Losses losses;
  losses.on_saved = [] {  // in the middle of the step after the first checkpoint
    emulator::fail_next(emulator::Call::kExecution, 100, cudaErrorECCUncorrectable);
  };
  try {
    static_cast<void>(train(config, losses, [] { return false; }));
    FAIL("the run did not notice");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kFailed);
    CHECK_THAT(error.what(), Contains("lost") && Contains("cudaErrorECCUncorrectable"));
  }
  REQUIRE(list_checkpoints(config.output_dir).size() == 1);

  emulator::reset({.memory_bytes = 256 * kMiB, .print_diagnoses = false});
  config.resume = "auto";
  static_cast<void>(run(config));
  CHECK(bench.state("lost") == bench.state("whole"));
}

TEST_CASE("a run that a cuda device has no room for is refused before anything is written",
          "[cuda]") {
  const Bench bench;
  emulator::reset({.memory_bytes = 256 * kMiB, .occupied_bytes = 247 * kMiB});
  TrainConfig config = bench.config("full");
  config.device = DeviceChoice::kCuda;
  try {
    static_cast<void>(run(config));
    FAIL("it had room");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDoesNotFit);
    CHECK_THAT(error.what(), Contains("device memory"));
  }
  CHECK_FALSE(fs::exists(config.output_dir));
}

TEST_CASE("a run without a cuda device says so once and takes the host", "[cuda]") {
  const Bench bench;
  emulator::reset({.driver_present = false});
  TrainConfig config = bench.config("without");
  config.max_steps = 1;
  const Losses losses = run(config);
  CHECK(losses.device == "host");
  REQUIRE_FALSE(losses.notes.empty());
  CHECK_THAT(losses.notes.front(), Contains("no NVIDIA driver"));
  config.output_dir = bench.output("chosen").string();
  config.device = DeviceChoice::kCuda;
  CHECK_THROWS_WITH(run(config), Contains("device: cuda") && Contains("no NVIDIA driver"));
}

}  // namespace strata::train
