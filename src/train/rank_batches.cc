#include "train/rank_batches.h"

#include <algorithm>

#include "base/error.h"

namespace strata::train {

RankBatches::RankBatches(int64_t micro_batches, int64_t windows, int64_t sequence_len,
                         DataRank rank)
    : rank_(rank) {
  STRATA_CHECK(rank.rank >= 0 && rank.rank < rank.ranks, "a rank is one of all");
  const auto tokens = static_cast<size_t>(windows * sequence_len);
  positions_.resize(tokens);
  for (size_t i = 0; i < tokens; ++i) {
    positions_[i] = static_cast<int32_t>(static_cast<int64_t>(i) % sequence_len);
  }
  for (int64_t i = 0; i <= windows; ++i) {
    offsets_.push_back(static_cast<int32_t>(i * sequence_len));
  }
  for (int64_t m = 0; m < micro_batches; ++m) {
    Batch& batch = batches_.emplace_back();
    batch.tokens.resize(tokens);
    batch.targets.resize(tokens);
  }
  for (const Batch& batch : batches_) {
    views_.push_back({batch.tokens, batch.targets, positions_, offsets_});
  }
}

int64_t RankBatches::fill(DataLoader& loader) {
  const auto each = static_cast<int64_t>(batches_.size());
  int64_t unmasked = loader.skip(rank_.rank * each);
  for (Batch& batch : batches_) unmasked += loader.next(batch.tokens, batch.targets);
  return unmasked + loader.skip((rank_.ranks - 1 - rank_.rank) * each);
}

int64_t RankBatches::fill(EvalLoader& loader) {
  int64_t unmasked = 0;
  for (int rank = 0; rank < rank_.ranks; ++rank) {
    for (Batch& batch : batches_) {
      if (rank != rank_.rank) {
        unmasked += loader.skip();
        continue;
      }
      const int64_t of_batch = loader.next(batch.tokens, batch.targets);
      unmasked += of_batch;
      if (of_batch > 0) continue;
      std::fill(batch.tokens.begin(), batch.tokens.end(), 0);
      std::fill(batch.targets.begin(), batch.targets.end(), -1);
    }
  }
  return unmasked;
}

}  // namespace strata::train
