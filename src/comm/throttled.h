// A slower connection between ranks than there is: for benches and for trying out plans.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace strata::comm {

/// On host devices: after each collective the stream sleeps for collective_bytes() / speed, which
/// an abort() ends. A barrier takes no longer. Throws a usage error for a speed that is not at
/// least 1 byte per second and finite.
[[nodiscard]] std::unique_ptr<Communicator> throttled(std::unique_ptr<Communicator> group,
                                                      double bytes_per_second);

}  // namespace strata::comm
