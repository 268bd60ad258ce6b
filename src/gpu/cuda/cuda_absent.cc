// In place of the CUDA device in builds without CUDA.
#include "base/error.h"
#include "gpu/cuda/cuda_device.h"

namespace strata::gpu {

CudaAvailability cuda_availability() {
  return {.status = CudaStatus::kNotBuilt,
          .diagnosis = "this build has no CUDA; build it where the CUDA toolkit 13 is installed",
          .devices = {}};
}

std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& /*options*/) {
  throw usage_error("cannot use a CUDA device: " + cuda_availability().diagnosis);
}

}  // namespace strata::gpu
