// How much memory this process holds, as the kernel counts it (Linux).
#pragma once

#include <cstddef>

namespace strata::train {

struct ProcessMemory {
  size_t resident_bytes = 0;       // VmRSS: pages in memory now, shared ones included
  size_t peak_resident_bytes = 0;  // VmHWM: the most since the start or the last reset
};

/// Reads /proc/self/status; throws an Error where that does not say. The kernel keeps the counts in
/// batches of pages for each thread and CPU, so they may be some 100 KiB off.
[[nodiscard]] ProcessMemory read_process_memory();

/// Sets the peak back to what is resident now. False where the kernel does not allow it (needs
/// CONFIG_PROC_PAGE_MONITOR and a writable /proc).
[[nodiscard]] bool reset_peak_resident() noexcept;

/// What new allocations can take without swapping: MemAvailable, and less where a control group's
/// limit leaves less.
[[nodiscard]] size_t available_memory_bytes();

}  // namespace strata::train
