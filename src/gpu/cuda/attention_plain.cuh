// What the plain kernels of attention share: those for what the tensor core kernels do not take,
// which is fp32, other head dimensions and odd strides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "gpu/cuda/attention_tasks.cuh"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"
#include "gpu/cuda/vectors.cuh"
#include "gpu/operators.h"

namespace strata::gpu::cuda::flash {

inline constexpr int kPlainWarps = 4;
inline constexpr int kPlainThreads = kPlainWarps * kWarp;

template <class T>
__device__ __forceinline__ float element(const T* from) {
  return load_floats<1>(from)[0];
}

template <class T>
__device__ __forceinline__ void set_element(T* to, float value) {
  store_floats(to, Floats<1>{{value}});
}

/// As the type holds it.
template <class T>
__device__ __forceinline__ float rounded(float value) {
  return unpack(pack<T>(Floats<1>{{value}}))[0];
}

template <class T>
__device__ __forceinline__ float dot(const T* a, const T* b, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += element(a + i) * element(b + i);
  return sum;
}

/// Lanes of a warp that have something to do, of `count` things from some point on.
__device__ __forceinline__ int busy_lanes(int count) { return count < kWarp ? count : kWarp; }

/// Shared memory for `count` fp32 rows of head_dim.
[[nodiscard]] inline size_t plain_shared_bytes(const AttentionArgs& args, int count) {
  const size_t size_bytes = static_cast<size_t>(count * args.head_dim) * sizeof(float);
  STRATA_CHECK(size_bytes <= size_t{99} * 1024, "attention: a head dimension of at most 3168");
  return size_bytes;
}

/// A row a warp.
[[nodiscard]] inline unsigned plain_tasks(const AttentionArgs& args, int64_t heads) {
  return grid_size(parts_of(args, kPlainWarps) * heads, 1);
}

}  // namespace strata::gpu::cuda::flash
