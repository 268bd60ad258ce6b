// Runs of a tiny model, and what came of them.
#pragma once

#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "base/random.h"
#include "temporary_directory.h"
#include "train/checkpoint.h"
#include "train/trainer.h"

namespace strata::train {

namespace fs = std::filesystem;

class Recorder final : public TrainObserver {
 public:
  void planned(const RunSummary& run) override {
    first_step = run.first_step;
    tier_bytes = run.plan.tier_bytes;
    device = &run.device;
    free_when_planned = device->free_memory_bytes();
  }
  void began() override { free_when_begun = device->free_memory_bytes(); }
  void stepped(const TrainMetrics& metrics) override {
    steps.push_back(metrics);
    if (metrics.step == crash_after) throw Crash();
  }
  void evaluated(const EvalMetrics& metrics) override { evals.push_back(metrics); }
  void saved(const fs::path& checkpoint) override { checkpoints.push_back(checkpoint); }
  void noted(std::string_view message) override { notes.emplace_back(message); }

  /// Ends the run as if its process had been killed after that step, or nearly so: what it holds is
  /// closed, and nothing is saved.
  struct Crash {};
  int64_t crash_after = -1;

  const gpu::Device* device = nullptr;  // while the run lasts
  int64_t first_step = -1;
  std::array<size_t, pipeline::kTiers.size()> tier_bytes{};
  size_t free_when_planned = 0, free_when_begun = 0;  // of the device's memory
  std::vector<TrainMetrics> steps;
  std::vector<EvalMetrics> evals;
  std::vector<fs::path> checkpoints;
  std::vector<std::string> notes;
};

/// A directory with a tiny model's config and a text, and a configuration to train the one on the
/// other for ten steps of accumulated micro-batches.
class Bench {
 public:
  Bench() {
    std::ofstream(directory_.path("config.json"))
        << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
              "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "torch_dtype": "float32"})";
    std::ofstream text(directory_.path("text.txt"));
    CounterRandom random(3, 0);
    constexpr std::string_view kWords[] = {"the ", "lord ", "said ", "unto ", "moses ", "and "};
    for (int i = 0; i < 900; ++i) text << kWords[random.next_below(6)];
  }

  [[nodiscard]] TrainConfig config(const std::string& name) const {
    TrainConfig config;
    config.model = directory_.path(".");
    config.datasets = {{directory_.path("text.txt")}};
    config.output_dir = output(name).string();
    config.val_set_size = 0.1;
    config.sequence_len = 24;
    config.micro_batch_size = 2;
    config.gradient_accumulation_steps = 2;
    config.max_steps = 10;
    config.learning_rate = 1e-2;
    config.warmup_steps = 2;
    config.max_grad_norm = 0.9;
    config.threads = 2;
    return config;
  }
  [[nodiscard]] fs::path output(const std::string& name) const { return directory_.path(name); }

 private:
  TemporaryDirectory directory_;
};

inline TrainOutcome run(const TrainConfig& config, Recorder& recorder, int64_t stop_after = 1000) {
  return train(config, recorder,
               [&] { return static_cast<int64_t>(recorder.steps.size()) >= stop_after; });
}

inline std::vector<double> losses(const Recorder& recorder) {
  std::vector<double> list;
  for (const TrainMetrics& step : recorder.steps) list.push_back(step.loss);
  return list;
}

inline std::vector<double> norms(const Recorder& recorder) {
  std::vector<double> list;
  for (const TrainMetrics& step : recorder.steps) list.push_back(step.grad_norm);
  return list;
}

inline std::string bytes_of(const fs::path& checkpoint) {
  return read_text_file(checkpoint_state_file(checkpoint));
}

}  // namespace strata::train
