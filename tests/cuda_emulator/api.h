// Shared by the files that define the functions of the CUDA runtime API.
#pragma once

#include <cuda_runtime.h>

#include "cuda_emulator/runtime.h"

namespace strata::gpu::cuda::emulator {

/// What a call returns: an error is also kept for cudaGetLastError of the calling thread.
cudaError_t finish(cudaError_t error);

/// The most dynamic shared memory that a block of this device can ask for.
[[nodiscard]] size_t shared_bytes_limit(const Settings& settings);

}  // namespace strata::gpu::cuda::emulator
