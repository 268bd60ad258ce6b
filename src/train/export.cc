#include "train/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "base/file.h"
#include "model/hf_config.h"
#include "train/checkpoint.h"
#include "train/checkpoint_tensors.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using model::ElementType;

constexpr size_t kPiece = size_t{1} << 18;  // elements

}  // namespace

fs::path find_checkpoint(const fs::path& path) {
  if (is_checkpoint(path)) return path;
  const std::vector<fs::path> all = list_checkpoints(path);
  if (all.empty()) {
    throw usage_error(
        fmt::format("there is no checkpoint at '{}'; name a checkpoint or the "
                    "output_dir of a run",
                    path.string()));
  }
  return all.back();
}

ExportSummary export_model(const fs::path& source, const fs::path& directory,
                           const ExportOptions& options) {
  const fs::path checkpoint = find_checkpoint(source);
  for (const char* name : {"config.json", "model.safetensors", "model.safetensors.index.json"}) {
    if (fs::exists(directory / name)) {
      throw usage_error(fmt::format("'{}' already holds a model ({}); name another directory",
                                    directory.string(), name));
    }
  }
  if (fs::exists(directory / "metrics.jsonl") || !list_checkpoints(directory).empty()) {
    throw usage_error(fmt::format("'{}' holds a run; name another directory", directory.string()));
  }
  const model::LlamaConfig config = model::read_llama_config(checkpoint);
  verify_masters(checkpoint);
  const CheckpointTensors saved(checkpoint);
  const ElementType type = options.type.value_or(
      config.torch_dtype == "float32" ? ElementType::kF32 : ElementType::kBf16);

  const std::vector<model::TensorSpec> tensors = model::llama_tensors(config);
  std::vector<model::TensorHeader> headers;
  for (const model::TensorSpec& tensor : tensors) {
    headers.push_back({tensor.name, type, tensor.shape});
  }
  ExportSummary summary{.checkpoint = checkpoint, .type = type};
  model::CheckpointWriter writer(directory, headers, options.max_shard_bytes);
  std::vector<float> masters;
  std::vector<Bf16> weights;
  std::vector<uint16_t> residuals;
  for (const model::TensorSpec& tensor : tensors) {
    const CheckpointTensors::Tensor* weight = saved.find("weight." + tensor.name);
    const CheckpointTensors::Tensor* residual = saved.find("residual." + tensor.name);
    const ElementType stored = residual ? ElementType::kBf16 : ElementType::kF32;
    if (!weight || weight->shape != tensor.shape || weight->type != stored ||
        (residual && residual->size_bytes != weight->size_bytes)) {
      throw usage_error(fmt::format("'{}' is damaged: tensor '{}' is missing or of another shape",
                                    checkpoint.string(), tensor.name));
    }
    const size_t elements = weight->size_bytes / (residual ? sizeof(Bf16) : sizeof(float));
    for (size_t begin = 0; begin < elements; begin += kPiece) {
      const size_t count = std::min(kPiece, elements - begin);
      masters.resize(count);
      weights.resize(count);
      if (residual) {
        residuals.resize(count);
        saved.read(*weight, begin * 2, std::as_writable_bytes(std::span(weights)));
        saved.read(*residual, begin * 2, std::as_writable_bytes(std::span(residuals)));
        for (size_t i = 0; i < count; ++i) masters[i] = join_master({weights[i], residuals[i]});
      } else {
        saved.read(*weight, begin * 4, std::as_writable_bytes(std::span(masters)));
        std::transform(masters.begin(), masters.end(), weights.begin(), to_bf16);
      }
      writer.write(type == ElementType::kF32 ? std::as_bytes(std::span(masters))
                                             : std::as_bytes(std::span(weights)));
    }
    ++summary.tensors;
    summary.bytes += static_cast<int64_t>(elements) * (type == ElementType::kF32 ? 4 : 2);
  }
  write_text_file_atomically(directory / "config.json", config.text);
  writer.finish();
  return summary;
}

}  // namespace strata::train
