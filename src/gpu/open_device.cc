#include "gpu/open_device.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"

namespace strata::gpu {

OpenedDevice open_device(const DeviceOptions& options) {
  std::string note;
  if (options.choice != DeviceChoice::kHost) {
    const CudaAvailability cuda = cuda_availability();
    if (cuda.status == CudaStatus::kAvailable) return {create_cuda_device(options.cuda), {}};
    if (options.choice == DeviceChoice::kCuda) {
      throw usage_error(fmt::format("device: cuda is not possible: {}", cuda.diagnosis));
    }
    note = fmt::format("device  the host's CPU cores, not CUDA: {}", cuda.diagnosis);
  }
  return {create_host_device(options.host), std::move(note)};
}

}  // namespace strata::gpu
