// A slower drive than the one that there is: for trying schedules, and for tests of them.
#pragma once

#include "nvme/backend.h"

namespace strata::nvme {

/// Backends of `inner` whose transfers take at least size / speed of their drive's time, which
/// reads and writes share: first come, first served, and no transfer ends before its time is over.
/// A sync takes no time, but ends no earlier than what came before it. What is transferred in two
/// goes counts twice. A speed of 0 is no limit. One more thread for each drive, which sleeps.
[[nodiscard]] BackendFactory throttled(BackendFactory inner, double read_bytes_per_second,
                                       double write_bytes_per_second);

}  // namespace strata::nvme
