#include "train/trainer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "cpu_adam/adam.h"
#include "gpu/open_device.h"
#include "model/weights.h"
#include "nvme/arena_file.h"
#include "pipeline/executor.h"
#include "pipeline/trace.h"
#include "train/checkpoint.h"
#include "train/dataset.h"
#include "train/learning_rate.h"
#include "train/output_directory.h"
#include "train/process_memory.h"
#include "train/rank_batches.h"
#include "train/run_plan.h"
#include "train/run_store.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using pipeline::Tier;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// How long a rank may be at one step or save before it counts as stuck, be it alive or not.
constexpr std::chrono::minutes kStepPatience(60), kSavePatience(240);

class Run {
 public:
  /// `config` is this rank's; `common` that of all.
  Run(const TrainConfig& config, const TrainConfig& common, TrainObserver& observer, Ranks& ranks)
      : config_(config), common_(common), observer_(observer), ranks_(ranks) {}

  TrainOutcome run(const std::function<bool()>& stop_requested) {
    set_up();
    const auto start = std::chrono::steady_clock::now();
    TrainOutcome outcome;
    catch_up(outcome);
    while (state_.step < max_steps_ && !outcome.interrupted) {
      step(start);
      outcome.interrupted = ranks_.any(stop_requested()) && state_.step < max_steps_;
      // What is there to lose is saved first.
      if (is_save_due() || (outcome.interrupted && saves())) save();
      if (outcome.interrupted) break;
      if (is_evaluation_due()) outcome.eval_loss = evaluate();
    }
    outcome.step = state_.step;
    outcome.seconds = seconds_since(start);
    executor_->finish_update();
    const fs::path checkpoint = checkpoint_path(config_.output_dir, state_.step);
    if (saves() && is_checkpoint(checkpoint)) outcome.checkpoint = checkpoint;
    outcome.committed = durable_;
    outcome.rank = ranks_.rank();
    outcome.ranks = ranks_.ranks();
    report_lanes(outcome);
    outcome.planned_bytes = planned_bytes();
    outcome.peak_resident_bytes = read_process_memory().peak_resident_bytes;
    return outcome;
  }

 private:
  [[nodiscard]] bool saves() const { return config_.save_strategy == SaveStrategy::kSteps; }
  /// At the end, and every so many steps.
  [[nodiscard]] bool is_due(int64_t every) const {
    return state_.step > 0 &&
           (state_.step >= max_steps_ || (every > 0 && state_.step % every == 0));
  }
  [[nodiscard]] bool is_save_due() const { return saves() && is_due(config_.save_steps); }
  [[nodiscard]] bool is_evaluation_due() const { return eval_ && is_due(config_.eval_steps); }

  /// What was due after the last step of the run that this one resumes, and was cut off.
  void catch_up(TrainOutcome& outcome) {
    // As the first rank sees it: others may see the directory later.
    if (ranks_.any(stored_ && is_save_due() && ranks_.is_first() &&
                   !is_checkpoint(checkpoint_path(config_.output_dir, state_.step)))) {
      save();
    }
    if (ranks_.any(is_evaluation_due() && metrics_ && metrics_->ends_with_step(state_.step))) {
      outcome.eval_loss = evaluate();
    }
  }

  void set_up() {
    ranks_.set_phase("set-up");
    std::vector<StoredRun> commits;
    ranks_.agree([&] {
      open_inputs();
      commits = stored_runs();
    });
    ranks_.agree([&, steps = steps_of_ranks(commits)] {
      find_store(commits, steps);
      checkpoint_ = checkpoint_to_resume(stored_);
      if (ranks_.is_first() && !is_resumed() && !config_.resume.empty()) require_nothing_to_lose();
      weights_ = is_resumed() ? std::nullopt : pretrained_weights();
      if (weights_) model::check_weights(model::CheckpointReader::open(*weights_), *llama_);
    });
    RunConstraints constraints{.data_bytes = data_bytes(),
                               .memory = memory_of(*device_, ranks_.local_ranks()),
                               .ranks = layout_,
                               .local_ranks = ranks_.local_ranks()};
    // What one rank has more than another nobody can use.
    const auto least = [this](size_t& bytes) {
      bytes = static_cast<size_t>(ranks_.least(static_cast<int64_t>(bytes)));
    };
    least(constraints.memory.device_bytes);
    least(constraints.memory.host_bytes);
    constraints.nvme_bytes = room_on_drives(config_, ranks_.local_ranks());
    least(*constraints.nvme_bytes);
    if (stored_) constraints.part_elements = stored_->part_elements;
    std::optional<OutputDirectory> output;
    ranks_.agree([&] {
      foretold_ = plan_run(config_, *device_, *llama_, profile_, constraints);
      durable_ =
          pipeline::is_durable(foretold_.plan.placement) && config_.commit == CommitChoice::kStep;
      check_sources();
      if (ranks_.is_first()) output.emplace(config_, *llama_);
    });
    require_same_source();
    require_same_plan();
    ranks_.connect(device_, layout_);
    tell_plan();
    ranks_.agree([this] { make_state(); });
    if (ranks_.is_first()) {
      lock_ = output->keep();
      changes_ = changes_since();
      write_text_file_atomically(config_path(config_.output_dir), to_yaml(common_));
      metrics_.emplace(metrics_path(config_.output_dir),
                       is_resumed() ? state_.step : MetricsWriter::kFreshRun);
    }
    if (ranks_.ranks() > 1) {
      reporter_ = std::jthread([this](const std::stop_token& stop) { report_activity(stop); });
    }
    if (executor_->nvme() != nullptr) nvme_written_ = executor_->nvme()->bytes_written();
    tell_beginning();
  }

  /// Model, data and device.
  void open_inputs() {
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
    eval_windows_ = datasets.eval.window_count();
    train_windows_ = datasets.train.window_count();
    data_fingerprint_ =
        fmt::format("{} windows of {}, {} targets, {}", train_windows_, config_.sequence_len,
                    datasets.train.target_count(), config_.shuffle ? "shuffled" : "in order");
    loader_.emplace(std::move(datasets.train), config_.micro_batch_size,
                    static_cast<uint64_t>(config_.seed), config_.shuffle);
    if (eval_windows_ > 0) {
      eval_.emplace(std::move(datasets.eval), config_.micro_batch_size, config_.eval_max_batches);
    }
    max_steps_ = config_.max_steps > 0
                     ? config_.max_steps
                     : steps_of_epochs(config_.num_epochs, train_windows_,
                                       config_.micro_batch_size *
                                           config_.gradient_accumulation_steps * ranks_.ranks());
    llama_.emplace(model_config, config_.compute_dtype, config_.sequence_len);
    layout_ = ranks_.layout();
    check_drives(config_);
    gpu::OpenedDevice opened = open_device(config_, ranks_.local_rank(), ranks_.local_ranks());
    device_ = std::move(opened.device);
    device_note_ = std::move(opened.note);
    profile_ = profile_of(config_, *device_);
  }

  /// Of each rank's commits, the newest first.
  std::vector<std::vector<int64_t>> steps_of_ranks(const std::vector<StoredRun>& commits) {
    std::vector<int64_t> mine;
    for (const StoredRun& commit : commits) mine.push_back(commit.state.step);
    std::vector<std::vector<int64_t>> all;
    for (const auto& bytes : ranks_.all_gather(std::as_bytes(std::span(mine)))) {
      auto& steps = all.emplace_back(bytes.size() / sizeof(int64_t));
      if (!bytes.empty()) std::memcpy(steps.data(), bytes.data(), bytes.size());
    }
    return all;
  }

  /// Where the store is damaged, the error says what else there is to go on from.
  [[nodiscard]] std::vector<StoredRun> stored_runs() const {
    try {
      return find_stored_runs(config_);
    } catch (const Error& error) {
      const std::vector<fs::path> checkpoints = list_checkpoints(config_.output_dir);
      if (error.kind() != ErrorKind::kFailed || config_.resume != "auto" || checkpoints.empty()) {
        throw;
      }
      throw failure(fmt::format("{}; '--resume {}' goes on from the last one", error.what(),
                                checkpoints.back().string()));
    }
  }

  /// The last commit that all ranks have. A kill between two steps leaves them one apart.
  void find_store(const std::vector<StoredRun>& commits,
                  const std::vector<std::vector<int64_t>>& steps) {
    for (const StoredRun& commit : commits) {
      if (commit.rank == ranks_.rank() && commit.ranks == ranks_.ranks() &&
          commit.shard_ranks == layout_.shard_ranks) {
        continue;
      }
      refuse_resume(store_name(),
                    fmt::format("it is rank {}'s of {}, in groups of {} that divide the state, and "
                                "this is rank {} of {}, in groups of {}; start as many ranks with "
                                "the same sharding, or go on from a checkpoint with other nvme "
                                "directories",
                                commit.rank, commit.ranks, commit.shard_ranks, ranks_.rank(),
                                ranks_.ranks(), layout_.shard_ranks));
    }
    const std::optional<int64_t> common = last_common_step(steps);
    if (common) {
      stored_ = *std::find_if(commits.begin(), commits.end(), [&](const StoredRun& commit) {
        return commit.state.step == *common;
      });
      return;
    }
    // What was killed before all had made their stores has lost nothing.
    int64_t latest = 0;
    for (const auto& each : steps) {
      for (const int64_t step : each) latest = std::max(latest, step);
    }
    if (latest == 0) return;
    throw failure(fmt::format(
        "the stores of the ranks have no commit in common: theirs are of steps {}; bring back the "
        "drives that are missing, or name other nvme directories and go on from a checkpoint",
        fmt::join(steps, " and ")));
  }

  [[nodiscard]] bool is_resumed() const { return checkpoint_ || stored_; }

  /// Of a run that is to begin since there is nothing to go on from: no run is kept on drives that
  /// this configuration, or that of the run in output_dir, names.
  void require_nothing_to_lose() const {
    std::vector<std::vector<DriveSpec>> places = {common_.nvme};
    std::error_code none;
    const fs::path config_of_last = config_path(config_.output_dir);
    if (fs::exists(config_of_last, none)) places.push_back(read_config(config_of_last).nvme);
    for (const std::vector<DriveSpec>& drives : places) {
      if (drives.empty()) continue;
      const std::optional<StoredRun> kept = find_any_stored_run(drives);
      if (!kept || kept->state.step == 0) continue;
      throw usage_error(fmt::format(
          "there is a run after its step {} on drives, in nvme '{}', by {} rank{}, which this one "
          "cannot go on from; give the same nvme, offload and number of ranks, or name another "
          "output_dir and other nvme directories",
          kept->state.step, drives.front().path, kept->ranks, kept->ranks == 1 ? "" : "s"));
    }
  }

  /// What the configuration says otherwise than that of the run which this one goes on from.
  [[nodiscard]] std::vector<std::string> changes_since() const {
    if (!is_resumed()) return {};
    const fs::path from = checkpoint_ ? (*checkpoint_ / "config.json").parent_path().parent_path()
                                      : fs::path(config_.output_dir);
    std::error_code ignored;
    if (!fs::exists(config_path(from), ignored)) return {};
    try {
      TrainConfig before = read_config(config_path(from));
      before.output_dir = common_.output_dir;
      before.resume = common_.resume;
      std::vector<std::string> all = changes(before, common_);
      // Which the number of ranks is a part of.
      const int64_t sequences =
          config_.micro_batch_size * config_.gradient_accumulation_steps * ranks_.ranks();
      const int64_t used = state_.data.epoch * train_windows_ + state_.data.index;
      if (state_.step > 0 && used / state_.step != sequences) {
        all.push_back(
            fmt::format("sequences of a step {} (was {})", sequences, used / state_.step));
      }
      return all;
    } catch (const Error&) {
      return {};  // it has been edited, or is of another version
    }
  }

  /// That what there is to go on from is of this very run.
  void check_sources() {
    if (checkpoint_) {
      check_resumable(read_run_state(*checkpoint_), checkpoint_->string());
      if (read_text_file(*checkpoint_ / "config.json") != llama_->config().text) {
        refuse_resume(checkpoint_->string(),
                      fmt::format("its config.json differs from that of '{}'", config_.model));
      }
    }
    if (stored_) check_resumable(stored_->state, store_name());
  }

  /// All ranks go on from the same step.
  void require_same_source() {
    const std::vector<int64_t> steps = ranks_.all_gather(is_resumed() ? state_.step : -1);
    ranks_.agree([&] {
      if (std::count(steps.begin(), steps.end(), steps.front()) ==
          static_cast<std::ptrdiff_t>(steps.size())) {
        return;
      }
      throw failure(
          fmt::format("the ranks would go on from different steps ({}); give all of them "
                      "the same output_dir, on a file system that they share",
                      fmt::join(steps, ", ")));
    });
  }

  /// All ranks do the same work in the same order: hosts may have different files and profiles.
  void require_same_plan() {
    if (ranks_.ranks() == 1) return;
    TrainConfig config = common_;
    // These may be a host's own; what comes of them is compared below.
    config.model.clear();
    config.datasets.clear();
    config.eval_datasets.clear();
    config.nvme.clear();
    config.profile.clear();
    config.trace.clear();
    config.threads = 0;
    const std::array<std::pair<std::string_view, std::string>, 4> all{
        {{"configuration", to_yaml(config)},
         {"model", llama_->config().text},
         {"data", fmt::format("{}, {} held out", data_fingerprint_, eval_windows_)},
         {"plan", words_of(foretold_.plan)}}};
    std::vector<std::vector<std::vector<std::byte>>> of_ranks;
    for (const auto& [what, text] : all) {
      of_ranks.push_back(ranks_.all_gather(std::as_bytes(std::span(text))));
    }
    ranks_.agree([&] {
      for (size_t i = 0; i < all.size(); ++i) {
        for (size_t rank = 1; rank < of_ranks[i].size(); ++rank) {
          if (of_ranks[i][rank] == of_ranks[i][0]) continue;
          throw usage_error(
              fmt::format("the {} of rank {} is not that of rank 0; give all ranks the same "
                          "configuration, files and profile",
                          all[i].first, rank));
        }
      }
    });
  }

  /// Where state rests, and what ranks send each other.
  static std::string words_of(const pipeline::Plan& plan) {
    std::string words;
    for (const pipeline::UnitPlacement& unit : plan.placement.units) words += describe(unit) + "\n";
    for (const pipeline::StepGraph* graph : {&plan.train, &plan.evaluate}) {
      for (const pipeline::Task& task : *graph) {
        if (task.lane != pipeline::Lane::kCollective) continue;
        words += fmt::format("{} {} {}\n", name_of(task.kind), task.unit, task.moved_bytes);
      }
    }
    return words;
  }

  /// Arenas and store, and in them what training begins with.
  void make_state() {
    batches_ = std::make_unique<RankBatches>(
        config_.gradient_accumulation_steps, config_.micro_batch_size, config_.sequence_len,
        DataRank{.rank = ranks_.rank(), .ranks = ranks_.ranks()});
    pipeline::NvmeOptions nvme = nvme_options(config_);
    nvme.open_existing = stored_.has_value();
    if (stored_) nvme.generation = stored_->generation;
    if (!stored_) remove_store(config_);
    executor_.emplace(*device_, *llama_, foretold_.plan,
                      pipeline::ExecutorOptions{.cpu_threads = static_cast<int>(config_.threads),
                                                .nvme = std::move(nvme),
                                                .ranks = ranks_.groups()});
    if (is_resumed()) {
      if (checkpoint_) load_checkpoint(*checkpoint_, *llama_, *executor_);
      loader_->restore(state_.data);
    } else {
      state_.seed = static_cast<uint64_t>(config_.seed);
      state_.compute_dtype = config_.compute_dtype;
      state_.optimizer_state = config_.optimizer_state;
      state_.data_fingerprint = data_fingerprint_;
      if (weights_) {
        model::load_weights(model::CheckpointReader::open(*weights_), *llama_, *executor_);
      } else {
        model::initialize_weights(state_.seed, *llama_, *executor_);
      }
    }
    if (!stored_) commit();
  }

  /// Keeps the watch over ranks informed. A rank that waits for others is not the one that is
  /// stuck; one whose tasks do not end is, in the end.
  void report_activity(const std::stop_token& stop) {
    std::mutex mutex;
    std::condition_variable_any wake;
    std::unique_lock lock(mutex);
    std::string last;
    int64_t ended = -1;
    while (!stop.stop_requested()) {
      const pipeline::Activity activity = executor_->activity();
      const bool has_news = activity.task != last || activity.ended != ended;
      if (!activity.task.empty() && (has_news || activity.waits_for_ranks)) {
        ranks_.set_task(fmt::format("step {}: {}", step_now_.load(), activity.task));
      }
      last = activity.task;
      ended = activity.ended;
      static_cast<void>(
          wake.wait_for(lock, stop, std::chrono::milliseconds(250), [] { return false; }));
    }
  }

  void tell_plan() {
    observer_.planned({.device = *device_,
                       .llama = *llama_,
                       .plan = foretold_.plan,
                       .profile = profile_,
                       .ranks = ranks_.ranks(),
                       .predicted_step_s = foretold_.step_s,
                       .data_bytes = data_bytes(),
                       .max_steps = max_steps_,
                       .train_windows = train_windows_,
                       .eval_windows = eval_windows_,
                       .first_step = state_.step});
    if (!device_note_.empty()) observer_.noted(device_note_);
    if (config_.threads != common_.threads && !ranks_.cpu_note().empty()) {
      observer_.noted(ranks_.cpu_note());
    }
  }

  void tell_beginning() {
    observer_.began();
    if (executor_->nvme() != nullptr) {
      for (const std::string& note : executor_->nvme()->notes()) observer_.noted(note);
    }
    if (is_resumed()) {
      observer_.noted(checkpoint_
                          ? fmt::format("resumed from '{}'", checkpoint_->string())
                          : fmt::format("resumed from the last commit in '{}', after step {}",
                                        config_.nvme.front().path, state_.step));
      if (!changes_.empty()) {
        observer_.noted(fmt::format("changed since: {}", fmt::join(changes_, ", ")));
      }
      if (state_.step >= max_steps_) {
        observer_.noted(fmt::format("the run is complete at step {}; raise max_steps to train on",
                                    state_.step));
      }
    } else {
      if (!config_.resume.empty()) {
        observer_.noted("there is nothing to resume yet: the run starts afresh");
      }
      if (!weights_) observer_.noted("the model starts from random weights");
    }
  }

  [[noreturn]] static void refuse_resume(std::string_view source, std::string_view what) {
    throw usage_error(fmt::format("'{}' cannot be gone on from: {}", source, what));
  }

  /// For messages.
  [[nodiscard]] std::string store_name() const {
    return nvme::arena_path(config_.nvme.front().path).string();
  }

  /// A store is gone on from by a run that commits to it.
  void require_committing() const {
    const bool may =
        config_.commit == CommitChoice::kStep &&
        (config_.offload == OffloadChoice::kNvme || config_.offload == OffloadChoice::kAuto);
    if (may) return;
    refuse_resume(store_name(),
                  fmt::format("it is committed every step, which offload {} with commit {} does "
                              "not do; resume with offload nvme and commit step",
                              get(config_, "offload"), get(config_, "commit")));
  }

  /// Going on from a state is to continue the very same run.
  void require_same_run(const RunState& state, const std::string& source) const {
    const auto refuse = [&](std::string_view what) { refuse_resume(source, what); };
    if (state.seed != static_cast<uint64_t>(config_.seed)) {
      refuse(fmt::format("it was trained with seed {}, not {}", state.seed, config_.seed));
    }
    if (state.data_fingerprint != data_fingerprint_) {
      refuse(fmt::format("its data was [{}], and this is [{}]", state.data_fingerprint,
                         data_fingerprint_));
    }
    if (state.compute_dtype != config_.compute_dtype) {
      refuse(fmt::format("it was trained with compute_dtype {}, not {}",
                         name_of(state.compute_dtype), name_of(config_.compute_dtype)));
    }
    if (state.optimizer_state != config_.optimizer_state) {
      refuse(fmt::format("it was trained with optimizer_state {}, not {}",
                         cpu_adam::name_of(state.optimizer_state),
                         cpu_adam::name_of(config_.optimizer_state)));
    }
  }

  /// Takes over what a checkpoint or the store remembers, if it can be gone on from.
  void check_resumable(const RunState& state, const std::string& source) {
    state_ = state;
    require_same_run(state, source);
    for (const fs::path& other : list_checkpoints(config_.output_dir)) {
      if (read_run_state(other).step > state_.step) {
        refuse_resume(source,
                      fmt::format("output_dir holds the later '{}'; remove what is later, or name "
                                  "another output_dir",
                                  other.filename().string()));
      }
    }
  }

  /// Whatever is resumed, a store of another run is neither gone on from nor given up.
  void require_same_run(const StoredRun& stored) const {
    if (stored.model_fingerprint != fingerprint_of(llama_->config())) {
      refuse_resume(store_name(), fmt::format("it is of another model than '{}'", config_.model));
    }
    require_same_run(stored.state, store_name());
  }

  /// What to go on from: the latest of checkpoints and store with `auto`; `stored` is forgotten
  /// where it is not that.
  std::optional<fs::path> checkpoint_to_resume(std::optional<StoredRun>& stored) const {
    if (config_.resume.empty()) {
      if (stored) {
        throw usage_error(fmt::format(
            "nvme directory '{}' already holds a run, after its step {}; continue it with --resume "
            "auto, name another directory, or remove its arena.strata",
            config_.nvme.front().path, stored->state.step));
      }
      return std::nullopt;
    }
    if (stored) require_same_run(*stored);
    if (config_.resume != "auto") {
      const int64_t step = read_run_state(config_.resume).step;
      if (stored && stored->state.step > step) {
        throw usage_error(fmt::format(
            "nvme directory '{}' holds the later step {}; continue it with --resume auto, name "
            "another directory, or remove its arena.strata",
            config_.nvme.front().path, stored->state.step));
      }
      stored.reset();
      return config_.resume;
    }
    const std::vector<fs::path> all = list_checkpoints(config_.output_dir);
    const bool is_later =
        stored && (all.empty() || stored->state.step >= read_run_state(all.back()).step);
    if (is_later) {
      require_committing();
      return std::nullopt;
    }
    stored.reset();
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
           RankBatches::memory_bytes(config_.gradient_accumulation_steps,
                                     config_.micro_batch_size * config_.sequence_len);
  }

  [[nodiscard]] size_t planned_bytes() const {
    size_t bytes = executor_->plan().bytes(Tier::kHost) + data_bytes();
    if (device_->kind() == "host") bytes += executor_->plan().bytes(Tier::kDevice);
    return bytes;
  }

  void step(std::chrono::steady_clock::time_point start) {
    const auto step_start = std::chrono::steady_clock::now();
    step_now_ = state_.step + 1;
    ranks_.set_phase(fmt::format("step {}", state_.step + 1), kStepPatience);
    const int64_t unmasked = batches_->fill(*loader_);
    const double per_token = 1.0 / static_cast<double>(std::max<int64_t>(unmasked, 1));
    const double rate = learning_rate({.scheduler = config_.lr_scheduler,
                                       .peak = config_.learning_rate,
                                       .warmup_steps = config_.warmup_steps,
                                       .total_steps = max_steps_,
                                       .cosine_min_lr_ratio = config_.cosine_min_lr_ratio},
                                      state_.step + 1);
    const pipeline::StepResult result =
        executor_->train_step(batches_->views(), static_cast<float>(per_token),
                              {.hyper = {.learning_rate = rate,
                                         .beta1 = config_.adam_beta1,
                                         .beta2 = config_.adam_beta2,
                                         .epsilon = config_.adam_epsilon,
                                         .weight_decay = config_.weight_decay},
                               .step = state_.optimizer_steps + 1,
                               .max_grad_norm = config_.max_grad_norm,
                               .seed = state_.seed});
    ++state_.step;
    state_.tokens += unmasked;
    state_.data = loader_->state();
    if (result.finite) {
      ++state_.optimizer_steps;
    } else {
      observer_.noted(fmt::format("step {}: the gradient is not finite; this step changes nothing",
                                  state_.step));
    }
    const uint64_t written = executor_->nvme() ? executor_->nvme()->bytes_written() : 0;
    const TrainMetrics metrics{.step = state_.step,
                               .loss = result.loss_sum * per_token,
                               .grad_norm = result.gradient_norm,
                               .clipped = result.clipped,
                               .lr = rate,
                               .tokens_per_second = static_cast<double>(unmasked) /
                                                    (seconds_since(step_start) + commit_s_),
                               .tokens = state_.tokens,
                               .seconds = seconds_since(start),
                               .device_bytes = executor_->plan().bytes(Tier::kDevice),
                               .host_bytes = executor_->plan().bytes(Tier::kHost),
                               .nvme_bytes_written = written - nvme_written_};
    nvme_written_ = written;
    // Before the commit: a line without its step is cut off on resume, and a step without its line
    // would stay so.
    if (metrics_) metrics_->append(metrics);
    const auto commit_start = std::chrono::steady_clock::now();
    commit();
    commit_s_ = seconds_since(commit_start);
    step_seconds_.push_back(seconds_since(step_start));
    observer_.stepped(metrics);
  }

  double evaluate() {
    ranks_.set_phase(fmt::format("evaluation after step {}", state_.step), kStepPatience);
    eval_->rewind();
    double loss_sum = 0;
    int64_t tokens = 0;
    while (const int64_t unmasked = batches_->fill(*eval_)) {
      loss_sum += executor_->evaluate(batches_->views());
      tokens += unmasked;
    }
    const EvalMetrics metrics{.step = state_.step,
                              .eval_loss = loss_sum / static_cast<double>(tokens)};
    if (metrics_) metrics_->append(metrics);
    observer_.evaluated(metrics);
    return metrics.eval_loss;
  }

  /// Sets what was foretold beside what was measured, and writes both as a trace if asked.
  void report_lanes(TrainOutcome& outcome) const {
    outcome.predicted_step_s = foretold_.step_s;
    if (step_seconds_.empty()) return;
    const pipeline::Plan& plan = executor_->plan();
    const pipeline::Timeline& measured = executor_->timeline();
    // The first step warms up, and has no update of the step before.
    std::vector<double> seconds(step_seconds_.begin() + (step_seconds_.size() > 1 ? 1 : 0),
                                step_seconds_.end());
    const auto middle = seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2);
    std::nth_element(seconds.begin(), middle, seconds.end());
    outcome.measured_step_s = *middle;
    const pipeline::LaneSummary now = pipeline::summarize(plan.train, measured);
    const pipeline::LaneSummary then = pipeline::summarize(plan.train, foretold_.timeline);
    for (const pipeline::Lane lane : pipeline::kAllLanes) {
      if (now.of(lane).tasks == 0 || pipeline::is_disk_lane(lane)) continue;
      outcome.lanes.push_back({std::string(name_of(lane)), now.of(lane).moved_bytes,
                               then.of(lane).busy_s, now.of(lane).busy_s});
    }
    LaneReport drives{
        .name = "drives", .predicted_s = then.drives_busy_s, .measured_s = now.drives_busy_s};
    for (const pipeline::Lane lane : pipeline::kAllLanes) {
      if (pipeline::is_disk_lane(lane)) drives.moved_bytes += now.of(lane).moved_bytes;
    }
    if (drives.moved_bytes > 0) outcome.lanes.push_back(drives);
    if (!config_.trace.empty() && ranks_.is_first()) {
      pipeline::write_trace(config_.trace, plan, plan.train, llama_->units(), measured,
                            &foretold_.timeline);
    }
  }

  /// Keeps the step for good, where all state is on drives that can.
  void commit() {
    if (!durable_) return;
    executor_->commit(to_metadata({.state = state_,
                                   .model_fingerprint = fingerprint_of(llama_->config()),
                                   .part_elements = executor_->plan().placement.part_elements,
                                   .rank = ranks_.rank(),
                                   .ranks = ranks_.ranks(),
                                   .shard_ranks = layout_.shard_ranks}));
  }

  [[nodiscard]] std::string not_saved(std::string_view why) const {
    const std::vector<fs::path> all = list_checkpoints(config_.output_dir);
    const std::string rest =
        durable_      ? "the same command with --resume auto goes on from the commit on the drives"
        : all.empty() ? "no checkpoint is there yet"
                      : fmt::format("the same command with --resume auto goes on from '{}'",
                                    all.back().filename().string());
    return fmt::format("step {} could not be saved: {}; {}", state_.step, why, rest);
  }

  void save() {
    ranks_.set_phase(fmt::format("saving step {}", state_.step), kSavePatience);
    try {
      save_checkpoint(config_.output_dir, state_, *llama_, *executor_, config_.save_total_limit,
                      ranks_, layout_.shard_ranks);
    } catch (const comm::RankFailure&) {
      throw;
    } catch (const AgreedError& error) {
      throw AgreedError(error.kind(), not_saved(error.what()));
    } catch (const Error& error) {
      throw Error(error.kind(), not_saved(error.what()));
    }
    observer_.saved(checkpoint_path(config_.output_dir, state_.step));
  }

  const TrainConfig& config_;
  const TrainConfig& common_;
  TrainObserver& observer_;
  Ranks& ranks_;
  pipeline::RankLayout layout_;
  std::optional<StoredRun> stored_;     // to go on from
  std::optional<fs::path> checkpoint_;  // likewise
  std::optional<fs::path> weights_;     // to begin with
  std::string device_note_;
  std::vector<std::string> changes_;  // of the configuration, since the run that is gone on with
  std::optional<model::Llama> llama_;
  std::shared_ptr<gpu::Device> device_;
  std::optional<pipeline::Executor> executor_;
  std::optional<DataLoader> loader_;
  std::optional<EvalLoader> eval_;
  std::unique_ptr<RankBatches> batches_;
  std::optional<MetricsWriter> metrics_;  // of the first rank
  int64_t max_steps_ = 0, train_windows_ = 0, eval_windows_ = 0;
  std::string data_fingerprint_;
  pipeline::MachineProfile profile_;
  pipeline::Foretold foretold_;
  bool durable_ = false;
  uint64_t nvme_written_ = 0;
  double commit_s_ = 0;  // of the last commit
  std::vector<double> step_seconds_;
  UniqueFd lock_;
  RunState state_;
  std::atomic<int64_t> step_now_ = 0;  // as reporter_ tells it
  std::jthread reporter_;              // ends before what it looks at
};

}  // namespace

gpu::OpenedDevice open_device(const TrainConfig& config, int local_rank, int local_ranks) {
  int ordinal = 0;
  if (local_ranks > 1 && config.device != gpu::DeviceChoice::kHost) {
    // Some launchers let each rank see all GPUs of the host, others only its own.
    const auto visible = static_cast<int>(gpu::cuda_availability().devices.size());
    if (visible > 1 && local_rank >= visible) {
      throw usage_error(
          fmt::format("this is rank {} of {} on its host, where {} GPUs can be used; start one "
                      "rank for each GPU",
                      local_rank, local_ranks, visible));
    }
    if (visible > 1) ordinal = local_rank;
  }
  const size_t memory_bytes = config.device_memory.value_or(0);
  return gpu::open_device(
      {.choice = config.device,
       .host = {.threads = static_cast<int>(config.threads),
                .memory_bytes = memory_bytes,
                .upload_bytes_per_second = config.upload_bandwidth.value_or(0),
                .download_bytes_per_second = config.download_bandwidth.value_or(0)},
       .cuda = {.ordinal = ordinal, .memory_bytes = memory_bytes}});
}

TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested, const EndProcess& end_process) {
  return train(config, observer, stop_requested, end_process, comm::rank_info_from_environment());
}

TrainOutcome train(const TrainConfig& config, TrainObserver& observer,
                   const std::function<bool()>& stop_requested, const EndProcess& end_process,
                   const comm::RankInfo& place) {
  Ranks ranks(place, config, end_process);
  observer.joined(ranks.rank(), ranks.ranks());
  TrainConfig own = config;
  if (ranks.ranks() > 1) {
    for (DriveSpec& drive : own.nvme) {
      drive.path = rank_directory(drive.path, ranks.rank()).string();
    }
  }
  TrainOutcome outcome;
  try {
    // Each step waits for the slowest rank.
    const int64_t threads = ranks.least(ranks.cpu_threads());
    if (ranks.ranks() > 1 && own.threads == 0) own.threads = threads;
    ranks.require_shared_output();
    outcome = Run(own, config, observer, ranks).run(stop_requested);
    observer.finished(outcome);
  } catch (const AgreedError& error) {
    // Before the ranks part: a launcher ends those that are left when the first has failed.
    observer.failed(error);
    ranks.close();
    throw;
  } catch (const comm::RankFailure&) {
    throw;
  } catch (const std::exception& error) {
    if (ranks.ranks() == 1) throw;
    ranks.give_up(error.what());
  }
  ranks.close();
  return outcome;
}

}  // namespace strata::train
