// From a checkpoint to a directory that Hugging Face's tools load as it is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "model/safetensors.h"

namespace strata::train {

/// A checkpoint itself, or the newest one in a run's directory. A usage error where there is none.
[[nodiscard]] std::filesystem::path find_checkpoint(const std::filesystem::path& path);

struct ExportOptions {
  /// kBf16: the weights that compute reads; kF32: the masters. Empty: as the model's config says in
  /// torch_dtype, else kBf16.
  std::optional<model::ElementType> type;
  int64_t max_shard_bytes = 5'000'000'000;
};

struct ExportSummary {
  std::filesystem::path checkpoint;
  model::ElementType type;
  int64_t tensors = 0;
  int64_t bytes = 0;
};

/// Writes config.json (as the model came) and the weights with their original names and shapes,
/// reading the checkpoint piece by piece: host memory does not grow with the model. Refuses, as a
/// usage error, an output directory that already has a config.json or weights in it.
ExportSummary export_model(const std::filesystem::path& source,
                           const std::filesystem::path& directory, const ExportOptions& options);

}  // namespace strata::train
