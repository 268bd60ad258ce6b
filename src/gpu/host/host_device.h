// The CPU cores as a device: an arena with a hard capacity, streams on real threads, and links
// whose speed can be limited. It trains small models on any machine and is where scheduling is
// tested. oneDNN multiplies matrices, Highway does the rest, oneTBB spreads both over threads.
#pragma once

#include <cstddef>
#include <memory>

#include "gpu/device.h"

namespace strata::gpu {

struct HostDeviceOptions {
  /// Threads of the compute operators; 0: one for each core this process may use.
  int threads = 0;
  /// What all device arenas together may hold; 0: half the machine's memory.
  size_t memory_bytes = 0;
  /// Limits of copies in each direction in bytes per second; 0: as fast as the memory.
  double upload_bytes_per_second = 0;
  double download_bytes_per_second = 0;
};

[[nodiscard]] std::unique_ptr<Device> create_host_device(const HostDeviceOptions& options);

}  // namespace strata::gpu
