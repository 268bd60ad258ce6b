// The micro-batches of a step, or of a step's worth of evaluation, that are one rank's.
//
// A step takes ranks x micro_batches micro-batches in the loader's order; rank r has those from
// r * micro_batches on. Every rank counts what the others have without reading it, so all know the
// same number of targets and the same position, and nothing has to be told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pipeline/executor.h"
#include "train/dataset.h"

namespace strata::train {

struct DataRank {
  int rank = 0;
  int ranks = 1;
};

/// Each window is a document of its own. For one thread.
class RankBatches {
 public:
  /// `micro_batches` of `windows` windows each, on each rank.
  RankBatches(int64_t micro_batches, int64_t windows, int64_t sequence_len, DataRank rank = {});
  RankBatches(const RankBatches&) = delete;
  RankBatches& operator=(const RankBatches&) = delete;

  /// Takes the rank's part of the next step. Returns the targets of the step, over all ranks, that
  /// are part of the loss. Throws as DataLoader::next.
  int64_t fill(DataLoader& loader);
  /// Likewise of what is to be evaluated, each micro-batch on one rank. Where there is nothing left
  /// for a micro-batch, all its targets are masked. Returns 0, on all ranks at once, when there was
  /// nothing left at all.
  int64_t fill(EvalLoader& loader);

  /// Of what was filled in last; valid as long as this.
  [[nodiscard]] std::span<const pipeline::HostMicroBatch> views() const noexcept { return views_; }

  [[nodiscard]] static size_t memory_bytes(int64_t micro_batches, int64_t tokens) noexcept {
    return static_cast<size_t>(2 * micro_batches + 1) * static_cast<size_t>(tokens) *
           sizeof(int32_t);
  }

 private:
  struct Batch {
    std::vector<int32_t> tokens, targets;
  };

  DataRank rank_;
  std::vector<Batch> batches_;
  std::vector<int32_t> positions_, offsets_;
  std::vector<pipeline::HostMicroBatch> views_;
};

}  // namespace strata::train
