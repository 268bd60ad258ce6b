// Transfers by threads that call pread and pwrite: for kernels and containers that forbid io_uring.
#pragma once

#include <memory>

#include "nvme/backend.h"

namespace strata::nvme {

/// Throws IoError where the file cannot be opened. Registers no buffers.
[[nodiscard]] std::unique_ptr<Backend> open_thread_backend(const BackendOptions& options);

}  // namespace strata::nvme
