#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "apps/strata/commands.h"
#include "apps/strata/console.h"
#include "base/bytes.h"
#include "base/error.h"
#include "train/config.h"
#include "train/progress.h"
#include "train/trainer.h"

namespace strata::app {
namespace {

volatile std::sig_atomic_t stop_signal = 0;

extern "C" void request_stop(int signal) {
  stop_signal = signal;
  std::signal(signal, SIG_DFL);  // a second one ends the process at once
}

void print_tier(const pipeline::Plan& plan, pipeline::Tier tier) {
  const auto sums = plan.bytes_by_purpose(tier);
  std::string parts;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i] == 0) continue;
    parts += fmt::format("{}{} {}", parts.empty() ? "" : ", ",
                         name_of(static_cast<pipeline::Purpose>(i)), format_bytes(sums[i]));
  }
  say(fmt::format("{:<7} {:>10}  ({})", name_of(tier), format_bytes(plan.bytes(tier)), parts));
}

/// A line for each way in which units rest: "state   4 units host: embedding, block 0 to block 2".
void print_state(const train::RunSummary& run) {
  const auto& units = run.llama.units();
  const auto& homes = run.plan.placement.units;
  std::vector<bool> told(units.size(), false);
  std::string_view head = "state";
  for (size_t i = 0; i < units.size(); ++i) {
    if (told[i]) continue;
    std::string names;
    for (size_t first = i; first < units.size(); ++first) {
      if (homes[first] != homes[i]) continue;
      size_t last = first;
      while (last + 1 < units.size() && homes[last + 1] == homes[i]) ++last;
      names += fmt::format("{}{}{}", names.empty() ? "" : ", ", units[first].name,
                           last > first ? fmt::format(" to {}", units[last].name) : "");
      for (; first <= last; ++first) told[first] = true;
      first = last;
    }
    const auto count = std::count(homes.begin(), homes.end(), homes[i]);
    say(fmt::format("{:<7} {} unit{} {}: {}", head, count, count == 1 ? "" : "s",
                    describe(homes[i]), names));
    head = "";
  }
  const pipeline::Placement& placement = run.plan.placement;
  if (placement.boundaries != pipeline::Tier::kDevice) {
    say(fmt::format("        boundaries between units: {}", name_of(placement.boundaries)));
  }
}

/// What the numbers that follow are of.
void print_shards(const pipeline::RankLayout& layout) {
  std::string copies;
  if (layout.replicas() > 1 && layout.shard_ranks > 1) {
    copies = fmt::format(", in {} groups that each have all of it", layout.replicas());
  }
  say(fmt::format("shards  {}: a rank has {} of the state at rest{}; below is what rank 0 has",
                  name_of(layout.sharding),
                  layout.shard_ranks > 1 ? fmt::format("1/{}", layout.shard_ranks) : "all",
                  copies));
}

/// What was foretold beside what happened.
void print_lanes(const train::TrainOutcome& outcome) {
  if (outcome.lanes.empty()) return;
  say(fmt::format("time    foretold {}, measured {} (median); the last one by lanes:",
                  train::format_seconds(outcome.predicted_step_s),
                  train::format_seconds(outcome.measured_step_s)));
  for (const train::LaneReport& lane : outcome.lanes) {
    say(fmt::format("        {:<9} foretold busy {:>8}, measured {:>8}{}", lane.name,
                    train::format_seconds(lane.predicted_s), train::format_seconds(lane.measured_s),
                    lane.moved_bytes > 0 ? ", " + format_bytes(lane.moved_bytes) : ""));
  }
}

std::string describe_interruption(const train::TrainOutcome& outcome) {
  std::string kept;
  if (!outcome.checkpoint.empty()) {
    kept = fmt::format("saved in '{}'", outcome.checkpoint.string());
  } else if (outcome.committed) {
    kept = "kept on the drives";
  } else {
    return fmt::format("interrupted after step {}; nothing is saved, as save_strategy is no",
                       outcome.step);
  }
  return fmt::format(
      "interrupted after step {}, which is {}; the same command with --resume auto goes on from "
      "there",
      outcome.step, kept);
}

void print_json(const train::TrainOutcome& outcome, const train::TrainMetrics& last) {
  nlohmann::ordered_json json{{"schema", 1},
                              {"ranks", outcome.ranks},
                              {"step", outcome.step},
                              {"loss", nullptr},
                              {"eval_loss", nullptr},
                              {"tokens", last.tokens},
                              {"seconds", outcome.seconds},
                              {"checkpoint", outcome.checkpoint.string()},
                              {"committed", outcome.committed},
                              {"interrupted", outcome.interrupted},
                              {"predicted_step_s", outcome.predicted_step_s},
                              {"measured_step_s", outcome.measured_step_s},
                              {"lanes", nlohmann::ordered_json::array()},
                              {"planned_bytes", outcome.planned_bytes},
                              {"peak_resident_bytes", outcome.peak_resident_bytes}};
  for (const train::LaneReport& lane : outcome.lanes) {
    json["lanes"].push_back({{"name", lane.name},
                             {"bytes", lane.moved_bytes},
                             {"predicted_s", lane.predicted_s},
                             {"measured_s", lane.measured_s}});
  }
  if (last.step > 0) json["loss"] = last.loss;
  if (outcome.eval_loss) json["eval_loss"] = *outcome.eval_loss;
  fmt::print("{}\n", json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
}

class Console final : public train::TrainObserver {
 public:
  Console(const train::TrainConfig& config, bool json) : config_(config), json_(json) {}

  /// Of several ranks the first speaks; the others only heed signals.
  void joined(int rank, int ranks) override {
    is_quiet_ = rank != 0;
    if (!is_quiet_ && ranks > 1) say(fmt::format("ranks   {}", ranks));
  }
  void planned(const train::RunSummary& run) override {
    if (!is_quiet_) tell(run);
  }
  void began() override {
    // From here on there is a step to finish; before, a signal ends the process as usual.
    std::signal(SIGINT, request_stop);
    std::signal(SIGTERM, request_stop);
    // What mpirun and srun pass on to all ranks without ending them a moment later.
    std::signal(SIGUSR1, request_stop);
  }
  void stepped(const train::TrainMetrics& metrics) override {
    if (progress_) {
      progress_->update({.step = metrics.step,
                         .loss = metrics.loss,
                         .tokens_per_second = metrics.tokens_per_second,
                         .seconds = metrics.seconds});
    }
    last_ = metrics;
  }
  void evaluated(const train::EvalMetrics& metrics) override {
    if (!progress_) return;
    progress_->message(
        fmt::format("step {}: held-out loss {:.4f}", metrics.step, metrics.eval_loss));
  }
  void saved(const std::filesystem::path& checkpoint) override {
    if (progress_) progress_->message(fmt::format("saved {}", checkpoint.string()));
  }
  void noted(std::string_view message) override {
    if (is_quiet_) return;
    if (progress_) {
      progress_->message(message);
    } else {
      say(std::string(message));
    }
  }
  void finished(const train::TrainOutcome& outcome) override {
    if (is_quiet_) return;
    progress_->finish();
    print_lanes(outcome);
    say(fmt::format("memory  planned {}, measured at its peak {}, the program itself included",
                    format_bytes(outcome.planned_bytes),
                    format_bytes(outcome.peak_resident_bytes)));
    if (json_) print_json(outcome, last_);
    if (outcome.interrupted) {
      say("strata: " + describe_interruption(outcome));
    } else {
      say(fmt::format("done    {} steps in {}; files are in {}", outcome.step,
                      train::format_duration(outcome.seconds), config_.output_dir));
    }
  }
  void failed(const train::AgreedError& error) override {
    if (is_quiet_) return;
    if (progress_) progress_->finish();
    say(fmt::format("strata: {}", error.what()));
  }

 private:
  void tell(const train::RunSummary& run) {
    int64_t parameters = 0;
    for (const pipeline::UnitSpec& unit : run.llama.units()) parameters += unit.parameter_count;
    const auto units = static_cast<int64_t>(run.llama.units().size());
    say(fmt::format("model   {:.1f} M parameters, {} blocks; {}",
                    static_cast<double>(parameters) / 1e6, units - 2, run.device.description()));
    if (run.ranks > 1) print_shards(run.plan.placement.ranks);
    print_state(run);
    for (const pipeline::Tier tier : pipeline::kTiers) {
      if (run.plan.bytes(tier) > 0) print_tier(run.plan, tier);
    }
    say(fmt::format("time    foretold {} by {} speeds of profile {}",
                    train::format_seconds(run.predicted_step_s),
                    run.profile.measured ? "the measured" : "the assumed", run.profile.name));
    say(fmt::format("data    {} windows to train on, {} held out; {} steps of {} tokens",
                    run.train_windows, run.eval_windows, run.max_steps,
                    run.plan.shape.tokens * run.plan.shape.micro_batches * run.ranks));
    progress_ = std::make_unique<train::ProgressReporter>(
        train::ProgressOptions{.out = stderr,
                               .terminal = train::is_terminal(stderr),
                               .max_steps = run.max_steps,
                               .first_step = run.first_step,
                               .logging_steps = config_.logging_steps});
  }

  const train::TrainConfig& config_;
  bool json_;
  bool is_quiet_ = false;
  std::unique_ptr<train::ProgressReporter> progress_;
  train::TrainMetrics last_;
};

/// A rank was lost: nothing in this process can be relied on to end.
void end_process(const std::string& message, bool should_print) {
  if (should_print) say(fmt::format("strata: {}", message));
  std::_Exit(static_cast<int>(ErrorKind::kFailed));
}

void run(const std::string& config_path,
         const std::vector<std::pair<std::string, std::string>>& flags, bool json) {
  train::TrainConfig config;
  if (!config_path.empty()) config = train::read_config(config_path);
  for (const auto& [key, text] : flags) train::set(config, key, text);
  train::check(config);

  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that went away does not end the run
  Console console(config, json);
  const train::TrainOutcome outcome = train::train(
      config, console, [] { return stop_signal != 0; }, end_process);
  if (outcome.interrupted) {
    throw train::AgreedError(ErrorKind::kInterrupted, describe_interruption(outcome));
  }
}

}  // namespace

void add_train(CLI::App& app) {
  struct Arguments {
    std::string config;
    std::vector<std::pair<std::string, std::string>> flags;
    bool json = false;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("train", "Train a model on text");
  command->add_option("config", arguments->config, "YAML file; each key below may stand in it")
      ->type_name("CONFIG.yaml");
  for (const train::ConfigKey& key : train::config_keys()) {
    command
        ->add_option_function<std::string>(
            "--" + std::string(key.name),
            [arguments, name = std::string(key.name)](const std::string& text) {
              arguments->flags.emplace_back(name, text);
            },
            std::string(key.help))
        ->type_name(std::string(key.type))
        ->default_str(train::get(train::TrainConfig{}, key.name))
        ->group("Keys of CONFIG.yaml");
  }
  command->add_flag("--json", arguments->json, "Print the outcome as JSON on standard output");
  command->footer(
      "Examples:\n"
      "  strata train config.yaml\n"
      "  strata train config.yaml --max_steps 100 --output_dir runs/short\n"
      "  strata train --model model/ --datasets book.txt --output_dir runs/book --offload host\n"
      "  strata train config.yaml --resume auto\n"
      "  mpirun -n 4 strata train config.yaml --device host --sharding full_shard\n"
      "Ctrl-C finishes the step in hand, saves it and exits with 130; of several ranks it ends\n"
      "mpirun, and SIGUSR1 to mpirun is what lets them finish (docs/launching.md).");
  // Left to us, so that a misspelt key is answered with the nearest one.
  command->allow_extras();
  command->callback([command, arguments] {
    for (const std::string& extra : command->remaining()) {
      if (extra.starts_with("--"))
        static_cast<void>(train::find_key(extra.substr(2, extra.find('=') - 2)));
      throw usage_error(fmt::format("'{}' was not expected; see 'strata train --help'", extra));
    }
    run(arguments->config, arguments->flags, arguments->json);
  });
}

}  // namespace strata::app
