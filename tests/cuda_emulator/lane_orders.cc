#include "gpu/lane_orders.h"

#include "cuda_emulator/emulator.h"
#include "trials.h"

namespace strata::gpu {

// Under a sanitizer one: what it looks for, it finds in any.
int lane_order_count() { return trials(3, 1); }

void use_lane_order(int index) {
  using cuda::emulator::Order;
  constexpr Order kOrders[] = {Order::kRandom, Order::kForward, Order::kBackward};
  cuda::emulator::set_lane_order(kOrders[index], 0x5eed);
}

}  // namespace strata::gpu
