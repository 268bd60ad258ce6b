#include "train/config.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <set>
#include <type_traits>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"

namespace strata::train {
namespace {

// ---- Values as text: for each type of member a name for help texts, a parser and a printer. ----

template <class Enum>
using Choices = std::span<const std::pair<std::string_view, Enum>>;

/// The names of an enum's values; overloads tell the enums apart by the (unused) argument.
Choices<LrScheduler> choices_of(LrScheduler) {
  static constexpr std::pair<std::string_view, LrScheduler> kChoices[] = {
      {"cosine", LrScheduler::kCosine},
      {"linear", LrScheduler::kLinear},
      {"constant", LrScheduler::kConstant}};
  return kChoices;
}
Choices<DeviceChoice> choices_of(DeviceChoice) {
  static constexpr std::pair<std::string_view, DeviceChoice> kChoices[] = {
      {"auto", DeviceChoice::kAuto}, {"cuda", DeviceChoice::kCuda}, {"host", DeviceChoice::kHost}};
  return kChoices;
}
Choices<OffloadChoice> choices_of(OffloadChoice) {
  static constexpr std::pair<std::string_view, OffloadChoice> kChoices[] = {
      {"auto", OffloadChoice::kAuto},
      {"none", OffloadChoice::kNone},
      {"host", OffloadChoice::kHost},
      {"nvme", OffloadChoice::kNvme}};
  return kChoices;
}
Choices<CommitChoice> choices_of(CommitChoice) {
  static constexpr std::pair<std::string_view, CommitChoice> kChoices[] = {
      {"step", CommitChoice::kStep}, {"save", CommitChoice::kSave}};
  return kChoices;
}
Choices<SaveStrategy> choices_of(SaveStrategy) {
  static constexpr std::pair<std::string_view, SaveStrategy> kChoices[] = {
      {"steps", SaveStrategy::kSteps}, {"no", SaveStrategy::kNo}};
  return kChoices;
}
Choices<cpu_adam::MomentFormat> choices_of(cpu_adam::MomentFormat) {
  using Format = cpu_adam::MomentFormat;
  static constexpr std::pair<std::string_view, Format> kChoices[] = {
      {"fp32", Format::kF32}, {"bf16", Format::kBf16}, {"int8", Format::kInt8}};
  return kChoices;
}

Choices<DType> choices_of(DType) {
  static constexpr std::pair<std::string_view, DType> kChoices[] = {{"bf16", DType::kBf16},
                                                                    {"fp32", DType::kF32}};
  return kChoices;
}
Choices<pipeline::Sharding> choices_of(pipeline::Sharding) {
  using S = pipeline::Sharding;
  static constexpr std::pair<std::string_view, S> kChoices[] = {
      {"no_shard", S::kNoShard},
      {"shard_optimizer", S::kShardOptimizer},
      {"shard_grad_op", S::kShardGradOp},
      {"full_shard", S::kFullShard},
      {"hybrid_shard", S::kHybridShard}};
  return kChoices;
}
Choices<SourceType> choices_of(SourceType) {
  static constexpr std::pair<std::string_view, SourceType> kChoices[] = {
      {"text", SourceType::kText},
      {"tokens_u16", SourceType::kTokensU16},
      {"tokens_u32", SourceType::kTokensU32}};
  return kChoices;
}

template <class Enum>
std::string_view name_in(Choices<Enum> choices, Enum value) {
  for (const auto& [name, choice] : choices) {
    if (choice == value) return name;
  }
  return "";
}

template <class Enum>
std::string names_of(Choices<Enum> choices, std::string_view separator) {
  std::string names;
  for (const auto& [name, value] : choices) {
    names += fmt::format("{}{}", names.empty() ? "" : separator, name);
  }
  return names;
}

[[noreturn]] void refuse(std::string_view key, std::string_view expected, std::string_view text) {
  throw usage_error(fmt::format("{} must be {}, not '{}'", key, expected, text));
}

template <class Enum>
Enum parse_choice(std::string_view key, std::string_view text) {
  const Choices<Enum> choices = choices_of(Enum{});
  for (const auto& [name, value] : choices) {
    if (name == text) return value;
  }
  refuse(key, "one of " + names_of(choices, ", "), text);
}

/// `noun` with the bounds of `limits`: "a number from 0 to 10".
std::string expectation(std::string_view noun, const Limits& limits) {
  if (std::isinf(limits.max)) return fmt::format("{} of at least {}", noun, limits.min);
  return fmt::format("{} from {} {} {}", noun, limits.min, limits.below_max ? "to below" : "to",
                     limits.max);
}

bool within(double value, const Limits& limits) {
  return value >= limits.min && (limits.below_max ? value < limits.max : value <= limits.max);
}

template <class Number>
Number parse_number(const ConfigKey& key, std::string_view noun, std::string_view text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value);
  if (code != std::errc{} || stop != end || !within(static_cast<double>(value), key.limits)) {
    refuse(key.name, expectation(noun, key.limits), text);
  }
  return value;
}

void parse(const ConfigKey& key, std::string_view text, int64_t& out) {
  out = parse_number<int64_t>(key, "a whole number", text);
}

void parse(const ConfigKey& key, std::string_view text, double& out) {
  out = parse_number<double>(key, "a number", text);
}

void parse(const ConfigKey& key, std::string_view text, bool& out) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  const auto is = [&](std::string_view word) { return lower == word; };
  if (is("true") || is("yes") || is("on")) {
    out = true;
  } else if (is("false") || is("no") || is("off")) {
    out = false;
  } else {
    refuse(key.name, "true or false", text);
  }
}

void parse(const ConfigKey&, std::string_view text, std::string& out) { out = text; }

/// An amount above 0, or nothing.
std::optional<size_t> parse_amount(std::string_view key, std::string_view expected,
                                   std::string_view text, std::string_view amount) {
  if (text.empty()) return std::nullopt;
  try {
    if (const size_t bytes = parse_bytes(amount); bytes > 0) return bytes;
  } catch (const Error&) {
  }
  refuse(key, expected, text);
}

void parse(const ConfigKey& key, std::string_view text, std::optional<size_t>& out) {
  out = parse_amount(key.name, "an amount of memory such as 512MiB or 24GiB", text, text);
}

void parse(const ConfigKey& key, std::string_view text, std::optional<double>& out) {
  std::string_view amount = text;
  if (amount.ends_with("/s")) amount.remove_suffix(2);
  const auto bytes =
      parse_amount(key.name, "an amount for each second such as 800MB/s or 12GiB/s", text, amount);
  out = bytes ? std::optional(static_cast<double>(*bytes)) : std::nullopt;
}

/// PATH or PATH:TYPE. A colon that no type follows belongs to the path.
SourceSpec parse_source(std::string_view key, std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  SourceSpec source{std::string(text), SourceType::kAuto};
  const size_t colon = text.rfind(':');
  if (colon != std::string_view::npos) {
    for (const auto& [name, type] : choices_of(SourceType{})) {
      if (text.substr(colon + 1) == name) source = {std::string(text.substr(0, colon)), type};
    }
  }
  if (source.path.empty()) throw usage_error(fmt::format("{} has an entry without a path", key));
  return source;
}

void parse(const ConfigKey& key, std::string_view text, std::vector<SourceSpec>& out) {
  std::vector<SourceSpec> sources;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    sources.push_back(parse_source(key.name, text.substr(0, comma)));
    if (comma == text.size() - 1) {
      throw usage_error(fmt::format("{} ends with a comma", key.name));
    }
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  out = std::move(sources);
}

void parse(const ConfigKey& key, std::string_view text, std::optional<int64_t>& out) {
  if (text.empty()) {
    out.reset();
  } else {
    out = parse_number<int64_t>(key, "a whole number", text);
  }
}

/// PATH or PATH:BYTES. A colon that no amount follows belongs to the path.
DriveSpec parse_drive(std::string_view key, std::string_view text) {
  DriveSpec drive{std::string(text), std::nullopt};
  const size_t colon = text.rfind(':');
  const bool amount = colon != std::string_view::npos && colon + 1 < text.size() &&
                      text[colon + 1] >= '0' && text[colon + 1] <= '9';
  if (amount) {
    drive = {std::string(text.substr(0, colon)),
             parse_amount(key, "directories with amounts such as /mnt/drive:500GB", text,
                          text.substr(colon + 1))};
  }
  if (drive.path.empty()) throw usage_error(fmt::format("{} has an entry without a path", key));
  return drive;
}

void parse(const ConfigKey& key, std::string_view text, std::vector<DriveSpec>& out) {
  std::vector<DriveSpec> drives;
  while (!text.empty()) {
    text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    const size_t comma = text.find(',');
    drives.push_back(parse_drive(key.name, text.substr(0, comma)));
    if (comma == text.size() - 1) {
      throw usage_error(fmt::format("{} ends with a comma", key.name));
    }
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  out = std::move(drives);
}

template <class Enum>
requires std::is_enum_v<Enum>
void parse(const ConfigKey& key, std::string_view text, Enum& out) {
  out = parse_choice<Enum>(key.name, text);
}

std::string text_of(int64_t value) { return fmt::format("{}", value); }
std::string text_of(double value) { return fmt::format("{}", value); }  // shortest that reads back
std::string text_of(bool value) { return value ? "true" : "false"; }
std::string text_of(const std::string& value) { return value; }

/// Exact, in the unit that makes it shortest.
std::string text_of(const std::optional<size_t>& value) {
  if (!value) return "";
  constexpr std::array<std::pair<std::string_view, size_t>, 7> kUnits{{{"KiB", kKiB},
                                                                       {"MiB", kMiB},
                                                                       {"GiB", kGiB},
                                                                       {"TiB", kKiB * kGiB},
                                                                       {"MB", 1'000'000},
                                                                       {"GB", 1'000'000'000},
                                                                       {"TB", 1'000'000'000'000}}};
  std::string shortest = fmt::format("{}", *value);
  for (const auto& [name, bytes] : kUnits) {
    if (*value % bytes != 0) continue;
    std::string text = fmt::format("{}{}", *value / bytes, name);
    if (text.size() < shortest.size()) shortest = std::move(text);
  }
  return shortest;
}

std::string text_of(const std::optional<double>& value) {
  return value ? text_of(std::optional(static_cast<size_t>(*value))) : "";
}

std::string text_of(const std::optional<int64_t>& value) { return value ? text_of(*value) : ""; }

std::string text_of(const DriveSpec& drive) {
  const std::string amount = text_of(drive.limit_bytes);
  return amount.empty() ? drive.path : fmt::format("{}:{}", drive.path, amount);
}

std::string text_of(const std::vector<DriveSpec>& drives) {
  std::string text;
  for (const DriveSpec& drive : drives) text += (text.empty() ? "" : ",") + text_of(drive);
  return text;
}

std::string text_of(const std::vector<SourceSpec>& sources) {
  std::string text;
  for (const SourceSpec& source : sources) {
    const std::string_view type = name_in(choices_of(source.type), source.type);
    text += fmt::format("{}{}{}{}", text.empty() ? "" : ",", source.path, type.empty() ? "" : ":",
                        type);
  }
  return text;
}

template <class Enum>
requires std::is_enum_v<Enum> std::string text_of(Enum value) {
  return std::string(name_in(choices_of(value), value));
}

template <class Value>
std::string_view type_of() {
  if constexpr (std::is_same_v<Value, int64_t> || std::is_same_v<Value, std::optional<int64_t>>) {
    return "N";
  }
  if constexpr (std::is_same_v<Value, double>) return "NUMBER";
  if constexpr (std::is_same_v<Value, bool>) return "true|false";
  if constexpr (std::is_same_v<Value, std::string>) return "PATH";
  if constexpr (std::is_same_v<Value, std::optional<size_t>>) return "BYTES";
  if constexpr (std::is_same_v<Value, std::optional<double>>) return "BYTES/s";
  if constexpr (std::is_same_v<Value, std::vector<SourceSpec>>) return "PATH[:TYPE],...";
  if constexpr (std::is_same_v<Value, std::vector<DriveSpec>>) return "PATH[:BYTES],...";
  if constexpr (std::is_enum_v<Value>) {
    static const std::string names = names_of(choices_of(Value{}), "|");
    return names;
  }
}

// ---- The table. ----

template <auto kMember>
ConfigKey key_of(std::string_view name, std::string_view help, Limits limits = {}) {
  using Value = std::remove_cvref_t<decltype(std::declval<TrainConfig&>().*kMember)>;
  return {name,
          type_of<Value>(),
          help,
          limits,
          [](const ConfigKey& key, TrainConfig& config, std::string_view text) {
            parse(key, text, config.*kMember);
          },
          [](const TrainConfig& config) { return text_of(config.*kMember); }};
}

constexpr double kManySteps = 1e12;

const auto& table() {
  using C = TrainConfig;
  static const std::array keys{
      key_of<&C::model>("model", "a Hugging Face directory, or a config.json to start afresh"),
      key_of<&C::datasets>(
          "datasets",
          "files to train on: *.txt and *.md as bytes, *.bin as tokens; TYPE is text, tokens_u16 "
          "or tokens_u32 where the name does not say it"),
      key_of<&C::eval_datasets>("eval_datasets",
                                "files to evaluate on, instead of a part of datasets"),
      key_of<&C::val_set_size>(
          "val_set_size",
          "part of datasets that is held out for evaluation, from the end of each file; not used "
          "with eval_datasets",
          {0, 0.9}),
      key_of<&C::sequence_len>("sequence_len", "tokens of one sequence", {1, 1 << 20}),
      key_of<&C::micro_batch_size>("micro_batch_size", "sequences computed at once, on each rank",
                                   {1, 1 << 20}),
      key_of<&C::gradient_accumulation_steps>("gradient_accumulation_steps",
                                              "micro-batches of one optimizer step, on each rank",
                                              {1, 1 << 20}),
      key_of<&C::max_steps>("max_steps", "optimizer steps; 0: as many as num_epochs takes",
                            {0, kManySteps}),
      key_of<&C::num_epochs>("num_epochs", "passes over the data, where max_steps is 0", {1, 1e6}),
      key_of<&C::learning_rate>("learning_rate", "the highest learning rate", {0, 10}),
      key_of<&C::lr_scheduler>("lr_scheduler", "how the learning rate falls after the warm-up"),
      key_of<&C::warmup_steps>("warmup_steps", "steps in which the learning rate rises",
                               {0, kManySteps}),
      key_of<&C::cosine_min_lr_ratio>("cosine_min_lr_ratio",
                                      "what cosine falls to, as a part of learning_rate", {0, 1}),
      key_of<&C::weight_decay>("weight_decay", "of matrices; norms and biases do not decay",
                               {0, 10}),
      key_of<&C::adam_beta1>("adam_beta1", "decay of the first moment", {0, 1, true}),
      key_of<&C::adam_beta2>("adam_beta2", "decay of the second moment", {0, 1, true}),
      key_of<&C::adam_epsilon>("adam_epsilon", "added to the root of the second moment",
                               {1e-20, 1}),
      key_of<&C::max_grad_norm>(
          "max_grad_norm", "gradients are scaled down to this global norm; 0: never", {0, 1e9}),
      // Up to what a double holds exactly, so that any JSON reader gets it right too.
      key_of<&C::seed>("seed", "of first weights and of the order of the data", {0, 0x1p53 - 1}),
      key_of<&C::shuffle>("shuffle", "whether each epoch has an order of its own"),
      key_of<&C::output_dir>("output_dir", "directory for checkpoints, metrics and the model"),
      key_of<&C::resume>("resume",
                         "a checkpoint to go on from; auto: the latest in output_dir, if any"),
      key_of<&C::save_strategy>("save_strategy",
                                "steps: checkpoints every save_steps and at the end; no: none, "
                                "for trials and for runs that are committed on drives"),
      key_of<&C::save_steps>("save_steps", "steps between checkpoints; 0: only at the end",
                             {0, kManySteps}),
      key_of<&C::save_total_limit>("save_total_limit", "checkpoints to keep; 0: all",
                                   {0, kManySteps}),
      key_of<&C::eval_steps>("eval_steps", "steps between evaluations; 0: only at the end",
                             {0, kManySteps}),
      key_of<&C::eval_max_batches>("eval_max_batches", "micro-batches of one evaluation; 0: all",
                                   {0, kManySteps}),
      key_of<&C::logging_steps>("logging_steps", "steps between reports", {1, kManySteps}),
      key_of<&C::device>("device", "what computes; auto: cuda where there is one, else host"),
      key_of<&C::device_memory>("device_memory",
                                "the most to use of the device's memory; empty: what is free"),
      key_of<&C::host_memory>(
          "host_memory", "the most to use of host memory, on each rank; empty: what is needed"),
      key_of<&C::nvme>(
          "nvme",
          "directories on NVMe drives, one a drive, in which state may rest, each with "
          "the most to use of it; of several ranks each has a subdirectory rank-N of its own, and "
          "may use that much"),
      key_of<&C::commit>("commit",
                         "where all state rests on nvme: whether each step is kept for good (step, "
                         "which takes twice the room), or only what checkpoints save (save)"),
      key_of<&C::threads>(
          "threads",
          "of the CPU, for each rank; 0: one for each core, divided among the ranks of a host",
          {0, 4096}),
      key_of<&C::offload>("offload",
                          "where weights, gradients and optimizer state rest: on the device "
                          "(none), in host memory (host) or on drives (nvme); auto: wherever makes "
                          "the step fastest of what fits"),
      key_of<&C::weight_slots>(
          "weight_slots",
          "buffers on the device that offloaded weights use; empty: as many as "
          "the plan finds best",
          {1, 1024}),
      key_of<&C::profile>("profile",
                          "the machine's speeds, by which the plan is chosen and foretold: a file, "
                          "or the name of a machine (strata plan --help lists them)"),
      key_of<&C::trace>("trace",
                        "a file for a timeline of the last step, measured and predicted, for "
                        "Perfetto or chrome://tracing"),
      key_of<&C::optimizer_state>("optimizer_state",
                                  "how Adam's moments rest; fp32 is exact, bf16 and int8 round "
                                  "stochastically (docs/adam.md)"),
      key_of<&C::compute_dtype>("compute_dtype",
                                "what is computed in; fp32 is slow and for reference"),
      key_of<&C::sharding>(
          "sharding",
          "what the ranks that mpirun, torchrun or srun starts divide among themselves: nothing "
          "(no_shard, DDP), optimizer state (shard_optimizer, ZeRO-1), gradients too "
          "(shard_grad_op, ZeRO-2), weights too (full_shard, ZeRO-3; if not given), or that within "
          "groups that are replicas of each other (hybrid_shard); not used by a single rank"),
      key_of<&C::shard_group_size>("shard_group_size",
                                   "ranks of a group of hybrid_shard, consecutive ones; 0: those "
                                   "of one host; not used by the others",
                                   {0, 1 << 20}),
      key_of<&C::reduce_dtype>("reduce_dtype",
                               "what gradients are summed over ranks in; bf16 sends half as much "
                               "and rounds (if not given, fp32)"),
      key_of<&C::rank_timeout>("rank_timeout",
                               "seconds without a sign of life after which a rank counts as stuck, "
                               "and all ranks end; also how long ranks wait for each other at the "
                               "start (if not given, 60)",
                               {1, 86400}),
      key_of<&C::upload_bandwidth>(
          "upload_bandwidth", "most that copies to the host device may reach; empty: no limit"),
      key_of<&C::download_bandwidth>(
          "download_bandwidth", "most that copies from the host device may reach; empty: no limit"),
      key_of<&C::nvme_read_bandwidth>("nvme_read_bandwidth",
                                      "most that reads from each drive may reach; empty: no limit"),
      key_of<&C::nvme_write_bandwidth>("nvme_write_bandwidth",
                                       "most that writes to each drive may reach; empty: no limit"),
  };
  return keys;
}

// ---- Names that are nearly right. ----

/// Insertions, deletions and replacements that turn one word into the other (Levenshtein 1966).
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

/// The key that `name` was most likely meant to be; empty where none is near.
std::string_view nearest_key(std::string_view name) {
  std::string_view best;
  size_t best_distance = std::max<size_t>(2, name.size() / 3) + 1;
  for (const ConfigKey& key : table()) {
    // A name cut short is near, however much is missing.
    const bool shortened = name.size() >= 4 && key.name.starts_with(name);
    const size_t distance = shortened ? 1 : edit_distance(name, key.name);
    if (distance < best_distance) {
      best_distance = distance;
      best = key.name;
    }
  }
  return best;
}

// ---- YAML. ----

SourceSpec read_source(const ConfigKey& key, const YAML::Node& node) {
  if (node.IsScalar()) return parse_source(key.name, node.Scalar());
  if (!node.IsMap()) {
    throw usage_error(
        fmt::format("each entry of {} must be a path, or a map of path and type", key.name));
  }
  SourceSpec source;
  for (const auto& entry : node) {
    const std::string& name = entry.first.Scalar();
    if (name != "path" && name != "type") {
      throw usage_error(
          fmt::format("an entry of {} has the keys path and type, not '{}'", key.name, name));
    }
    if (!entry.second.IsScalar()) {
      throw usage_error(fmt::format("{} of an entry of {} must be a single value", name, key.name));
    }
    if (name == "path") {
      source.path = entry.second.Scalar();
    } else {
      source.type = parse_choice<SourceType>(fmt::format("type of an entry of {}", key.name),
                                             entry.second.Scalar());
    }
  }
  if (source.path.empty()) {
    throw usage_error(fmt::format("{} has an entry without a path", key.name));
  }
  return source;
}

std::vector<SourceSpec>* list_member(TrainConfig& config, std::string_view name) {
  if (name == "datasets") return &config.datasets;
  if (name == "eval_datasets") return &config.eval_datasets;
  return nullptr;
}

/// `mark` is left where an error is: at the key, or at the entry of a list.
void set_from_yaml(TrainConfig& config, const ConfigKey& key, const YAML::Node& node,
                   YAML::Mark& mark) {
  std::vector<SourceSpec>* list = list_member(config, key.name);
  if (list != nullptr && node.IsSequence()) {
    std::vector<SourceSpec> sources;
    for (const auto& item : node) {
      mark = item.Mark();
      sources.push_back(read_source(key, item));
    }
    *list = std::move(sources);
  } else if (key.name == "nvme" && node.IsSequence()) {
    std::vector<DriveSpec> drives;
    for (const auto& item : node) {
      mark = item.Mark();
      if (!item.IsScalar()) throw usage_error("each entry of nvme must be PATH or PATH:BYTES");
      drives.push_back(parse_drive(key.name, item.Scalar()));
    }
    config.nvme = std::move(drives);
  } else if (node.IsScalar() || node.IsNull()) {
    key.set(key, config, node.Scalar());
  } else {
    throw usage_error(fmt::format("{} must be a {}, not a {}", key.name,
                                  list != nullptr ? "list" : "single value",
                                  node.IsMap() ? "map" : "list"));
  }
}

[[noreturn]] void refuse_line(const std::filesystem::path& path, const YAML::Mark& mark,
                              std::string_view message) {
  throw usage_error(fmt::format("'{}', line {}: {}", path.string(), mark.line + 1, message));
}

YAML::Node load_document(const std::filesystem::path& path) {
  std::string text;
  try {
    text = read_text_file(path);
  } catch (const Error& error) {
    throw usage_error(error.what());
  }
  // yaml-cpp takes the end of the file for the closing quote where a line break comes before it.
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      throw usage_error(fmt::format("'{}' holds {} YAML documents; a configuration is one",
                                    path.string(), documents.size()));
    }
    if (documents.empty() || documents[0].IsNull()) {
      throw usage_error(
          fmt::format("'{}' is empty; it needs at least model, datasets and "
                      "output_dir",
                      path.string()));
    }
    return documents[0];
  } catch (const YAML::Exception& error) {
    refuse_line(path, error.mark, fmt::format("this is not YAML ({})", error.msg));
  }
}

}  // namespace

std::span<const ConfigKey> config_keys() noexcept { return table(); }

const ConfigKey& find_key(std::string_view name) {
  for (const ConfigKey& key : table()) {
    if (key.name == name) return key;
  }
  const std::string_view nearest = nearest_key(name);
  throw usage_error(nearest.empty()
                        ? fmt::format("there is no key '{}'; the help of train lists all", name)
                        : fmt::format("there is no key '{}'; did you mean {}?", name, nearest));
}

void set(TrainConfig& config, std::string_view name, std::string_view text) {
  const ConfigKey& key = find_key(name);
  key.set(key, config, text);
}

std::string get(const TrainConfig& config, std::string_view name) {
  return find_key(name).get(config);
}

TrainConfig read_config(const std::filesystem::path& path) {
  const YAML::Node root = load_document(path);
  if (!root.IsMap()) refuse_line(path, root.Mark(), "a configuration is a map of keys to values");
  TrainConfig config;
  std::set<std::string, std::less<>> seen;
  for (const auto& entry : root) {
    YAML::Mark mark = entry.first.Mark();
    try {
      if (!entry.first.IsScalar()) throw usage_error("a key must be a single word");
      const ConfigKey& key = find_key(entry.first.Scalar());
      if (!seen.emplace(key.name).second) {
        throw usage_error(fmt::format("{} is given a second time", key.name));
      }
      set_from_yaml(config, key, entry.second, mark);
    } catch (const Error& error) {
      refuse_line(path, mark, error.what());
    }
  }
  return config;
}

void check(const TrainConfig& config, std::initializer_list<std::string_view> required) {
  for (const std::string_view name : required) {
    if (get(config, name).empty()) {
      throw usage_error(
          fmt::format("{0} is missing; give it in the configuration or as --{0}", name));
    }
  }
  if (config.max_steps > 0 && config.warmup_steps > config.max_steps) {
    throw usage_error(fmt::format("warmup_steps ({}) must not be more than max_steps ({})",
                                  config.warmup_steps, config.max_steps));
  }
  if (config.offload == OffloadChoice::kNvme && config.nvme.empty()) {
    throw usage_error(
        "offload is nvme, and nvme names no directory; name one on each drive to use");
  }
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max();
  if (config.micro_batch_size > kMostTokens / config.sequence_len) {
    throw usage_error(
        fmt::format("micro_batch_size ({}) times sequence_len ({}) must not be more than {} tokens",
                    config.micro_batch_size, config.sequence_len, kMostTokens));
  }
}

std::vector<std::string> changes(const TrainConfig& before, const TrainConfig& after) {
  std::vector<std::string> all;
  const auto shown = [](const std::string& text) { return text.empty() ? "not set" : text; };
  for (const ConfigKey& key : table()) {
    const std::string was = key.get(before), is = key.get(after);
    if (was != is) all.push_back(fmt::format("{} {} (was {})", key.name, shown(is), shown(was)));
  }
  return all;
}

std::string to_yaml(const TrainConfig& config) {
  YAML::Emitter out;
  const auto emit_list = [&](const std::vector<SourceSpec>& sources) {
    if (sources.empty()) out << YAML::Flow;
    out << YAML::BeginSeq;
    for (const SourceSpec& source : sources) {
      out << YAML::BeginMap << YAML::Key << "path" << YAML::Value << source.path;
      if (source.type != SourceType::kAuto) {
        out << YAML::Key << "type" << YAML::Value << text_of(source.type);
      }
      out << YAML::EndMap;
    }
    out << YAML::EndSeq;
  };
  out << YAML::BeginMap;
  for (const ConfigKey& key : table()) {
    out << YAML::Key << std::string(key.name) << YAML::Value;
    if (key.name == "datasets") {
      emit_list(config.datasets);
    } else if (key.name == "eval_datasets") {
      emit_list(config.eval_datasets);
    } else if (key.name == "nvme" && !config.nvme.empty()) {
      out << YAML::BeginSeq;
      for (const DriveSpec& drive : config.nvme) out << text_of(drive);
      out << YAML::EndSeq;
    } else {
      out << key.get(config);
    }
  }
  out << YAML::EndMap;
  return std::string(out.c_str()) + "\n";
}

}  // namespace strata::train
