// An NVIDIA GPU as a device, through CUDA's runtime. Where the build has no CUDA these functions
// are there all the same (cuda_absent.cc) and say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpu/device.h"

namespace strata::gpu {

struct CudaDeviceOptions {
  /// CUDA's number of the device among those that this process sees.
  int ordinal = 0;
  /// What all device arenas together may hold; 0: what the device has free.
  size_t memory_bytes = 0;
};

struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  size_t memory_bytes = 0;   // in all; how much is free only its Device knows, at the price of
                             // a context on it
};

enum class CudaStatus : uint8_t {
  kAvailable,
  kNotBuilt,      // this build has no CUDA
  kNoDriver,      // no NVIDIA driver is loaded
  kDriverTooOld,  // for the runtime that this build links
  kNoDevice,      // none is there, or none is visible to this process
  kDeviceTooOld,  // all that there are
  kFailed,        // the driver or the device does not work
};

struct CudaAvailability {
  CudaStatus status = CudaStatus::kNotBuilt;
  /// Why not, in one clause and what to do; empty where available.
  std::string diagnosis;
  std::vector<CudaDeviceInfo> devices;  // those that can be used, where available
};

/// The oldest compute capability that there are kernels for.
inline constexpr int kOldestMajor = 8;

/// Asks the driver. Creates no context, so a device that is broken may only show when it is
/// created. Never throws for what it finds.
[[nodiscard]] CudaAvailability cuda_availability();

/// The device, with a context of its own on the GPU and threads that sleep while they wait for it.
/// Throws a usage error with cuda_availability()'s diagnosis where that finds none or not this
/// ordinal, and a failure where the device does not work.
///
/// Memory: device arenas are one cudaMalloc each, aligned to 256 bytes at least. Host arenas are
/// mapped and registered, which brings all their pages into memory at once; where the system does
/// not allow that, the error (kDoesNotFit) says how much it would have allowed.
///
/// Errors: functions that end in _async, and operators, never throw for what the GPU does: the
/// first error skips all later work and is thrown by every synchronize from then on.
[[nodiscard]] std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& options);

}  // namespace strata::gpu
