// The emulator's twin of src/gpu/cuda/launch.cuh: same contracts, for the host compiler.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>

#include "base/error.h"
#include "cuda_emulator/kernel.h"

namespace strata::gpu::cuda {

inline std::byte* shared_memory() { return emulator::block_shared_memory(); }

inline unsigned grid_size(int64_t count, int64_t per_block) {
  STRATA_CHECK(count >= 0 && per_block > 0, "a grid covers a count by blocks of at least one");
  const int64_t blocks = count / per_block + (count % per_block != 0 ? 1 : 0);
  if (blocks > INT32_MAX) {
    throw failure("a launch of " + std::to_string(blocks) + " blocks exceeds what a grid can have");
  }
  return static_cast<unsigned>(blocks);
}

template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            cudaStream_t stream, Args... args) {
  static_assert(sizeof...(Params) == sizeof...(Args), "one argument for each parameter");
  static_assert((std::is_trivially_copyable_v<Params> && ...), "parameters are copied as bytes");
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  std::tuple<Params...> values(static_cast<Params>(args)...);
  std::array<const void*, sizeof...(Params)> pointers{};
  [[maybe_unused]] size_t used = 0;
  [[maybe_unused]] const auto note = [&](const auto& value) {
    if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(value)>>) pointers[used++] = value;
  };
  std::apply([&](const auto&... value) { (note(value), ...); }, values);
  const cudaError_t error = emulator::launch_kernel(
      {name, grid, block, shared_bytes, stream, std::span(pointers.data(), used)},
      [kernel, values] { std::apply(kernel, values); });
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw failure(std::string(name) + ": cannot launch " + std::to_string(grid.x) + "x" +
                  std::to_string(grid.y) + "x" + std::to_string(grid.z) + " blocks of " +
                  std::to_string(block.x * block.y * block.z) + " threads with " +
                  std::to_string(shared_bytes) +
                  " bytes of shared memory: " + cudaGetErrorString(error));
  }
}

}  // namespace strata::gpu::cuda
