// The arithmetic ceiling of a device: its own bf16 matrix product at one shape.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/device.h"
#include "gpu/operators.h"

namespace strata::bench {

struct MatmulShape {
  std::string name;
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  DType c_dtype;
};

/// Matrices of one shape, filled with values whose product is checked, ready to be timed again and
/// again.
class MatmulTimer {
 public:
  MatmulTimer(gpu::Device& device, MatmulShape shape);

  /// FLOP/s of products in a row, so many that waiting for them does not count.
  [[nodiscard]] double run();
  /// Of a sample of the product's elements, those that differ from double precision by more than
  /// bf16 allows.
  [[nodiscard]] int64_t count_wrong();
  [[nodiscard]] const MatmulShape& shape() const noexcept { return shape_; }

 private:
  /// Copies between device memory and `host`, and waits.
  void copy(gpu::Arena& host, gpu::CopyDirection direction);
  /// Seconds of `products_` products.
  [[nodiscard]] double time();

  gpu::Device& device_;
  MatmulShape shape_;
  std::unique_ptr<gpu::Arena> memory_;
  size_t matrix_bytes_ = 0;  // of A, B and C, which stand first in `memory_`
  std::unique_ptr<gpu::Stream> stream_;
  gpu::MatmulArgs args_;
  int products_ = 1;
};

}  // namespace strata::bench
