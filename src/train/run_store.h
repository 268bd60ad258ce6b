// The store on NVMe drives as a run finds it, and the run that its last commit belongs to.
// docs/formats.md describes the metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "train/checkpoint.h"
#include "train/config.h"

namespace strata::train {

/// The metadata of a commit: all that a run needs beside the store's records.
struct StoredRun {
  RunState state;
  std::string model_fingerprint;  // of config.json
  int64_t part_elements = 0;      // how the plan cut units into parts
  // Whose state the store has: a rank's of so many, of which so many hold a shard each.
  int rank = 0, ranks = 1, shard_ranks = 1;
  uint64_t generation = 0;  // the store's, of this commit; not part of the metadata
};

/// Refuses, by a usage error, directories of `config.nvme` that can take no store. Writes nothing.
void check_drives(const TrainConfig& config);

/// The run in the store of `config.nvme`; nothing where there is none, or one that cannot be gone
/// on with because nothing was committed to it. Throws a usage error where another process is using
/// it or a directory's part is missing, and another Error where it is damaged.
[[nodiscard]] std::optional<StoredRun> find_stored_run(const TrainConfig& config);

/// Where one of several ranks has its part of a directory of `nvme`: a store is one process's.
[[nodiscard]] std::filesystem::path rank_directory(const std::filesystem::path& directory,
                                                   int rank);

/// The same of all commits that the store can be opened at, the newest first: one or two. Between
/// two steps a kill can leave the stores of ranks one commit apart; each then has the earlier too.
[[nodiscard]] std::vector<StoredRun> find_stored_runs(const TrainConfig& config);

/// The last commit that any store holds in the directories of `drives`, or in their rank-0, whoever
/// may go on with it. Throws as find_stored_run does.
[[nodiscard]] std::optional<StoredRun> find_any_stored_run(const std::vector<DriveSpec>& drives);

/// The last step that each rank has, of those that it has; nothing where there is none.
[[nodiscard]] std::optional<int64_t> last_common_step(
    std::span<const std::vector<int64_t>> steps_of_ranks);

/// JSON, at most nvme::kMaxMetadataBytes.
[[nodiscard]] std::vector<std::byte> to_metadata(const StoredRun& run);

/// XXH3-64 of a config.json.
[[nodiscard]] std::string fingerprint_of(const model::LlamaConfig& config);

/// Removes the store, if there is one. Cut off at any moment, it leaves a whole store or none.
/// Throws a usage error where another process is using it.
void remove_store(const TrainConfig& config);

}  // namespace strata::train
