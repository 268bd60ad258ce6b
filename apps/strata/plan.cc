#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/strata/commands.h"
#include "apps/strata/plan_report.h"
#include "base/bytes.h"
#include "base/error.h"
#include "gpu/cuda/scratch.h"
#include "gpu/host/host_device.h"
#include "model/known_models.h"
#include "pipeline/cluster.h"
#include "pipeline/collective_cost.h"
#include "train/config.h"

namespace strata::app {
namespace {

using pipeline::Tier;

struct Arguments {
  std::string config;
  std::string nvme_bytes;
  std::vector<std::pair<std::string, std::string>> keys;  // of the configuration
  int64_t ranks = 1;
  int64_t ranks_per_node = 0;     // 0: the profile's
  int64_t global_batch_size = 0;  // sequences; 0: each rank takes its own
  std::optional<int64_t> scaling;
  std::string layout = "own";
  bool durable = false;
  bool no_advice = false;
  bool json = false;
};

/// Keys of the configuration that a plan depends on, as `--sequence-len` or `--sequence_len`.
constexpr std::array kKeys{"profile",
                           "model",
                           "sequence_len",
                           "micro_batch_size",
                           "gradient_accumulation_steps",
                           "device_memory",
                           "host_memory",
                           "offload",
                           "optimizer_state",
                           "compute_dtype",
                           "sharding",
                           "shard_group_size",
                           "reduce_dtype"};

constexpr int64_t kMostRanks = 65536;
constexpr std::string_view kScaling = "1024";  // where nobody says how far

/// Compute capability whose scratch a plan for a GPU has; older ones want 24 MiB less.
constexpr int kNewestMajor = 9;

struct ChosenModel {
  std::string name, note;
  model::LlamaConfig config;
};

ChosenModel find_model(const std::string& name) {
  if (const model::KnownModel* known = model::find_known_model(name)) {
    return {name, std::string(known->note), known->config()};
  }
  if (!std::filesystem::exists(name)) {
    std::vector<std::string_view> names;
    for (const model::KnownModel& known : model::known_models()) names.push_back(known.name);
    throw usage_error(
        fmt::format("model '{}' is neither a directory with a config.json nor a known model; those "
                    "are {}",
                    name, fmt::join(names, ", ")));
  }
  return {name, "", model::read_llama_config(name)};
}

/// What a profile's memory leaves to a plan where nobody says how much: the system has the rest.
size_t without_system(size_t bytes) { return bytes - bytes / 16; }

/// The drives that the configuration names, which need not be there; without a configuration, those
/// of the profile.
size_t nvme_bytes_of(const train::TrainConfig& config, const Arguments& arguments,
                     const pipeline::MachineProfile& profile) {
  const size_t all = without_system(profile.nvme_bytes);
  if (!arguments.nvme_bytes.empty()) return parse_bytes(arguments.nvme_bytes);
  if (arguments.config.empty()) return all;
  size_t sum = 0;
  for (const train::DriveSpec& drive : config.nvme) {
    sum += drive.limit_bytes.value_or(all / config.nvme.size());
  }
  return sum;
}

pipeline::PlanRequest request_of(const train::TrainConfig& config, const Arguments& arguments,
                                 const pipeline::MachineProfile& profile) {
  pipeline::PlanRequest request{.shape = {.micro_batches = config.gradient_accumulation_steps,
                                          .tokens = config.micro_batch_size * config.sequence_len,
                                          .max_sequences = config.micro_batch_size},
                                .sequence_length = config.sequence_len,
                                .moments = config.optimizer_state,
                                .clipping = config.max_grad_norm > 0,
                                .durable = arguments.durable};
  request.budget = {
      .device_bytes = config.device_memory.value_or(profile.device_memory_bytes),
      .host_bytes = config.host_memory.value_or(without_system(profile.host_memory_bytes)),
      .nvme_bytes = nvme_bytes_of(config, arguments, profile)};
  if (config.weight_slots) request.fixed.slots = static_cast<int>(*config.weight_slots);
  switch (config.offload) {
    case train::OffloadChoice::kAuto:
      break;
    case train::OffloadChoice::kNone:
      request.fixed.offload = Tier::kDevice;
      break;
    case train::OffloadChoice::kHost:
      request.fixed.offload = Tier::kHost;
      break;
    case train::OffloadChoice::kNvme:
      request.fixed.offload = Tier::kNvme;
      // As a run with that configuration would.
      request.durable = arguments.durable ||
                        (!arguments.config.empty() && config.commit == train::CommitChoice::kStep);
      break;
  }
  return request;
}

void check_number(std::string_view flag, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return;
  throw usage_error(
      fmt::format("{} is {}; it must be between {} and {}", flag, value, least, most));
}

void check_ranks(const Arguments& arguments) {
  check_number("--ranks", arguments.ranks, 1, kMostRanks);
  check_number("--ranks-per-node", arguments.ranks_per_node, 0, 1024);
  check_number("--global-batch-size", arguments.global_batch_size, 0, int64_t{1} << 31);
  if (arguments.scaling) check_number("--scaling", *arguments.scaling, 1, kMostRanks);
  if (arguments.layout != "own" && arguments.layout != "classic") {
    throw usage_error(fmt::format("--layout is '{}'; it must be own or classic", arguments.layout));
  }
}

/// More ranks than the profile's node has share its network; fewer leave the rest of it unused.
void set_ranks_per_node(pipeline::MachineProfile& profile, int asked) {
  if (asked == 0) return;
  if (profile.ranks_per_node > 0 && asked > profile.ranks_per_node) {
    profile.network_bytes_per_s *= static_cast<double>(profile.ranks_per_node) / asked;
  }
  profile.ranks_per_node = asked;
}

pipeline::ClusterRequest cluster_request_of(const train::TrainConfig& config,
                                            const Arguments& arguments,
                                            const pipeline::MachineProfile& profile) {
  return {.rank = request_of(config, arguments, profile),
          .sharding = config.sharding,
          .ranks = static_cast<int>(arguments.ranks),
          .shard_group = static_cast<int>(config.shard_group_size),
          .reduce_dtype = config.reduce_dtype,
          .sequences = arguments.global_batch_size};
}

/// Throws the error that is being handled, with what other shardings would do if nothing fits.
[[noreturn]] void refuse(const Error& error, const model::Llama& llama,
                         const gpu::Operators& operators, const pipeline::MachineProfile& profile,
                         const pipeline::ClusterRequest& request) {
  if (error.kind() != ErrorKind::kDoesNotFit || request.ranks == 1) throw;
  const auto figures = pipeline::cluster_figures(llama, operators, profile, request);
  const auto advice = pipeline::advise_on_cluster(figures);
  std::string message = error.what();
  if (advice.least) {
    message += fmt::format("; {} fits", name_of(figures.shardings[*advice.least].ranks.sharding));
  } else if (!advice.needs.empty()) {
    message +=
        fmt::format("; {}: {}", name_of(advice.needs.front().need), advice.needs.front().reason);
  }
  throw Error(ErrorKind::kDoesNotFit, message);
}

RanksReport ranks_report(const pipeline::Foretold& foretold, const model::Llama& llama,
                         const gpu::Operators& operators, const pipeline::MachineProfile& profile,
                         const pipeline::ClusterRequest& request, const Arguments& arguments) {
  RanksReport report{.request = request,
                     .ranks_per_node = pipeline::ranks_per_node_of(profile),
                     .forecast = pipeline::forecast_of(foretold),
                     .alone = {},
                     .scaling = {}};
  if (arguments.scaling) {
    report.scaling = pipeline::forecast_scaling(llama, operators, profile, request,
                                                static_cast<int>(*arguments.scaling));
  }
  if (arguments.no_advice || request.ranks == 1) return report;
  pipeline::ClusterRequest alone = request;
  alone.ranks = 1;
  alone.sharding = pipeline::Sharding::kNoShard;
  alone.sequences = 0;
  alone.rank.shape = foretold.plan.shape;
  report.alone = pipeline::forecast(llama, operators, profile, alone);
  report.figures = pipeline::cluster_figures(llama, operators, profile, request);
  report.advice = pipeline::advise_on_cluster(*report.figures);
  return report;
}

void run_classic(const train::TrainConfig& config, const Arguments& arguments,
                 const std::string& name, const model::Llama& llama,
                 const gpu::Operators& operators) {
  const auto ranks = static_cast<int>(arguments.ranks);
  print_classic({.model_name = name,
                 .llama = &llama,
                 .operators = &operators,
                 .shape = {.micro_batches = config.gradient_accumulation_steps,
                           .tokens = config.micro_batch_size * config.sequence_len,
                           .max_sequences = config.micro_batch_size},
                 .ranks = ranks,
                 .shard_group = static_cast<int>(config.shard_group_size),
                 .reduce_dtype = config.reduce_dtype,
                 .moments = config.optimizer_state},
                arguments.json);
}

void run(const Arguments& arguments) {
  check_ranks(arguments);
  const bool is_classic = arguments.layout == "classic";
  train::TrainConfig config;
  if (!arguments.config.empty()) config = train::read_config(arguments.config);
  for (const auto& [key, text] : arguments.keys) train::set(config, key, text);
  train::TrainConfig without_drives = config;  // which a plan does not need
  without_drives.offload = train::OffloadChoice::kAuto;
  if (is_classic && config.profile.empty()) without_drives.profile = "h100";
  train::check(without_drives, {"profile", "model"});
  pipeline::MachineProfile profile = pipeline::find_profile(without_drives.profile);
  set_ranks_per_node(profile, static_cast<int>(arguments.ranks_per_node));
  const ChosenModel chosen = find_model(config.model);
  if (config.sequence_len > chosen.config.max_position_embeddings) {
    throw usage_error(fmt::format("sequence_len is {}, and model '{}' has {} positions; lower it",
                                  config.sequence_len, chosen.name,
                                  chosen.config.max_position_embeddings));
  }
  const model::Llama llama(chosen.config, config.compute_dtype, config.sequence_len);
  const auto host = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB});
  const auto cuda = gpu::cuda::operator_sizes(kNewestMajor);
  const gpu::Operators& operators = profile.device == "cuda" ? *cuda : host->operators();
  if (is_classic) {
    run_classic(config, arguments, chosen.name, llama, operators);
    return;
  }
  const pipeline::ClusterRequest cluster = cluster_request_of(config, arguments, profile);
  PlanReport report{.model_name = chosen.name,
                    .model_note = chosen.note,
                    .llama = &llama,
                    .profile = &profile,
                    .request = pipeline::rank_request(cluster, profile),
                    .foretold = {},
                    .advice = {},
                    .ranks = {}};
  try {
    report.foretold = pipeline::choose_plan(llama, operators, profile, report.request);
  } catch (const Error& error) {
    refuse(error, llama, operators, profile, cluster);
  }
  if (arguments.ranks > 1 || arguments.scaling) {
    report.ranks = ranks_report(report.foretold, llama, operators, profile, cluster, arguments);
  }
  if (!arguments.no_advice) {
    report.advice = pipeline::advise(report.foretold, llama, operators, profile, report.request);
  }
  if (arguments.json) {
    print_json(report);
  } else {
    print_table(report);
  }
}

}  // namespace

void add_plan(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("plan", "Foretell a run: memory, time of a step and what bounds it");
  command->add_option("config", arguments->config, "YAML file of 'strata train'; flags overrule it")
      ->type_name("CONFIG.yaml");
  command
      ->add_option(
          "--nvme-bytes,--nvme_bytes", arguments->nvme_bytes,
          "NVMe for the plan; 0: none; left out: what CONFIG.yaml names, or without one the "
          "profile's less a sixteenth")
      ->type_name("BYTES");
  command->add_option("--ranks", arguments->ranks, "Processes, each with a device")->type_name("N");
  command
      ->add_option("--ranks-per-node,--ranks_per_node", arguments->ranks_per_node,
                   "That share a machine's links; left out: the profile's")
      ->type_name("N");
  command
      ->add_option("--global-batch-size,--global_batch_size", arguments->global_batch_size,
                   "Sequences of a step, divided among ranks; left out: each rank takes "
                   "micro_batch_size times gradient_accumulation_steps")
      ->type_name("N");
  command
      ->add_option("--scaling", arguments->scaling,
                   "Foretell 1, 2, 4, ... ranks too, up to so many")
      ->expected(0, 1)
      ->default_str(std::string(kScaling))
      ->type_name("[N]");
  command
      ->add_option("--layout", arguments->layout,
                   "classic: the literature's 20 bytes a parameter beside this program's, and no "
                   "plan; needs no profile")
      ->type_name("own|classic");
  for (const char* name : kKeys) {
    const train::ConfigKey& key = train::find_key(name);
    std::string dashed = name;
    std::replace(dashed.begin(), dashed.end(), '_', '-');
    const std::string flags =
        dashed == name ? fmt::format("--{}", name) : fmt::format("--{},--{}", dashed, name);
    std::string help(key.help);
    if (key.name == "profile") {
      help = fmt::format("The machine: a file, or one of {}",
                         fmt::join(pipeline::shipped_profiles(), ", "));
    } else if (key.name == "model") {
      help =
          "A Hugging Face directory, a config.json, or the name of a known model, e.g. llama2-13b";
    } else if (key.name == "device_memory") {
      help = "For the plan; left out: the profile's";
    } else if (key.name == "host_memory") {
      help = "For the plan; left out: the profile's less a sixteenth";
    }
    command
        ->add_option_function<std::string>(
            flags,
            [arguments, key = std::string(name)](const std::string& text) {
              arguments->keys.emplace_back(key, text);
            },
            help)
        ->type_name(std::string(key.type));
  }
  command->add_flag("--durable", arguments->durable,
                    "All state on NVMe, in two slots, so that each step is committed");
  command->add_flag("--no-advice", arguments->no_advice,
                    "Do not plan what more memory, drives or tokens would give");
  command->add_flag("--json", arguments->json, "Print JSON (docs/plan.md)");
  command->footer(fmt::format(
      "Examples:\n"
      "  strata plan --profile rtx4090-server --model llama2-13b --sequence-len 2048 \\\n"
      "      --micro-batch-size 4 --gradient-accumulation-steps 8 --host-memory 120GiB\n"
      "  strata plan config.yaml --profile h100 --json\n"
      "  strata plan --profile h100 --model llama2-7b --sequence-len 4096 --ranks 64 \\\n"
      "      --sharding hybrid_shard --scaling 1024\n"
      "  strata plan --model llama2-7b --ranks 32 --layout classic\n"
      "Where updates are speculated, {:.0f}% of the steps are assumed to be clipped and made "
      "again.\n"
      "Exit code 3 where nothing fits; the message says what would.",
      100 * pipeline::kAssumedClippedSteps));
  command->callback([arguments] { run(*arguments); });
}

}  // namespace strata::app
