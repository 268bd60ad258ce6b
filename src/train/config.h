// What a training run is told: one table of keys that the YAML reader, the command line, the help
// text and the stored configuration all go through.
//
// Every value has a text form, the same in YAML and as a flag, so there is one parser and one check
// for it. Errors are usage errors of one sentence that name the key, and in a file also its line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "cpu_adam/moments.h"
#include "gpu/open_device.h"
#include "pipeline/sharding.h"
#include "train/dataset.h"
#include "train/learning_rate.h"

namespace strata::train {

using gpu::DeviceChoice;
/// Where weights, gradients and optimizer state rest between uses. kAuto: wherever makes the step
/// fastest of what fits in device memory, host memory and the drives given.
enum class OffloadChoice : uint8_t { kAuto, kNone, kHost, kNvme };

/// Until when what rests on drives can be lost.
enum class CommitChoice : uint8_t {
  kStep,  // until the step is over: two slots on the drives
  kSave   // until a checkpoint is saved: one slot
};

enum class SaveStrategy : uint8_t { kSteps, kNo };

/// A directory on a drive, and the most to use of it.
struct DriveSpec {
  std::string path;
  std::optional<size_t> limit_bytes;
  friend bool operator==(const DriveSpec&, const DriveSpec&) = default;
};

/// The defaults are those of the keys; what each means is the help text in config.cc.
struct TrainConfig {
  std::string model;
  std::vector<SourceSpec> datasets;
  std::vector<SourceSpec> eval_datasets;
  double val_set_size = 0.02;
  int64_t sequence_len = 512;
  int64_t micro_batch_size = 8;
  int64_t gradient_accumulation_steps = 1;
  int64_t max_steps = 0;
  int64_t num_epochs = 1;
  double learning_rate = 3e-4;
  LrScheduler lr_scheduler = LrScheduler::kCosine;
  int64_t warmup_steps = 0;
  double cosine_min_lr_ratio = 0.1;
  double weight_decay = 0.1;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.95;
  double adam_epsilon = 1e-8;
  double max_grad_norm = 1.0;
  int64_t seed = 42;
  bool shuffle = true;
  std::string output_dir;
  std::string resume;
  SaveStrategy save_strategy = SaveStrategy::kSteps;
  int64_t save_steps = 0;
  int64_t save_total_limit = 0;
  int64_t eval_steps = 0;
  int64_t eval_max_batches = 0;
  int64_t logging_steps = 10;
  DeviceChoice device = DeviceChoice::kAuto;
  std::optional<size_t> device_memory;
  std::optional<size_t> host_memory;
  std::vector<DriveSpec> nvme;
  CommitChoice commit = CommitChoice::kStep;
  int64_t threads = 0;
  OffloadChoice offload = OffloadChoice::kAuto;
  std::optional<int64_t> weight_slots;
  std::string profile;
  std::string trace;
  DType compute_dtype = DType::kBf16;
  cpu_adam::MomentFormat optimizer_state = cpu_adam::MomentFormat::kF32;
  /// What ranks divide among themselves; full_shard needs least memory.
  pipeline::Sharding sharding = pipeline::Sharding::kFullShard;
  int64_t shard_group_size = 0;  // of hybrid_shard; 0: the ranks of one host
  DType reduce_dtype = DType::kF32;
  int64_t rank_timeout = 60;                   // seconds
  std::optional<double> upload_bandwidth;      // bytes per second
  std::optional<double> download_bandwidth;    // bytes per second
  std::optional<double> nvme_read_bandwidth;   // bytes per second of each drive
  std::optional<double> nvme_write_bandwidth;  // bytes per second of each drive

  friend bool operator==(const TrainConfig&, const TrainConfig&) = default;
};

/// What a number must be.
struct Limits {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool below_max = false;  // max itself is too much
};

struct ConfigKey {
  std::string_view name;
  std::string_view type;  // for help texts: "N", "NUMBER", "BYTES", "cosine|linear|constant", ...
  std::string_view help;
  Limits limits;
  /// Parses and checks the text form and assigns it. Throws a usage error that names the key; the
  /// config is then unchanged.
  void (*set)(const ConfigKey& key, TrainConfig& config, std::string_view text);
  /// The text form: set() with it gives the same value, unless a path in a list holds a comma.
  std::string (*get)(const TrainConfig& config);
};

/// In the order of a help text. Lives for the whole program.
[[nodiscard]] std::span<const ConfigKey> config_keys() noexcept;

/// Throws a usage error that suggests the nearest key where there is none of that name.
[[nodiscard]] const ConfigKey& find_key(std::string_view name);

void set(TrainConfig& config, std::string_view name, std::string_view text);
[[nodiscard]] std::string get(const TrainConfig& config, std::string_view name);

/// Of each key whose values differ: "learning_rate 0.0001 (was 0.0003)".
[[nodiscard]] std::vector<std::string> changes(const TrainConfig& before, const TrainConfig& after);

/// Reads a YAML file over the defaults. Keys not in the file keep their default, so flags can still
/// be laid over the result; check() it after that.
[[nodiscard]] TrainConfig read_config(const std::filesystem::path& path);

/// Checks what one key alone cannot show: that those in `required` are given, and that the values
/// go together. Throws a usage error.
void check(const TrainConfig& config,
           std::initializer_list<std::string_view> required = {"model", "datasets", "output_dir"});

/// All keys, as a YAML file that read_config() turns back into an equal config.
[[nodiscard]] std::string to_yaml(const TrainConfig& config);

}  // namespace strata::train
