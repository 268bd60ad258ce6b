#include <fmt/format.h>

#include <csignal>
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

class Console final : public train::TrainObserver {
 public:
  explicit Console(int64_t logging_steps) : logging_steps_(logging_steps) {}

  void planned(const train::RunSummary& run) override {
    int64_t parameters = 0;
    int64_t resident = 0;
    for (size_t i = 0; i < run.llama.units().size(); ++i) {
      parameters += run.llama.units()[i].parameter_count;
      if (run.plan.placement.unit_home[i] == pipeline::Tier::kDevice) ++resident;
    }
    const auto units = static_cast<int64_t>(run.llama.units().size());
    say(fmt::format("model   {:.1f} M parameters, {} blocks; {}",
                    static_cast<double>(parameters) / 1e6, units - 2, run.device.description()));
    say(fmt::format("state   {} of {} units on the device, {} in host memory", resident, units,
                    units - resident));
    for (const pipeline::Tier tier : pipeline::kTiers) print_tier(run.plan, tier);
    say(fmt::format("data    {} windows to train on, {} held out; {} steps of {} tokens",
                    run.train_windows, run.eval_windows, run.max_steps,
                    run.plan.shape.tokens * run.plan.shape.micro_batches));
    // From here on there is a step to finish; before, a signal ends the process as usual.
    std::signal(SIGINT, request_stop);
    std::signal(SIGTERM, request_stop);
    progress_ = std::make_unique<train::ProgressReporter>(
        train::ProgressOptions{.out = stderr,
                               .terminal = train::is_terminal(stderr),
                               .max_steps = run.max_steps,
                               .first_step = run.first_step,
                               .logging_steps = logging_steps_});
  }
  void stepped(const train::TrainMetrics& metrics) override {
    progress_->update({.step = metrics.step,
                       .loss = metrics.loss,
                       .tokens_per_second = metrics.tokens_per_second,
                       .seconds = metrics.seconds});
    last_ = metrics;
  }
  void evaluated(const train::EvalMetrics& metrics) override {
    progress_->message(
        fmt::format("step {}: held-out loss {:.4f}", metrics.step, metrics.eval_loss));
  }
  void saved(const std::filesystem::path& checkpoint) override {
    progress_->message(fmt::format("saved {}", checkpoint.string()));
  }
  void noted(std::string_view message) override {
    if (progress_) {
      progress_->message(message);
    } else {
      say(std::string(message));
    }
  }
  void finish() {
    if (progress_) progress_->finish();
  }
  [[nodiscard]] const train::TrainMetrics& last() const { return last_; }

 private:
  int64_t logging_steps_;
  std::unique_ptr<train::ProgressReporter> progress_;
  train::TrainMetrics last_;
};

void print_json(const train::TrainOutcome& outcome, const train::TrainMetrics& last) {
  nlohmann::ordered_json json{{"schema", 1},
                              {"step", outcome.step},
                              {"loss", nullptr},
                              {"eval_loss", nullptr},
                              {"tokens", last.tokens},
                              {"seconds", outcome.seconds},
                              {"checkpoint", outcome.checkpoint.string()},
                              {"interrupted", outcome.interrupted},
                              {"planned_bytes", outcome.planned_bytes},
                              {"peak_resident_bytes", outcome.peak_resident_bytes}};
  if (last.step > 0) json["loss"] = last.loss;
  if (outcome.eval_loss) json["eval_loss"] = *outcome.eval_loss;
  fmt::print("{}\n", json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
}

void run(const std::string& config_path,
         const std::vector<std::pair<std::string, std::string>>& flags, bool json) {
  train::TrainConfig config;
  if (!config_path.empty()) config = train::read_config(config_path);
  for (const auto& [key, text] : flags) train::set(config, key, text);
  train::check(config);

  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that went away does not end the run
  Console console(config.logging_steps);
  const train::TrainOutcome outcome =
      train::train(config, console, [] { return stop_signal != 0; });
  console.finish();
  say(fmt::format("memory  planned {}, measured at its peak {}, the program itself included",
                  format_bytes(outcome.planned_bytes), format_bytes(outcome.peak_resident_bytes)));
  if (json) print_json(outcome, console.last());
  if (outcome.interrupted) {
    throw Error(
        ErrorKind::kInterrupted,
        fmt::format("interrupted after step {}, which is saved in '{}'; the same command with "
                    "--resume auto goes on from there",
                    outcome.step, outcome.checkpoint.string()));
  }
  say(fmt::format("done    {} steps in {}; files are in {}", outcome.step,
                  train::format_duration(outcome.seconds), config.output_dir));
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
        ->group("Keys of CONFIG.yaml");
  }
  command->add_flag("--json", arguments->json, "Print the outcome as JSON on standard output");
  command->footer(
      "Examples:\n"
      "  strata train config.yaml\n"
      "  strata train config.yaml --max_steps 100 --output_dir runs/short\n"
      "  strata train --model model/ --datasets book.txt --output_dir runs/book --offload host\n"
      "  strata train config.yaml --resume auto\n"
      "Ctrl-C finishes the step in hand, saves it and exits with 130.");
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
