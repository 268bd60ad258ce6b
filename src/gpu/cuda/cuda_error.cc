#include "gpu/cuda/cuda_error.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

namespace strata::gpu::cuda {
namespace {

/// What a person can do about it; empty where the runtime's words say all there is.
std::string_view advice(int status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
      return "free memory on the device or plan for less";
    case cudaErrorInsufficientDriver:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorSystemDriverMismatch:
      return "update the NVIDIA driver";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:
      return "this build has no code for this device: add its architecture to "
             "CMAKE_CUDA_ARCHITECTURES and build again";
    case cudaErrorDevicesUnavailable:
      return "another process has the device for itself alone, see nvidia-smi";
    case cudaErrorNotPermitted:
    case cudaErrorOperatingSystem:
      return "the system keeps this process from the device; in a container, give it the device "
             "and the memory lock limit";
    case cudaErrorSystemNotReady:
      return "a service of the driver is not running; on machines with NVSwitch that is "
             "nvidia-fabricmanager";
    case cudaErrorLaunchTimeout:
      return "a display's watchdog ended the kernel; use a device without a display";
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
      return "the hardware reported an error that it could not correct; look for Xid in the "
             "kernel's log and have the device checked";
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
      return "a kernel failed; if it happens again, run it under compute-sanitizer and report it";
    case cudaErrorUnknown:
      return "look for Xid in the kernel's log; the device may have fallen off the bus";
    default:
      return "";
  }
}

}  // namespace

bool is_lost(int status) noexcept {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

Error cuda_error(int status, std::string_view what) {
  const auto code = static_cast<cudaError_t>(status);
  std::string text =
      fmt::format("cannot {}: {} ({})", what, cudaGetErrorString(code), cudaGetErrorName(code));
  if (is_lost(status)) {
    text +=
        "; the device is lost to this process, and what was in its memory with it: start "
        "again from the last checkpoint";
  }
  if (const std::string_view more = advice(status); !more.empty())
    text += fmt::format("; {}", more);
  return {status == cudaErrorMemoryAllocation ? ErrorKind::kDoesNotFit : ErrorKind::kFailed, text};
}

void check(int status, std::string_view what) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  throw cuda_error(status, what);
}

}  // namespace strata::gpu::cuda
