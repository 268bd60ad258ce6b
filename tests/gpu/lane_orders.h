// The orders in which a test lets the threads of kernels run: several in the emulator
// (tests/cuda_emulator/lane_orders.cc), the hardware's own on a real device.
#pragma once

namespace strata::gpu {

[[nodiscard]] int lane_order_count();
/// For launches from now on.
void use_lane_order(int index);

}  // namespace strata::gpu
