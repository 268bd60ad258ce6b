// A training run from configuration to last checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/launch.h"
#include "gpu/open_device.h"
#include "model/llama.h"
#include "pipeline/machine_profile.h"
#include "pipeline/plan.h"
#include "train/config.h"
#include "train/metrics.h"
#include "train/ranks.h"

namespace strata::train {

/// What is known of a run before anything is allocated or written.
struct RunSummary {
  const gpu::Device& device;
  const model::Llama& llama;
  const pipeline::Plan& plan;
  const pipeline::MachineProfile& profile;  // by which the plan was chosen
  int ranks = 1;
  double predicted_step_s = 0;
  size_t data_bytes = 0;  // of host memory, for the order and one window of the data
  int64_t max_steps = 0;
  int64_t train_windows = 0;
  int64_t eval_windows = 0;
  int64_t first_step = 0;  // taken by the run that this one resumes
};

struct TrainOutcome;

/// Is told how the run goes on, on the training thread and between steps.
class TrainObserver {
 public:
  virtual ~TrainObserver() = default;
  /// First of all: which of how many ranks this process is.
  virtual void joined(int /*rank*/, int /*ranks*/) {}
  /// All refusals are over; arenas and weights, which may take minutes, come next.
  virtual void planned(const RunSummary& summary) = 0;
  /// The model is there, and what it is made of is in the output directory: steps come next.
  virtual void began() {}
  virtual void stepped(const TrainMetrics& metrics) = 0;
  virtual void evaluated(const EvalMetrics& metrics) = 0;
  virtual void saved(const std::filesystem::path& checkpoint) = 0;
  /// Something a person should know: one sentence.
  virtual void noted(std::string_view message) = 0;
  /// Last of all, on all ranks before any of them ends: the run is over, or ends by this error.
  virtual void finished(const TrainOutcome& /*outcome*/) {}
  virtual void failed(const AgreedError& /*error*/) {}
};

/// One lane in a step: what was foretold, and what the last step took.
struct LaneReport {
  std::string name;
  size_t moved_bytes = 0;
  double predicted_s = 0, measured_s = 0;  // busy
};

struct TrainOutcome {
  int rank = 0, ranks = 1;
  int64_t step = 0;
  double seconds = 0;  // of training, evaluation and checkpoints, without set-up
  std::optional<double> eval_loss;
  std::filesystem::path checkpoint;  // empty where none is saved
  bool committed = false;            // the last step is kept in the store on the drives
  bool interrupted = false;
  double predicted_step_s = 0;
  double measured_step_s = 0;  // median, without the first; 0 where there was none
  std::vector<LaneReport> lanes;
  size_t planned_bytes = 0;        // of this process: arenas in its memory and the data
  size_t peak_resident_bytes = 0;  // as the kernel saw it
};

/// Runs until max_steps or until `stop_requested` says so between two steps; either way the last
/// step is saved. All that can be found wrong with the configuration, the model, the data and the
/// output directory is found before anything is written: usage errors, or kDoesNotFit.
///
/// As one of several ranks (ranks.h) it trains with them: what is found wrong on one of them before
/// anything is written is an AgreedError on all; where one is lost later, `end_process` is called.
TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested, const EndProcess& end_process = {});

/// The same as the rank of a run that `place` tells of, whatever the environment says.
TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested, const EndProcess& end_process,
                   const comm::RankInfo& place);

/// The device a configuration asks for, for one of the ranks that share this machine: of several
/// GPUs that a process sees, its own.
[[nodiscard]] gpu::OpenedDevice open_device(const TrainConfig& config, int local_rank = 0,
                                            int local_ranks = 1);

}  // namespace strata::train
