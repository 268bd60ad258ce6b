// How much scratch the operators of the CUDA device need, and how it is cut. Compiled in every
// build: a plan for a GPU is made where there is none, too. Sizes are constants of the shape; only
// that of products depends on the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpu/cuda/kernels.h"
#include "gpu/operators.h"

namespace strata::gpu::cuda {

/// What cuBLASLt wants for its best algorithms: 32 MiB from Hopper on, 8 MiB before.
[[nodiscard]] size_t matmul_workspace_bytes(int compute_capability_major) noexcept;
/// Scratch is aligned to 64 bytes (gpu/operators.h); the workspace begins at the next multiple.
inline constexpr size_t kMatmulWorkspaceAlignment = 256;
[[nodiscard]] constexpr size_t matmul_scratch_bytes(size_t workspace_bytes) noexcept {
  return workspace_bytes + kMatmulWorkspaceAlignment;
}

[[nodiscard]] constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Rows that one block of RMSNorm's backward pass adds up, at least one.
[[nodiscard]] constexpr int64_t rows_of_block(const RmsNormBackwardArgs& args) noexcept {
  constexpr int64_t kScratchElements = 2 * 1024 * 1024;
  const int64_t blocks =
      std::clamp<int64_t>(kScratchElements / std::max<int64_t>(1, args.width), 64, 1024);
  return std::max<int64_t>(1, ceil_div(args.rows, blocks));
}

/// Blocks' sums begin on 64-byte boundaries.
[[nodiscard]] constexpr int64_t partial_stride(int64_t width) noexcept {
  return (width + 15) / 16 * 16;
}

/// Operators that say how much scratch those of a device of that compute capability need. To launch
/// any is a programmer's error.
[[nodiscard]] std::unique_ptr<Operators> operator_sizes(int compute_capability_major);

}  // namespace strata::gpu::cuda
