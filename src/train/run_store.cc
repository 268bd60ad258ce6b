#include "train/run_store.h"

#include <fmt/format.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "nvme/arena_file.h"
#include "nvme/store.h"
#include "train/run_plan.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;

/// Whether there is a store, or some of one; not what a creation or a removal left that was cut off
/// between two drives.
bool has_store(const TrainConfig& config) {
  std::error_code none;
  bool has_any = false;
  bool is_cut_off = true;
  for (const DriveSpec& drive : config.nvme) {
    const bool has = fs::exists(nvme::arena_path(drive.path), none);
    has_any = has_any || has;
    is_cut_off = is_cut_off && (has || fs::exists(nvme::partial_arena_path(drive.path), none));
  }
  if (!has_any) return false;
  const bool is_whole = std::all_of(
      config.nvme.begin(), config.nvme.end(),
      [&](const DriveSpec& drive) { return fs::exists(nvme::arena_path(drive.path), none); });
  return is_whole || !is_cut_off;
}

StoredRun parse_metadata(std::span<const std::byte> bytes, const TrainConfig& config) {
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const auto refuse = [&](const std::string& why) {
    return usage_error(
        fmt::format("the store in '{}' belongs to something else ({}); name other nvme directories",
                    config.nvme.front().path, why));
  };
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  try {
    if (json.at("format") != kFormat) {
      throw refuse(fmt::format("its format is {}", json["format"].dump()));
    }
    return StoredRun{.state = run_state_from_json(json.at("run").dump(), "the store's metadata"),
                     .model_fingerprint = json.at("model").get<std::string>(),
                     .part_elements = json.at("part_elements").get<int64_t>(),
                     .rank = json.value("rank", 0),
                     .ranks = json.value("ranks", 1),
                     .shard_ranks = json.value("shard_ranks", 1)};
  } catch (const nlohmann::json::exception& error) {
    throw refuse(error.what());
  }
}

}  // namespace

void check_drives(const TrainConfig& config) {
  std::set<fs::path> seen;
  for (const DriveSpec& drive : config.nvme) {
    std::error_code code;
    if (!seen.insert(nvme::canonical_directory(drive.path)).second) {
      throw usage_error(fmt::format(
          "nvme directory '{}' is given twice; give one directory for each drive", drive.path));
    }
    fs::path place = fs::absolute(drive.path, code);
    while (!fs::exists(place, code) && place.has_relative_path()) place = place.parent_path();
    if (!fs::is_directory(place, code)) {
      throw usage_error(fmt::format("nvme directory '{}' cannot be: '{}' is no directory",
                                    drive.path, place.string()));
    }
    if (::access(place.c_str(), W_OK | X_OK) != 0) {
      throw usage_error(
          fmt::format("nvme directory '{}' cannot be written: {}; name another directory",
                      drive.path, std::strerror(errno)));
    }
    if (nvme::free_bytes(drive.path) == 0 && !fs::exists(nvme::arena_path(drive.path), code)) {
      throw usage_error(
          fmt::format("nvme directory '{}' has no free space; free some or name another directory",
                      drive.path));
    }
  }
}

std::vector<StoredRun> find_stored_runs(const TrainConfig& config) {
  if (!has_store(config)) return {};
  // In flux: of a plan that keeps one slot, and then nothing in it can be gone on with.
  nvme::StoreOptions options;
  options.accept_in_flux = true;
  std::vector<StoredRun> runs;
  for (const nvme::AvailableGeneration& commit :
       nvme::Store::generations(nvme_options(config).directories, options)) {
    if (commit.metadata.empty()) continue;
    runs.push_back(parse_metadata(commit.metadata, config));
    runs.back().generation = commit.generation;
  }
  return runs;
}

std::optional<StoredRun> find_stored_run(const TrainConfig& config) {
  std::vector<StoredRun> runs = find_stored_runs(config);
  if (runs.empty()) return std::nullopt;
  return std::move(runs.front());
}

std::optional<StoredRun> find_any_stored_run(const std::vector<DriveSpec>& drives) {
  TrainConfig config;
  config.nvme = drives;
  std::optional<StoredRun> alone = find_stored_run(config);
  for (DriveSpec& drive : config.nvme) drive.path = rank_directory(drive.path, 0).string();
  std::optional<StoredRun> of_ranks = find_stored_run(config);
  if (!alone || (of_ranks && of_ranks->state.step > alone->state.step)) return of_ranks;
  return alone;
}

fs::path rank_directory(const fs::path& directory, int rank) {
  return directory / fmt::format("rank-{}", rank);
}

std::optional<int64_t> last_common_step(std::span<const std::vector<int64_t>> steps_of_ranks) {
  std::optional<int64_t> last;
  if (steps_of_ranks.empty()) return last;
  for (const int64_t step : steps_of_ranks.front()) {
    const bool is_common =
        std::all_of(steps_of_ranks.begin(), steps_of_ranks.end(), [&](const auto& steps) {
          return std::find(steps.begin(), steps.end(), step) != steps.end();
        });
    if (is_common && (!last || step > *last)) last = step;
  }
  return last;
}

std::vector<std::byte> to_metadata(const StoredRun& run) {
  nlohmann::ordered_json json{{"format", kFormat},
                              {"run", nlohmann::ordered_json::parse(to_json(run.state))},
                              {"model", run.model_fingerprint},
                              {"part_elements", run.part_elements}};
  if (run.ranks > 1) {
    json["rank"] = run.rank;
    json["ranks"] = run.ranks;
    json["shard_ranks"] = run.shard_ranks;
  }
  const std::string text = json.dump();
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string fingerprint_of(const model::LlamaConfig& config) {
  return fmt::format("{:016x}", XXH3_64bits(config.text.data(), config.text.size()));
}

void remove_store(const TrainConfig& config) {
  std::vector<UniqueFd> locks;
  std::vector<fs::path> doomed;
  for (const DriveSpec& drive : config.nvme) {
    std::error_code none;
    if (!fs::exists(nvme::arena_path(drive.path), none)) continue;
    locks.push_back(nvme::lock_arena(drive.path, /*shared=*/false));
    doomed.emplace_back(drive.path);
  }
  // Renamed first: has_store() takes what this leaves when it is cut off for no store.
  for (const fs::path& directory : doomed) {
    fs::rename(nvme::arena_path(directory), nvme::partial_arena_path(directory));
  }
  for (const fs::path& directory : doomed) fs::remove(nvme::partial_arena_path(directory));
}

}  // namespace strata::train
