#include "train/trainer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "gpu/host/host_device.h"
#include "model/weights.h"
#include "pipeline/executor.h"
#include "train/checkpoint.h"
#include "train/dataset.h"
#include "train/learning_rate.h"
#include "train/process_memory.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using pipeline::Plan;
using pipeline::Tier;

constexpr const char* kMetricsFile = "metrics.jsonl";
constexpr const char* kConfigFile = "config.yaml";

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// The micro-batches of one step, each window a document of its own.
class StepBatches {
 public:
  StepBatches(int64_t micro_batches, int64_t windows, int64_t sequence_len) {
    const auto tokens = static_cast<size_t>(windows * sequence_len);
    positions_.resize(tokens);
    for (size_t i = 0; i < tokens; ++i) {
      positions_[i] = static_cast<int32_t>(static_cast<int64_t>(i) % sequence_len);
    }
    for (int64_t i = 0; i <= windows; ++i) {
      offsets_.push_back(static_cast<int32_t>(i * sequence_len));
    }
    for (int64_t m = 0; m < micro_batches; ++m) {
      auto& batch = batches_.emplace_back();
      batch.tokens.resize(tokens);
      batch.targets.resize(tokens);
    }
    for (const Batch& batch : batches_) {
      views_.push_back({batch.tokens, batch.targets, positions_, offsets_});
    }
  }
  StepBatches(const StepBatches&) = delete;
  StepBatches& operator=(const StepBatches&) = delete;

  struct Batch {
    std::vector<int32_t> tokens, targets;
  };
  [[nodiscard]] std::vector<Batch>& batches() { return batches_; }
  [[nodiscard]] std::span<const pipeline::HostMicroBatch> views() const { return views_; }
  /// Targets that are part of the loss.
  [[nodiscard]] int64_t unmasked() const {
    return std::accumulate(batches_.begin(), batches_.end(), int64_t{0},
                           [](int64_t sum, const Batch& batch) {
                             return sum + std::count_if(batch.targets.begin(), batch.targets.end(),
                                                        [](int32_t target) { return target >= 0; });
                           });
  }
  [[nodiscard]] static size_t memory_bytes(int64_t micro_batches, int64_t tokens) {
    return static_cast<size_t>(2 * micro_batches + 1) * static_cast<size_t>(tokens) *
           sizeof(int32_t);
  }

 private:
  std::vector<Batch> batches_;
  std::vector<int32_t> positions_, offsets_;
  std::vector<pipeline::HostMicroBatch> views_;
};

Plan make_plan(const TrainConfig& config, const gpu::Device& device, gpu::Operators& operators,
               const model::Llama& llama, size_t data_bytes) {
  const pipeline::StepShape shape{.micro_batches = config.gradient_accumulation_steps,
                                  .tokens = config.micro_batch_size * config.sequence_len,
                                  .max_sequences = config.micro_batch_size};
  const auto slots = static_cast<int>(config.weight_slots);
  const size_t device_bytes = config.device_memory.value_or(device.free_memory_bytes());
  const size_t available = available_memory_bytes();
  const size_t host_bytes = config.host_memory.value_or(available);
  Plan plan;
  if (config.offload == OffloadChoice::kAuto) {
    plan = pipeline::choose_plan(llama, operators, shape, slots, true, device_bytes, host_bytes);
  } else {
    const Tier home = config.offload == OffloadChoice::kNone ? Tier::kDevice : Tier::kHost;
    plan = pipeline::build_plan(llama, operators, shape,
                                pipeline::Placement::all_on(home, llama.units().size(), slots));
  }
  const auto require = [](std::string_view what, size_t needed, size_t allowed,
                          std::string_view advice) {
    if (needed <= allowed) return;
    throw Error(ErrorKind::kDoesNotFit,
                fmt::format("the plan needs {} ({} bytes) of {}, and {} are there; {}",
                            format_bytes(needed), needed, what, format_bytes(allowed), advice));
  };
  require(
      "device memory", plan.bytes(Tier::kDevice), device_bytes,
      config.offload == OffloadChoice::kNone
          ? "raise device_memory, lower micro_batch_size, or let state rest in host memory with "
            "offload: host"
          : "raise device_memory, or lower micro_batch_size or sequence_len");
  require("host memory", plan.bytes(Tier::kHost) + data_bytes, host_bytes,
          "raise host_memory or choose a smaller model");
  if (device.kind() == "host") {
    require("this machine's memory for both arenas",
            plan.bytes(Tier::kDevice) + plan.bytes(Tier::kHost) + data_bytes, available,
            "lower micro_batch_size or choose a smaller model");
  }
  return plan;
}

/// Refuses an output directory that cannot take a run: found before anything is in it. Creates the
/// directory.
void prepare_output(const TrainConfig& config, const model::Llama& llama) {
  const fs::path directory = config.output_dir;
  const bool was_there = fs::exists(directory);
  if (was_there && !fs::is_directory(directory)) {
    throw usage_error(
        fmt::format("output_dir '{}' is a file; name a directory", config.output_dir));
  }
  if (config.resume.empty() &&
      (!list_checkpoints(directory).empty() || fs::exists(directory / kMetricsFile))) {
    throw usage_error(
        fmt::format("output_dir '{}' already holds a run; continue it with "
                    "--resume auto, or name another directory",
                    config.output_dir));
  }
  std::error_code code;
  fs::create_directories(directory, code);
  if (code || ::access(directory.c_str(), W_OK | X_OK) != 0) {
    throw usage_error(fmt::format("output_dir '{}' cannot be written: {}", config.output_dir,
                                  code ? code.message() : std::strerror(errno)));
  }
  size_t checkpoint_bytes = 0;
  for (const pipeline::UnitSpec& unit : llama.units()) {
    for (size_t k = 0; k < pipeline::kStateKinds; ++k) {
      const auto kind = static_cast<pipeline::StateKind>(k);
      if (kind == pipeline::StateKind::kGradient) continue;
      checkpoint_bytes +=
          static_cast<size_t>(unit.parameter_count) * pipeline::state_bytes(kind, llama.dtype());
    }
  }
  const fs::space_info space = fs::space(directory, code);
  if (!code && space.available < checkpoint_bytes) {
    if (!was_there) fs::remove(directory, code);
    throw usage_error(fmt::format(
        "output_dir '{}' has {} free, and a checkpoint takes {}; free "
        "some space or name another directory",
        config.output_dir, format_bytes(space.available), format_bytes(checkpoint_bytes)));
  }
}

/// Held while a run writes to its directory; a second run on it is refused.
UniqueFd lock_directory(const fs::path& directory) {
  UniqueFd fd = UniqueFd::adopt(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw IoError("open", directory.string(), errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw IoError("lock", directory.string(), errno);
    throw usage_error(
        fmt::format("another run is writing to output_dir '{}'; wait for it to end, "
                    "or name another directory",
                    directory.string()));
  }
  return fd;
}

class Run {
 public:
  Run(const TrainConfig& config, TrainObserver& observer) : config_(config), observer_(observer) {}

  TrainOutcome run(const std::function<bool()>& stop_requested) {
    set_up();
    const auto start = std::chrono::steady_clock::now();
    TrainOutcome outcome;
    while (state_.step < max_steps_ && !outcome.interrupted) {
      step(start);
      outcome.interrupted = stop_requested() && state_.step < max_steps_;
      const bool last = state_.step == max_steps_;
      const auto due = [&](int64_t every) { return every > 0 && state_.step % every == 0; };
      // What is there to lose is saved first.
      if (last || outcome.interrupted || due(config_.save_steps)) save();
      if (outcome.interrupted) break;
      if (eval_ && (last || due(config_.eval_steps))) outcome.eval_loss = evaluate();
    }
    outcome.step = state_.step;
    outcome.seconds = seconds_since(start);
    outcome.checkpoint = checkpoint_path(config_.output_dir, state_.step);
    outcome.planned_bytes = planned_bytes();
    outcome.peak_resident_bytes = read_process_memory().peak_resident_bytes;
    return outcome;
  }

 private:
  void set_up() {
    const model::LlamaConfig model_config = model::read_llama_config(config_.model);
    Datasets datasets = open_datasets({.train = config_.datasets,
                                       .eval = config_.eval_datasets,
                                       .val_set_size = config_.val_set_size,
                                       .sequence_len = config_.sequence_len,
                                       .vocab_size = model_config.vocab_size});
    if (config_.sequence_len > model_config.max_position_embeddings) {
      throw usage_error(fmt::format(
          "sequence_len is {}, and model '{}' knows {} positions (max_position_embeddings)",
          config_.sequence_len, config_.model, model_config.max_position_embeddings));
    }
    const int64_t eval_windows = datasets.eval.window_count();
    const int64_t train_windows = datasets.train.window_count();
    data_fingerprint_ =
        fmt::format("{} windows of {}, {} targets, {}", train_windows, config_.sequence_len,
                    datasets.train.target_count(), config_.shuffle ? "shuffled" : "in order");
    loader_.emplace(std::move(datasets.train), config_.micro_batch_size,
                    static_cast<uint64_t>(config_.seed), config_.shuffle);
    if (eval_windows > 0) eval_.emplace(std::move(datasets.eval), config_.micro_batch_size);
    max_steps_ =
        config_.max_steps > 0
            ? config_.max_steps
            : steps_of_epochs(config_.num_epochs, train_windows,
                              config_.micro_batch_size * config_.gradient_accumulation_steps);
    llama_.emplace(model_config, config_.compute_dtype, config_.sequence_len);
    const std::optional<fs::path> checkpoint = checkpoint_to_resume();
    const std::optional<fs::path> weights = checkpoint ? std::nullopt : pretrained_weights();
    if (weights) model::check_weights(model::CheckpointReader::open(*weights), *llama_);
    device_ = open_device(config_);
    Plan plan = make_plan(config_, *device_, device_->operators(), *llama_, data_bytes());
    if (checkpoint) check_resumable(*checkpoint);
    prepare_output(config_, *llama_);
    lock_ = lock_directory(config_.output_dir);

    batches_ = std::make_unique<StepBatches>(config_.gradient_accumulation_steps,
                                             config_.micro_batch_size, config_.sequence_len);
    executor_.emplace(*device_, *llama_, std::move(plan), static_cast<int>(config_.threads));
    if (checkpoint) {
      load_checkpoint(*checkpoint, *llama_, *executor_);
      loader_->restore(state_.data);
    } else {
      state_.seed = static_cast<uint64_t>(config_.seed);
      state_.compute_dtype = config_.compute_dtype;
      state_.data_fingerprint = data_fingerprint_;
      if (weights) {
        model::load_weights(model::CheckpointReader::open(*weights), *llama_, *executor_);
      } else {
        model::initialize_weights(state_.seed, *llama_, *executor_);
      }
    }
    write_text_file_atomically(fs::path(config_.output_dir) / kConfigFile, to_yaml(config_));
    metrics_.emplace(fs::path(config_.output_dir) / kMetricsFile,
                     checkpoint ? state_.step : MetricsWriter::kFreshRun);
    observer_.planned({.device = *device_,
                       .llama = *llama_,
                       .plan = executor_->plan(),
                       .data_bytes = data_bytes(),
                       .max_steps = max_steps_,
                       .train_windows = train_windows,
                       .eval_windows = eval_windows,
                       .first_step = state_.step});
    if (checkpoint) {
      observer_.noted(fmt::format("resumed from '{}'", checkpoint->string()));
      if (state_.step >= max_steps_) {
        observer_.noted(fmt::format("the run is complete at step {}; raise max_steps to train on",
                                    state_.step));
      }
    } else if (!weights) {
      observer_.noted("the model starts from random weights");
    }
  }

  /// Takes over what the checkpoint remembers, if going on from it continues the very same run.
  void check_resumable(const fs::path& checkpoint) {
    state_ = read_run_state(checkpoint);
    const auto refuse = [&](std::string_view what) {
      throw usage_error(fmt::format("'{}' cannot be continued: {}", checkpoint.string(), what));
    };
    if (state_.seed != static_cast<uint64_t>(config_.seed)) {
      refuse(fmt::format("it was trained with seed {}, not {}", state_.seed, config_.seed));
    }
    if (state_.data_fingerprint != data_fingerprint_) {
      refuse(fmt::format("its data was [{}], and this is [{}]", state_.data_fingerprint,
                         data_fingerprint_));
    }
    if (read_text_file(checkpoint / "config.json") != llama_->config().text) {
      refuse(fmt::format("its config.json differs from that of '{}'", config_.model));
    }
    for (const fs::path& other : list_checkpoints(config_.output_dir)) {
      if (read_run_state(other).step > state_.step) {
        refuse(
            fmt::format("output_dir holds the later '{}'; remove what is later, or name "
                        "another output_dir",
                        other.filename().string()));
      }
    }
  }

  [[nodiscard]] std::optional<fs::path> checkpoint_to_resume() const {
    if (config_.resume.empty()) return std::nullopt;
    if (config_.resume != "auto") return config_.resume;
    const std::vector<fs::path> all = list_checkpoints(config_.output_dir);
    if (all.empty()) return std::nullopt;
    return all.back();
  }

  /// The directory with the model's weights, if there are any beside its config.
  [[nodiscard]] std::optional<fs::path> pretrained_weights() const {
    const fs::path directory = config_.model;
    for (const char* name : {"model.safetensors", "model.safetensors.index.json"}) {
      if (fs::exists(directory / name)) return directory;
    }
    return std::nullopt;
  }

  [[nodiscard]] size_t data_bytes() const {
    return loader_->memory_bytes() + (eval_ ? eval_->memory_bytes() : 0) +
           StepBatches::memory_bytes(config_.gradient_accumulation_steps,
                                     config_.micro_batch_size * config_.sequence_len);
  }

  [[nodiscard]] size_t planned_bytes() const {
    size_t bytes = executor_->plan().bytes(Tier::kHost) + data_bytes();
    if (device_->kind() == "host") bytes += executor_->plan().bytes(Tier::kDevice);
    return bytes;
  }

  void step(std::chrono::steady_clock::time_point start) {
    const auto step_start = std::chrono::steady_clock::now();
    for (StepBatches::Batch& batch : batches_->batches())
      loader_->next(batch.tokens, batch.targets);
    const int64_t unmasked = batches_->unmasked();
    const double per_token = 1.0 / static_cast<double>(std::max<int64_t>(unmasked, 1));
    const pipeline::ForwardBackwardResult result =
        executor_->forward_backward(batches_->views(), static_cast<float>(per_token));

    ++state_.step;
    state_.tokens += unmasked;
    state_.data = loader_->state();
    const double norm = std::sqrt(result.sum_of_squares);
    const double rate = learning_rate({.scheduler = config_.lr_scheduler,
                                       .peak = config_.learning_rate,
                                       .warmup_steps = config_.warmup_steps,
                                       .total_steps = max_steps_,
                                       .cosine_min_lr_ratio = config_.cosine_min_lr_ratio},
                                      state_.step);
    bool clipped = false;
    if (std::isfinite(norm)) {
      // As torch.nn.utils.clip_grad_norm_ does, its 1e-6 included.
      const double coefficient =
          config_.max_grad_norm > 0 ? config_.max_grad_norm / (norm + 1e-6) : 1.0;
      clipped = coefficient < 1;
      ++state_.optimizer_steps;
      executor_->set_pending_update(cpu_adam::step_constants({.learning_rate = rate,
                                                              .beta1 = config_.adam_beta1,
                                                              .beta2 = config_.adam_beta2,
                                                              .epsilon = config_.adam_epsilon,
                                                              .weight_decay = config_.weight_decay},
                                                             state_.optimizer_steps,
                                                             std::min(coefficient, 1.0)));
    } else {
      observer_.noted(fmt::format("step {}: the gradient is not finite; this step changes nothing",
                                  state_.step));
    }
    const TrainMetrics metrics{
        .step = state_.step,
        .loss = result.loss_sum * per_token,
        .grad_norm = norm,
        .clipped = clipped,
        .lr = rate,
        .tokens_per_second = static_cast<double>(unmasked) / seconds_since(step_start),
        .tokens = state_.tokens,
        .seconds = seconds_since(start),
        .device_bytes = executor_->plan().bytes(Tier::kDevice),
        .host_bytes = executor_->plan().bytes(Tier::kHost)};
    metrics_->append(metrics);
    observer_.stepped(metrics);
  }

  double evaluate() {
    eval_->rewind();
    double loss_sum = 0;
    int64_t tokens = 0;
    bool more = true;
    for (int64_t batch = 0;
         more && (config_.eval_max_batches == 0 || batch < config_.eval_max_batches);) {
      // A group of micro-batches that ends early is filled up with masked ones.
      for (StepBatches::Batch& micro_batch : batches_->batches()) {
        const bool wanted =
            more && (config_.eval_max_batches == 0 || batch < config_.eval_max_batches);
        more = wanted && eval_->next(micro_batch.tokens, micro_batch.targets);
        if (more) {
          ++batch;
        } else {
          std::fill(micro_batch.tokens.begin(), micro_batch.tokens.end(), 0);
          std::fill(micro_batch.targets.begin(), micro_batch.targets.end(), -1);
        }
      }
      const int64_t unmasked = batches_->unmasked();
      if (unmasked == 0) break;
      loss_sum += executor_->evaluate(batches_->views());
      tokens += unmasked;
    }
    const EvalMetrics metrics{.step = state_.step,
                              .eval_loss = loss_sum / static_cast<double>(tokens)};
    metrics_->append(metrics);
    observer_.evaluated(metrics);
    return metrics.eval_loss;
  }

  void save() {
    save_checkpoint(config_.output_dir, state_, *llama_, *executor_, config_.save_total_limit);
    observer_.saved(checkpoint_path(config_.output_dir, state_.step));
  }

  const TrainConfig& config_;
  TrainObserver& observer_;
  std::optional<model::Llama> llama_;
  std::unique_ptr<gpu::Device> device_;
  std::optional<pipeline::Executor> executor_;
  std::optional<DataLoader> loader_;
  std::optional<EvalLoader> eval_;
  std::unique_ptr<StepBatches> batches_;
  std::optional<MetricsWriter> metrics_;
  int64_t max_steps_ = 0;
  std::string data_fingerprint_;
  UniqueFd lock_;
  RunState state_;
};

}  // namespace

std::unique_ptr<gpu::Device> open_device(const TrainConfig& config) {
  if (config.device == DeviceChoice::kCuda) {
    throw usage_error("device: cuda is not part of this version; use device: host");
  }
  return gpu::create_host_device(
      {.threads = static_cast<int>(config.threads),
       .memory_bytes = config.device_memory.value_or(0),
       .upload_bytes_per_second = config.upload_bandwidth.value_or(0),
       .download_bytes_per_second = config.download_bandwidth.value_or(0)});
}

TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested) {
  return Run(config, observer).run(stop_requested);
}

}  // namespace strata::train
