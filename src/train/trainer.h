// A training run from configuration to last checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include "gpu/device.h"
#include "model/llama.h"
#include "pipeline/step_graph.h"
#include "train/config.h"
#include "train/metrics.h"

namespace strata::train {

/// What is known of a run before anything is allocated or written.
struct RunSummary {
  const gpu::Device& device;
  const model::Llama& llama;
  const pipeline::Plan& plan;
  size_t data_bytes = 0;  // of host memory, for the order and one window of the data
  int64_t max_steps = 0;
  int64_t train_windows = 0;
  int64_t eval_windows = 0;
  int64_t first_step = 0;  // taken by the run that this one resumes
};

/// Is told how the run goes on, on the training thread and between steps.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  virtual void planned(const RunSummary& summary) = 0;
  virtual void stepped(const TrainMetrics& metrics) = 0;
  virtual void evaluated(const EvalMetrics& metrics) = 0;
  virtual void saved(const std::filesystem::path& checkpoint) = 0;
  /// Something a person should know: one sentence.
  virtual void noted(std::string_view message) = 0;
};

struct TrainOutcome {
  int64_t step = 0;
  double seconds = 0;  // of training, evaluation and checkpoints, without set-up
  std::optional<double> eval_loss;
  std::filesystem::path checkpoint;
  bool interrupted = false;
  size_t planned_bytes = 0;        // both arenas and the data, of this process
  size_t peak_resident_bytes = 0;  // as the kernel saw it
};

/// Runs until max_steps or until `stop_requested` says so between two steps; either way the last
/// step is saved. All that can be found wrong with the configuration, the model, the data and the
/// output directory is found before anything is written: usage errors, or kDoesNotFit.
TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested);

/// The device a configuration asks for.
[[nodiscard]] std::unique_ptr<gpu::Device> open_device(const TrainConfig& config);

}  // namespace strata::train
