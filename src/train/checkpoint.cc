#include "train/checkpoint.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "model/safetensors.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using pipeline::StateKind;

constexpr int kFormat = 1;
constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kPartial = ".partial";
constexpr const char* kStateFile = "state.safetensors";
constexpr const char* kRunFile = "trainer_state.json";
constexpr std::array kSavedKinds{StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1,
                                 StateKind::kMoment2};
constexpr size_t kPieceBytes = size_t{1} << 20;

/// One tensor of one kind of state, and where it lies in its unit.
struct StateTensor {
  model::TensorHeader header;
  int unit;
  StateKind kind;
  size_t offset_bytes, size_bytes;
};

std::vector<StateTensor> state_tensors(const model::Llama& llama) {
  std::vector<StateTensor> list;
  for (const StateKind kind : kSavedKinds) {
    const size_t size = pipeline::state_bytes(kind, llama.dtype());
    if (size == 0) continue;
    const model::ElementType type = size == 4                    ? model::ElementType::kF32
                                    : kind == StateKind::kWeight ? model::ElementType::kBf16
                                                                 : model::ElementType::kU16;
    for (const model::TensorPlace& place : llama.tensors()) {
      list.push_back(
          {{fmt::format("{}.{}", name_of(kind), place.tensor.name), type, place.tensor.shape},
           place.unit,
           kind,
           static_cast<size_t>(place.first) * size,
           static_cast<size_t>(place.tensor.elements()) * size});
    }
  }
  return list;
}

/// XXH3-64 of bytes that come in pieces.
class Checksum {
 public:
  Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
  void add(std::span<const std::byte> bytes) {
    XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
  }
  [[nodiscard]] std::string text() const {
    return fmt::format("{:016x}", XXH3_64bits_digest(state_.get()));
  }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

template <class F>
void for_each_piece(size_t size_bytes, F&& visit) {
  for (size_t begin = 0; begin < size_bytes; begin += kPieceBytes) {
    visit(begin, std::min(kPieceBytes, size_bytes - begin));
  }
}

std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, code] = std::from_chars(name.data() + kPrefix.size(), end, step);
  if (code != std::errc{} || stop != end || step < 0) return std::nullopt;
  return step;
}

void remove_leftovers(const fs::path& directory) {
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kPrefix) && name.ends_with(kPartial)) fs::remove_all(entry.path());
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

Error damaged(const fs::path& checkpoint, const std::string& what) {
  return usage_error(
      fmt::format("'{}' {}; resume from an older checkpoint", checkpoint.string(), what));
}

/// trainer_state.json of a checkpoint in a format that this version reads.
nlohmann::json read_run_file(const fs::path& checkpoint) {
  if (!is_checkpoint(checkpoint)) {
    throw usage_error(fmt::format("'{}' is not a checkpoint: there is no {} in it",
                                  checkpoint.string(), kRunFile));
  }
  nlohmann::json run = nlohmann::json::parse(read_text_file(checkpoint / kRunFile), nullptr, false);
  if (!run.is_object() || !run.contains("format") || !run["xxh3_64"].is_object()) {
    throw damaged(checkpoint, fmt::format("has a broken {}", kRunFile));
  }
  if (run["format"] != kFormat) {
    throw usage_error(fmt::format("'{}' is a checkpoint of format {}, and this version reads {}",
                                  checkpoint.string(), run["format"].dump(), kFormat));
  }
  return run;
}

model::SafetensorsFile open_state(const fs::path& checkpoint) {
  try {
    return model::SafetensorsFile::open(checkpoint / kStateFile);
  } catch (const Error& error) {
    throw damaged(checkpoint, fmt::format("is damaged ({})", error.what()));
  }
}

void check_sum(const fs::path& checkpoint, const nlohmann::json& checksums, const std::string& name,
               const Checksum& checksum) {
  if (checksums.value(name, "") == checksum.text()) return;
  throw damaged(checkpoint, fmt::format("is damaged: the checksum of tensor '{}' differs", name));
}

}  // namespace

fs::path checkpoint_path(const fs::path& directory, int64_t step) {
  return directory / fmt::format("{}{:06}", kPrefix, step);
}

std::vector<fs::path> list_checkpoints(const fs::path& directory) {
  std::vector<std::pair<int64_t, fs::path>> found;
  std::error_code missing;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, missing)) {
    const auto step = step_of(entry.path());
    if (step && is_checkpoint(entry.path())) found.emplace_back(*step, entry.path());
  }
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

bool is_checkpoint(const fs::path& path) {
  std::error_code none;
  return fs::exists(path / kRunFile, none);
}

fs::path checkpoint_state_file(const fs::path& checkpoint) { return checkpoint / kStateFile; }

void save_checkpoint(const fs::path& directory, const RunState& state, const model::Llama& llama,
                     pipeline::Executor& executor, int64_t keep) {
  executor.finish_update();
  remove_leftovers(directory);
  const fs::path target = checkpoint_path(directory, state.step);
  const fs::path partial = target.string() + std::string(kPartial);
  try {
    fs::create_directory(partial);
    const std::vector<StateTensor> tensors = state_tensors(llama);
    std::vector<model::TensorHeader> headers;
    for (const StateTensor& tensor : tensors) headers.push_back(tensor.header);
    model::SafetensorsWriter writer(partial / kStateFile, headers);
    nlohmann::ordered_json checksums;
    std::vector<std::byte> piece;
    for (const StateTensor& tensor : tensors) {
      Checksum checksum;
      for_each_piece(tensor.size_bytes, [&](size_t begin, size_t size) {
        piece.resize(size);
        executor.read_state(tensor.unit, tensor.kind, tensor.offset_bytes + begin, piece);
        checksum.add(piece);
        writer.write(piece);
      });
      checksums[tensor.header.name] = checksum.text();
    }
    writer.finish();
    write_text_file_atomically(partial / "config.json", llama.config().text);
    const nlohmann::ordered_json run{
        {"format", kFormat},
        {"step", state.step},
        {"optimizer_steps", state.optimizer_steps},
        {"tokens", state.tokens},
        {"data", {{"epoch", state.data.epoch}, {"index", state.data.index}}},
        {"seed", state.seed},
        {"compute_dtype", name_of(llama.dtype())},
        {"data_fingerprint", state.data_fingerprint},
        {"xxh3_64", checksums}};
    write_text_file_atomically(partial / kRunFile, run.dump(1) + "\n");
    sync_directory(partial);
    discard(target);
    fs::rename(partial, target);
    sync_directory(directory);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
    throw;
  }
  if (keep <= 0) return;
  const std::vector<fs::path> all = list_checkpoints(directory);
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) {
    discard(all[i]);
  }
}

RunState read_run_state(const fs::path& checkpoint) {
  const nlohmann::json run = read_run_file(checkpoint);
  RunState state;
  try {
    state.step = run.at("step").get<int64_t>();
    state.optimizer_steps = run.at("optimizer_steps").get<int64_t>();
    state.tokens = run.at("tokens").get<int64_t>();
    state.data.epoch = run.at("data").at("epoch").get<int64_t>();
    state.data.index = run.at("data").at("index").get<int64_t>();
    state.seed = run.at("seed").get<uint64_t>();
    state.data_fingerprint = run.at("data_fingerprint").get<std::string>();
    state.compute_dtype =
        run.at("compute_dtype") == name_of(DType::kF32) ? DType::kF32 : DType::kBf16;
  } catch (const nlohmann::json::exception& error) {
    throw damaged(checkpoint, fmt::format("has a broken {} ({})", kRunFile, error.what()));
  }
  if (state.step < 0 || state.optimizer_steps < 0 || state.tokens < 0) {
    throw damaged(checkpoint, fmt::format("has negative counts in {}", kRunFile));
  }
  return state;
}

void load_checkpoint(const fs::path& checkpoint, const model::Llama& llama,
                     pipeline::Executor& executor) {
  const nlohmann::json checksums = read_run_file(checkpoint)["xxh3_64"];
  if (const DType dtype = read_run_state(checkpoint).compute_dtype; dtype != llama.dtype()) {
    throw usage_error(fmt::format("'{}' was trained with compute_dtype {}, not {}",
                                  checkpoint.string(), name_of(dtype), name_of(llama.dtype())));
  }
  const model::SafetensorsFile file = open_state(checkpoint);
  std::vector<std::byte> piece;
  for (const StateTensor& tensor : state_tensors(llama)) {
    const std::string& name = tensor.header.name;
    const model::TensorInfo* found = file.find(name);
    if (!found || found->shape != tensor.header.shape || found->type != tensor.header.type) {
      throw usage_error(fmt::format("'{}' is of another model: tensor '{}' is {}",
                                    checkpoint.string(), name,
                                    found ? "of another shape or type" : "missing"));
    }
    // Weights alone serve for inference.
    if (executor.state_size_bytes(tensor.unit, tensor.kind) == 0) continue;
    Checksum checksum;
    for_each_piece(tensor.size_bytes, [&](size_t begin, size_t size) {
      piece.resize(size);
      file.read(*found, static_cast<int64_t>(begin), piece);
      checksum.add(piece);
      executor.write_state(tensor.unit, tensor.kind, tensor.offset_bytes + begin, piece);
    });
    check_sum(checkpoint, checksums, name, checksum);
  }
}

void verify_masters(const fs::path& checkpoint) {
  const nlohmann::json checksums = read_run_file(checkpoint)["xxh3_64"];
  const model::SafetensorsFile file = open_state(checkpoint);
  std::vector<std::byte> piece;
  for (const model::TensorInfo& tensor : file.tensors()) {
    if (!tensor.name.starts_with("weight.") && !tensor.name.starts_with("residual.")) continue;
    Checksum checksum;
    for_each_piece(static_cast<size_t>(tensor.size_bytes), [&](size_t begin, size_t size) {
      piece.resize(size);
      file.read(tensor, static_cast<int64_t>(begin), piece);
      checksum.add(piece);
    });
    check_sum(checkpoint, checksums, tensor.name, checksum);
  }
}

}  // namespace strata::train
