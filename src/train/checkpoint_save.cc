// Writing a checkpoint: all ranks that hold different state write a file each, and rank 0 what says
// that they are whole.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "model/safetensors.h"
#include "train/checkpoint.h"
#include "train/checkpoint_tensors.h"
#include "train/unit_state.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr std::string_view kPartial = ".partial";
constexpr size_t kBufferBytes = size_t{1} << 20;

void remove_leftovers(const fs::path& directory) {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kCheckpointPrefix) && name.ends_with(kPartial))
      fs::remove_all(entry.path());
  }
}

/// Removes a checkpoint, if there is one. It is renamed first: a removal that is cut off must not
/// leave half of it under a good name.
void discard(const fs::path& checkpoint) {
  if (!fs::exists(checkpoint)) return;
  const fs::path doomed = checkpoint.string() + ".old" + std::string(kPartial);
  fs::rename(checkpoint, doomed);
  fs::remove_all(doomed);
}

/// Writes what the rank holds of each tensor. Where `piece_bytes` is 0, one checksum is of all of
/// it. Returns, for each tensor it has some of, where that begins and its checksums.
Json write_state_file(const fs::path& path, const std::vector<StateTensor>& tensors, DType dtype,
                      pipeline::StateAccess& access, size_t piece_bytes) {
  struct Slice {
    const StateTensor* tensor;
    size_t begin_bytes, end_bytes;  // of the unit
  };
  std::vector<Slice> slices;
  std::vector<model::TensorHeader> headers;
  for (const StateTensor& tensor : tensors) {
    const UnitState unit(access, tensor.unit, tensor.kind, dtype);
    const size_t begin = std::max(tensor.offset_bytes, unit.begin_bytes());
    const size_t end = std::min(tensor.offset_bytes + tensor.size_bytes, unit.end_bytes());
    if (begin >= end) continue;
    slices.push_back({&tensor, begin, end});
    headers.push_back(tensor.header);
    if (piece_bytes == 0) continue;
    const auto element_bytes = static_cast<size_t>(bits_of(tensor.header.type) / 8);
    headers.back().shape = {static_cast<int64_t>((end - begin) / element_bytes)};
  }
  model::SafetensorsWriter writer(path, headers);
  Json written = Json::object();
  std::vector<std::byte> buffer;
  for (const auto& [tensor, begin, end] : slices) {
    UnitState unit(access, tensor->unit, tensor->kind, dtype);
    Checksum checksum;
    std::string checksums;
    for (size_t at = begin; at < end; at += buffer.size()) {
      buffer.resize(std::min(kBufferBytes, end - at));
      unit.read(at, buffer);
      checksum.add(buffer);
      writer.write(buffer);
      const size_t done = at + buffer.size() - begin;
      if (begin + done == end || (piece_bytes > 0 && done % piece_bytes == 0)) {
        checksums += checksum.take();
      }
    }
    const auto element_bytes = static_cast<size_t>(bits_of(tensor->header.type) / 8);
    written[tensor->header.name] = {{"first", (begin - tensor->offset_bytes) / element_bytes},
                                    {"xxh3_64", checksums}};
  }
  writer.finish();
  return written;
}
static_assert(kChecksumPieceBytes % kBufferBytes == 0);

/// trainer_state.json, of one file or of those of several ranks.
std::string run_file(const RunState& state, const std::vector<StateTensor>& tensors,
                     const std::vector<Json>& files) {
  Json run{{"format", files.size() == 1 ? kOneFileFormat : kManyFilesFormat}};
  run.update(Json::parse(to_json(state)));
  if (files.size() == 1) {
    Json& checksums = run["xxh3_64"] = Json::object();
    for (const auto& [name, slice] : files.front().items()) checksums[name] = slice["xxh3_64"];
    return run.dump(1) + "\n";
  }
  run["piece_bytes"] = kChecksumPieceBytes;
  for (const StateTensor& tensor : tensors) {
    run["shapes"][tensor.header.name] = tensor.header.shape;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    run["files"].push_back(
        {{"name", state_file_name(static_cast<int>(i), static_cast<int>(files.size()))},
         {"slices", files[i]}});
  }
  return run.dump(1) + "\n";
}

void remove_oldest(const fs::path& directory, int64_t keep) {
  if (keep <= 0) return;
  const std::vector<fs::path> all = list_checkpoints(directory);
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) discard(all[i]);
}

}  // namespace

void save_checkpoint(const fs::path& directory, const RunState& state, const model::Llama& llama,
                     pipeline::StateAccess& access, int64_t keep) {
  OneRank alone;
  save_checkpoint(directory, state, llama, access, keep, alone, 1);
}

void save_checkpoint(const fs::path& directory, const RunState& state, const model::Llama& llama,
                     pipeline::StateAccess& access, int64_t keep, RankExchange& exchange,
                     int shard_ranks) {
  STRATA_CHECK(shard_ranks >= 1 && shard_ranks <= exchange.ranks(), "ranks that hold a shard each");
  const int rank = exchange.rank();
  const fs::path target = checkpoint_path(directory, state.step);
  const fs::path partial = target.string() + std::string(kPartial);
  try {
    const std::vector<std::string> states = exchange.gather_agreed([&] {
      access.finish_update();
      if (rank == 0) {
        remove_leftovers(directory);
        fs::create_directory(partial);
      }
      return to_json(state);
    });
    for (size_t other = 0; other < states.size(); ++other) {
      if (states[other] == states[static_cast<size_t>(rank)]) continue;
      throw failure(
          fmt::format("'{}' cannot be saved: ranks {} and {} are not at the same point of "
                      "the run",
                      target.string(), rank, other));
    }
    const std::vector<StateTensor> tensors = state_tensors(llama, state.optimizer_state);
    std::vector<std::string> written = exchange.gather_agreed([&]() -> std::string {
      // The other replicas hold the same.
      if (rank >= shard_ranks) return "";
      const std::string name = shard_ranks == 1 ? kStateFile : state_file_name(rank, shard_ranks);
      return write_state_file(partial / name, tensors, llama.dtype(), access,
                              shard_ranks == 1 ? 0 : kChecksumPieceBytes)
          .dump();
    });
    written.resize(static_cast<size_t>(shard_ranks));
    exchange.agree([&] {
      if (rank != 0) return;
      std::vector<Json> files;
      for (size_t i = 0; i < written.size(); ++i) {
        files.push_back(Json::parse(written[i]));
        const std::string name = state_file_name(static_cast<int>(i), shard_ranks);
        if (shard_ranks > 1 && !fs::exists(partial / name)) {
          throw failure(
              fmt::format("rank {} wrote its '{}' where rank 0 does not see it; name an output_dir "
                          "that is the same on all hosts",
                          i, name));
        }
      }
      write_text_file_atomically(partial / "config.json", llama.config().text);
      write_text_file_atomically(partial / kRunFile, run_file(state, tensors, files));
      sync_directory(partial);
      discard(target);
      fs::rename(partial, target);
      sync_directory(directory);
      remove_oldest(directory, keep);
    });
  } catch (...) {
    std::error_code ignored;
    if (rank == 0) fs::remove_all(partial, ignored);
    throw;
  }
}

}  // namespace strata::train
