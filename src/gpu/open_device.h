// Which device computes: the one seam between the devices there are and those who only want one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/cuda/cuda_device.h"
#include "gpu/device.h"
#include "gpu/host/host_device.h"

namespace strata::gpu {

/// kAuto: CUDA where there is a device that can be used, else the host.
enum class DeviceChoice : uint8_t { kAuto, kCuda, kHost };

struct DeviceOptions {
  DeviceChoice choice = DeviceChoice::kAuto;
  HostDeviceOptions host{};
  CudaDeviceOptions cuda{};
};

struct OpenedDevice {
  std::unique_ptr<Device> device;
  std::string note;  // one line for a person: why kAuto came to the host; else empty
};

/// Throws a usage error that says what is missing where CUDA was chosen and cannot be had, and a
/// failure where a CUDA device is there but does not work (also for kAuto: to compute at a
/// hundredth of the speed unasked would hide it).
[[nodiscard]] OpenedDevice open_device(const DeviceOptions& options);

}  // namespace strata::gpu
