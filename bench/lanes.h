// The benchmarks of `strata bench`, by lane.
#pragma once

#include <vector>

#include "bench/report.h"

namespace strata::bench {

struct Options {
  int threads = 0;      // 0: all cores
  int repetitions = 5;  // of which the median is taken
};

/// "matmul/...": the host device's bf16 products at a training step's shapes, GFLOP/s. The ceiling
/// is the fastest of them.
[[nodiscard]] std::vector<Row> run_matmul(const Options& options);

/// "step/...": whole optimizer steps of a fixed model (hidden 1024, 8 layers, 16 heads, vocabulary
/// 32000, sequence 512) on the host device: tokens/s, and the arithmetic really done, recomputation
/// included, as a share of the bf16 product's peak, measured between the steps.
[[nodiscard]] std::vector<Row> run_step(const Options& options);

}  // namespace strata::bench
