#include "train/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "train/checkpoint_tensors.h"
#include "train/unit_state.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using cpu_adam::MomentFormat;

std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!name.starts_with(kCheckpointPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [stop, code] = std::from_chars(name.data() + kCheckpointPrefix.size(), end, step);
  if (code != std::errc{} || stop != end || step < 0) return std::nullopt;
  return step;
}

}  // namespace

std::string to_json(const RunState& state) {
  const nlohmann::ordered_json json{
      {"step", state.step},
      {"optimizer_steps", state.optimizer_steps},
      {"tokens", state.tokens},
      {"data", {{"epoch", state.data.epoch}, {"index", state.data.index}}},
      {"seed", state.seed},
      {"compute_dtype", name_of(state.compute_dtype)},
      {"optimizer_state", cpu_adam::name_of(state.optimizer_state)},
      {"data_fingerprint", state.data_fingerprint}};
  return json.dump();
}

RunState run_state_from_json(const std::string& text, const std::string& origin) {
  const auto refuse = [&](std::string_view why) {
    return usage_error(
        fmt::format("{} is damaged: {}; resume from an older checkpoint", origin, why));
  };
  RunState state;
  try {
    const nlohmann::json run = nlohmann::json::parse(text);
    state.step = run.at("step").get<int64_t>();
    state.optimizer_steps = run.at("optimizer_steps").get<int64_t>();
    state.tokens = run.at("tokens").get<int64_t>();
    state.data.epoch = run.at("data").at("epoch").get<int64_t>();
    state.data.index = run.at("data").at("index").get<int64_t>();
    state.seed = run.at("seed").get<uint64_t>();
    state.data_fingerprint = run.at("data_fingerprint").get<std::string>();
    state.compute_dtype =
        run.at("compute_dtype") == name_of(DType::kF32) ? DType::kF32 : DType::kBf16;
    const std::string moments = run.value("optimizer_state", "fp32");
    for (const MomentFormat format : cpu_adam::kMomentFormats) {
      if (moments == cpu_adam::name_of(format)) state.optimizer_state = format;
    }
    if (moments != cpu_adam::name_of(state.optimizer_state)) {
      throw refuse("an unknown optimizer_state");
    }
  } catch (const nlohmann::json::exception& error) {
    throw refuse(error.what());
  }
  if (state.step < 0 || state.optimizer_steps < 0 || state.tokens < 0) {
    throw refuse("negative counts");
  }
  return state;
}

fs::path checkpoint_path(const fs::path& directory, int64_t step) {
  return directory / fmt::format("{}{:06}", kCheckpointPrefix, step);
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

RunState read_run_state(const fs::path& checkpoint) {
  return run_state_from_json(read_run_file(checkpoint).dump(),
                             fmt::format("{} of '{}'", kRunFile, checkpoint.string()));
}

void load_checkpoint(const fs::path& checkpoint, const model::Llama& llama,
                     pipeline::StateAccess& access) {
  const RunState state = read_run_state(checkpoint);
  if (state.compute_dtype != llama.dtype()) {
    throw usage_error(fmt::format("'{}' was trained with compute_dtype {}, not {}",
                                  checkpoint.string(), name_of(state.compute_dtype),
                                  name_of(llama.dtype())));
  }
  const bool keeps_moments = access.state_size_bytes(0, pipeline::StateKind::kMoment1) > 0;
  if (keeps_moments && state.optimizer_state != access.moments()) {
    throw usage_error(fmt::format("'{}' was trained with optimizer_state {}, not {}",
                                  checkpoint.string(), cpu_adam::name_of(state.optimizer_state),
                                  cpu_adam::name_of(access.moments())));
  }
  const CheckpointTensors saved(checkpoint);
  for (const StateTensor& tensor : state_tensors(llama, state.optimizer_state)) {
    const std::string& name = tensor.header.name;
    const CheckpointTensors::Tensor* found = saved.find(name);
    if (!found || found->shape != tensor.header.shape || found->type != tensor.header.type) {
      throw usage_error(fmt::format("'{}' is of another model: tensor '{}' is {}",
                                    checkpoint.string(), name,
                                    found ? "of another shape or type" : "missing"));
    }
    // Weights alone serve for inference.
    if (access.state_size_bytes(tensor.unit, tensor.kind) == 0) continue;
    UnitState unit(access, tensor.unit, tensor.kind, llama.dtype());
    const auto within = [&](size_t of_unit) {
      return std::clamp(of_unit, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes) -
             tensor.offset_bytes;
    };
    saved.read_verified(name, within(unit.begin_bytes()), within(unit.end_bytes()),
                        [&](size_t offset_bytes, std::span<const std::byte> bytes) {
                          unit.write(tensor.offset_bytes + offset_bytes, bytes);
                        });
  }
}

void verify_masters(const fs::path& checkpoint) {
  const CheckpointTensors saved(checkpoint);
  for (const auto& [name, tensor] : saved.all()) {
    if (!name.starts_with("weight.") && !name.starts_with("residual.")) continue;
    saved.read_verified(name, 0, tensor.size_bytes, [](size_t, std::span<const std::byte>) {});
  }
}

}  // namespace strata::train
