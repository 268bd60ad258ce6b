// Matrix products of the CUDA device: cuBLASLt.
#pragma once

#include <cstddef>
#include <memory>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/scratch.h"
#include "gpu/operators.h"

namespace strata::gpu::cuda {

/// Products on one device. One thread at a time.
///
/// The bits of a product depend on its shape alone (on one device model and library version): the
/// algorithm is what cuBLASLt's heuristic names first for the shape, its strides and pointers of 16
/// bytes alignment, whatever the real alignment. Where k is split, the parts are summed in fp32 in
/// the workspace in a fixed order; ways to sum in place or in the output's type are ruled out.
/// fp32 products are in fp32 throughout (no TF32, unless NVIDIA_TF32_OVERRIDE is set).
class Matmul {
 public:
  /// `workspace_bytes` of scratch are at cuBLASLt's disposal. Loads cuBLASLt; on the calling
  /// thread's current device.
  explicit Matmul(size_t workspace_bytes);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;

  [[nodiscard]] size_t scratch_bytes() const noexcept;

  /// Enqueues a product. The first of a shape asks the heuristic, some 100 us on the calling
  /// thread. Throws a failure for what cuBLASLt cannot do.
  void run(const MatmulArgs& args, StreamHandle stream);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata::gpu::cuda
