// The row by row parts of attention between its matrix products: softmax, online and recomputed,
// and its gradient, on blocks of scores. All run on the calling thread.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace strata::gpu::host {

/// Blocks of scores have a multiple of this many columns (keys), no fewer than a vector has lanes.
inline constexpr int64_t kKeyMultiple = 64;

/// A block of scores [rows, keys], dense. Row r is of query row `first_row + r`; `group` query
/// rows, of the heads that share a key head, make up a position.
struct ScoreBlock {
  int64_t rows = 0, keys = 0;
  int64_t first_row = 0;
  int64_t used_rows = 0;  // query rows from here on are padding and see no key
  int64_t group = 1;
  int64_t first_position = 0;  // of query row 0
  int64_t first_key = 0;       // position of column 0
  float scale = 1;
  DType dtype = DType::kBf16;  // of probabilities and score gradients
};

/// A query row's softmax so far.
struct OnlineSoftmax {
  float max = 0;  // of the scaled scores; minus infinity before the first
  float sum = 0;  // of exp(score - max)
};

/// One step of online softmax: probabilities[rows, keys] = exp(scale * scores - max) of the keys
/// that a row sees, 0 elsewhere, with the row's new maximum. The row of `sums` [rows, width] of
/// weighted values is brought to the new maximum too, except before the row's first block.
/// `softmax` and `sums` start at row first_row.
void softmax_block(const ScoreBlock& block, const float* scores, OnlineSoftmax* softmax,
                   float* sums, int64_t width, void* probabilities);

/// The probabilities again, from each row's log_sum_exp (which starts at row first_row): fp32 in
/// place of the scores, and rounded.
void recompute_softmax_block(const ScoreBlock& block, const float* log_sum_exp, float* scores,
                             void* probabilities);

/// score_gradients = scale * probabilities * (probability_gradients - delta), 0 for keys not seen.
/// `delta` starts at row first_row.
void softmax_gradient_block(const ScoreBlock& block, const float* probabilities,
                            const float* probability_gradients, const float* delta,
                            void* score_gradients);

/// out = factor * in for `count` elements, rounded to `dtype`.
void scale_row(int64_t count, float factor, const float* in, DType dtype, void* out);

/// The sum of a[i] * b[i] of `count` elements of `dtype`.
float dot_row(int64_t count, DType dtype, const void* a, const void* b);

}  // namespace strata::gpu::host
