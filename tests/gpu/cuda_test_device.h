// The CUDA device of tests: the emulated one or a real one, as the program is linked.
#pragma once

#include <memory>

#include "catch.h"
#include "gpu/cuda/cuda_device.h"

namespace strata::gpu {

/// Null, with a warning that makes the test count as skipped, where there is none:
/// `const auto device = open_test_device(); if (!device) return;`
inline std::unique_ptr<Device> open_test_device(const CudaDeviceOptions& options = {}) {
  const CudaAvailability found = cuda_availability();
  if (found.status != CudaStatus::kAvailable) {
    WARN("skipped: no CUDA device: " << found.diagnosis);
    return nullptr;
  }
  return create_cuda_device(options);
}

}  // namespace strata::gpu
