// Reductions over a block in an order that its size alone decides: within a warp by halves of the
// distance between lanes, then over the warps in order.
#pragma once

#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/ptx.cuh"

namespace strata::gpu::cuda {

inline constexpr int kWarp = 32;

/// The sum over the warp, the same bits in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += ptx::shuffle_xor(value, mask);
  return value;
}

/// The largest over the warp; NaNs do not count.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    value = fmaxf(value, ptx::shuffle_xor(value, mask));
  }
  return value;
}

/// The sum over the block in every thread. All threads call it. `slots` is shared memory for one
/// value a warp; it must not be written again before the barrier after the next.
template <class T>
__device__ __forceinline__ T block_sum(T value, T* slots) {
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = value;
  __syncthreads();
  T sum = slots[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) sum += slots[warp];
  return sum;
}

/// As block_sum, the largest.
__device__ __forceinline__ float block_max(float value, float* slots) {
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) slots[threadIdx.x / kWarp] = value;
  __syncthreads();
  float max = slots[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) max = fmaxf(max, slots[warp]);
  return max;
}

}  // namespace strata::gpu::cuda
