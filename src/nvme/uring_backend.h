// Transfers through io_uring: no copy, no thread.
#pragma once

#include <memory>

#include "nvme/backend.h"

namespace strata::nvme {

/// Throws IoError: "open" for the file, "set up io_uring for" where the kernel or a container
/// forbids that. What of io_uring the kernel lacks is done without.
[[nodiscard]] std::unique_ptr<Backend> open_uring_backend(const BackendOptions& options);

}  // namespace strata::nvme
