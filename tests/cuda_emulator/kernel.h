// What a kernel compiled by the host compiler sees of CUDA: the built-in variables, barriers and
// intrinsics under their own names, and what the twins of launch.cuh and ptx.cuh are made of. The
// functions here are called by the threads of a running kernel only.
//
// Warp-wide operations and barriers are meetings: the last lane to arrive does the work of all. A
// lane that is missing (it has exited, or waits elsewhere in the source) is diagnosed and ends the
// kernel with cudaErrorLaunchFailure.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <span>

namespace strata::gpu::cuda::emulator {

using Location = std::source_location;

void synchronize_block(const Location& where);
void synchronize_warp(const Location& where);
/// The value that lane `source` brings.
[[nodiscard]] uint64_t exchange(uint64_t value, int source, const Location& where);
[[nodiscard]] unsigned vote(bool predicate, const Location& where);
/// ldmatrix of `count` matrices.
void load_matrices(uint32_t* out, int count, bool transposed, const void* row,
                   const Location& where);
/// mma.m16n8k16 of bf16.
void multiply(float* d, const uint32_t* a, const uint32_t* b, const Location& where);

void copy_async(void* shared, const void* global, size_t size_bytes, bool valid,
                const Location& where);
void commit_copies();
void wait_for_copies(int pending);

/// Ends the kernel with a diagnosis unless the bytes lie in one allocation of device or page-locked
/// memory and are aligned to `alignment`.
void check_global(const void* pointer, size_t size_bytes, size_t alignment, const Location& where);

[[nodiscard]] std::byte* block_shared_memory();
[[nodiscard]] int lane_index();

struct LaunchRequest {
  const char* name;
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
  /// The kernel's parameters that are pointers, to be checked when it runs.
  std::span<const void* const> pointers;
};
/// Puts a kernel into its stream; `thread` is called once for each CUDA thread.
cudaError_t launch_kernel(const LaunchRequest& request, std::function<void()> thread);

}  // namespace strata::gpu::cuda::emulator

// NOLINTBEGIN(bugprone-reserved-identifier): CUDA's own names.
extern constinit thread_local uint3 threadIdx;
extern constinit thread_local uint3 blockIdx;
extern constinit thread_local dim3 blockDim;
extern constinit thread_local dim3 gridDim;

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif

inline void __syncthreads(const std::source_location& where = std::source_location::current()) {
  strata::gpu::cuda::emulator::synchronize_block(where);
}
inline void __syncwarp(const std::source_location& where = std::source_location::current()) {
  strata::gpu::cuda::emulator::synchronize_warp(where);
}

inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
// NOLINTEND(bugprone-reserved-identifier)
