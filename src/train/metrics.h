// The record of a run: a file of JSON objects, one a line (JSONL). docs/metrics.md says what each
// field means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/file.h"

namespace strata::train {

struct TrainMetrics {
  int64_t step = 0;
  double loss = 0;
  double grad_norm = 0;
  bool clipped = false;
  double lr = 0;
  double tokens_per_second = 0;
  int64_t tokens = 0;
  double seconds = 0;
  size_t device_bytes = 0;
  size_t host_bytes = 0;
  uint64_t nvme_bytes_written = 0;  // to all drives in this step: their wear
};

struct EvalMetrics {
  int64_t step = 0;
  double eval_loss = 0;
};

/// One JSON object without a line break. Doubles are written in the shortest form that reads back
/// to the same value; one that is not finite becomes null and adds `"finite": false`.
[[nodiscard]] std::string to_json(const TrainMetrics& metrics);
[[nodiscard]] std::string to_json(const EvalMetrics& metrics);

/// Appends lines to a file. Each is handed to the kernel by one write before append() returns, so
/// after a crash of the process at most the last line is torn. For one thread; throws IoError.
class MetricsWriter {
 public:
  /// A run that starts afresh empties the file.
  static constexpr int64_t kFreshRun = -1;

  /// Opens or creates the file and cuts off what the run will write again: everything from the
  /// first line of a step above `resumed_step` on, and a torn end.
  MetricsWriter(std::filesystem::path path, int64_t resumed_step);

  /// Whether the last line kept is that of training step `step`: its evaluation, if one was due,
  /// was cut off.
  [[nodiscard]] bool ends_with_step(int64_t step) const noexcept { return last_step_ == step; }

  void append(const TrainMetrics& metrics) { append_line(to_json(metrics)); }
  void append(const EvalMetrics& metrics) { append_line(to_json(metrics)); }

 private:
  void append_line(std::string line);

  std::filesystem::path path_;
  UniqueFd fd_;
  int64_t last_step_ = -1;  // -1: the file, as it was opened, ends with no training step
};

}  // namespace strata::train
