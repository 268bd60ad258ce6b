// The arithmetic ceiling of the host device: its own bf16 matrix product at one shape.
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

  /// FLOP/s of one product, waited for.
  [[nodiscard]] double run();
  /// Of a sample of the product's elements, those that differ from double precision by more than
  /// bf16 allows.
  [[nodiscard]] int64_t count_wrong() const;
  [[nodiscard]] const MatmulShape& shape() const noexcept { return shape_; }

 private:
  gpu::Device& device_;
  MatmulShape shape_;
  std::unique_ptr<gpu::Arena> memory_;
  std::unique_ptr<gpu::Stream> stream_;
  gpu::MatmulArgs args_;
};

}  // namespace strata::bench
