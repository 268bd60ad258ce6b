// Checkpoints of a run: the whole training state, such that going on from one gives the bits that
// never stopping would have given. docs/formats.md describes the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "model/llama.h"
#include "pipeline/state_access.h"
#include "train/dataset.h"
#include "train/rank_exchange.h"

namespace strata::train {

/// What a run has to remember beside its tensors.
struct RunState {
  int64_t step = 0;             // steps taken
  int64_t optimizer_steps = 0;  // of them, those whose gradient was finite
  int64_t tokens = 0;           // trained on, unmasked
  DataPosition data;
  uint64_t seed = 0;  // all random choices follow from it and the positions above
  DType compute_dtype = DType::kBf16;
  cpu_adam::MomentFormat optimizer_state = cpu_adam::MomentFormat::kF32;
  std::string data_fingerprint;  // Datasets' windows and their order: what `data` is a position in
  friend bool operator==(const RunState&, const RunState&) = default;
};

/// A JSON object.
[[nodiscard]] std::string to_json(const RunState& state);
/// Of the JSON form, which may have other keys too. Throws a usage error that names `origin`.
[[nodiscard]] RunState run_state_from_json(const std::string& json, const std::string& origin);

/// "<directory>/checkpoint-<step>".
[[nodiscard]] std::filesystem::path checkpoint_path(const std::filesystem::path& directory,
                                                    int64_t step);

/// Whole checkpoints in a run's directory, oldest first. What an interrupted save left behind has
/// another name and is never among them.
[[nodiscard]] std::vector<std::filesystem::path> list_checkpoints(
    const std::filesystem::path& directory);

/// Whether there is a whole checkpoint at `path`.
[[nodiscard]] bool is_checkpoint(const std::filesystem::path& path);
/// The safetensors file with the tensors of a checkpoint that one rank wrote.
[[nodiscard]] std::filesystem::path checkpoint_state_file(const std::filesystem::path& checkpoint);

/// Writes checkpoint-<step> with the model's config.json: beside its final name, synced, and
/// renamed when whole. Then removes the oldest beyond `keep` (0: keeps all) and what interrupted
/// saves left. Runs the pending update before. Throws IoError where the disk is full or fails;
/// nothing with the checkpoint's name exists then.
void save_checkpoint(const std::filesystem::path& directory, const RunState& state,
                     const model::Llama& llama, pipeline::StateAccess& access, int64_t keep);
/// The same by all ranks of a run, which all call it with the same state: the first `shard_ranks`
/// of them, which hold all of it between them, write a file each, at the same time; with one it is
/// the file that a run of one rank writes. Returns on all ranks once the checkpoint is whole, and
/// throws on all of them where one has failed. `directory` is the same for all ranks.
void save_checkpoint(const std::filesystem::path& directory, const RunState& state,
                     const model::Llama& llama, pipeline::StateAccess& access, int64_t keep,
                     RankExchange& exchange, int shard_ranks);

/// What a checkpoint remembers beside its tensors. A usage error names the checkpoint and what is
/// wrong with it.
[[nodiscard]] RunState read_run_state(const std::filesystem::path& checkpoint);

/// Fills the rank's state, from a checkpoint of any number of ranks, reading what is in its shard
/// and checking checksums on the way. A usage error names the checkpoint and what is wrong: of
/// another model or number format, or damaged.
void load_checkpoint(const std::filesystem::path& checkpoint, const model::Llama& llama,
                     pipeline::StateAccess& access);

/// Reads all masters (weights and residuals) and throws as load_checkpoint where one is damaged.
void verify_masters(const std::filesystem::path& checkpoint);

}  // namespace strata::train
