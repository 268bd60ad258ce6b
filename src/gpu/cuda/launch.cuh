// How a kernel is launched and where its shared memory lies. The emulator (tests/cuda_emulator) has
// a twin of this header, so kernel files use neither <<<>>> nor __shared__ variables.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

#include "base/error.h"

namespace strata::gpu::cuda {

/// The block's dynamic shared memory, 128-byte aligned and uninitialised.
__device__ __forceinline__ std::byte* shared_memory() {
  extern __shared__ __align__(128) std::byte strata_shared_memory[];
  return strata_shared_memory;
}

/// Blocks of `per_block` elements that cover `count`; throws when a grid cannot have that many.
inline unsigned grid_size(int64_t count, int64_t per_block) {
  STRATA_CHECK(count >= 0 && per_block > 0, "a grid covers a count by blocks of at least one");
  const int64_t blocks = count / per_block + (count % per_block != 0 ? 1 : 0);
  if (blocks > INT32_MAX) {
    throw failure("a launch of " + std::to_string(blocks) + " blocks exceeds what a grid can have");
  }
  return static_cast<unsigned>(blocks);
}

/// Launches `kernel` on `stream` and returns; a grid of no blocks is no work. Throws when the
/// launch is refused; what goes wrong while it runs is reported by the stream's next
/// synchronisation.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "one argument for each parameter");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr size_t kSharedBytesWithoutAsking = 48 * 1024;
  std::tuple<Params...> values(static_cast<Params>(args)...);
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kSharedBytesWithoutAsking) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes));
  }
  if (error == cudaSuccess) {
    error = std::apply(
        [&](auto&... value) {
          void* pointers[] = {static_cast<void*>(&value)..., nullptr};
          return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers,
                                  shared_bytes, stream);
        },
        values);
  }
  if (error != cudaSuccess) {
    cudaGetLastError();  // The exception carries it; left behind it would be blamed on another
                         // call.
    throw failure(std::string(name) + ": cannot launch " + std::to_string(grid.x) + "x" +
                  std::to_string(grid.y) + "x" + std::to_string(grid.z) + " blocks of " +
                  std::to_string(block.x * block.y * block.z) + " threads with " +
                  std::to_string(shared_bytes) +
                  " bytes of shared memory: " + cudaGetErrorString(error));
  }
}

}  // namespace strata::gpu::cuda
