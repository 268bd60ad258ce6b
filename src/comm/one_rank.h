// The group of a rank that is alone, on any device.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace strata::comm {

/// Copies where in and out differ, and does nothing else. `device` must outlive it.
[[nodiscard]] std::unique_ptr<Communicator> create_one_rank(gpu::Device& device);

}  // namespace strata::comm
