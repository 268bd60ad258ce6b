#include "gpu/lane_orders.h"

#include "cuda_emulator/emulator.h"

namespace strata::gpu {

// Under ThreadSanitizer one: what it looks for, it finds in any.
#ifdef __SANITIZE_THREAD__
int lane_order_count() { return 1; }
#else
int lane_order_count() { return 3; }
#endif

void use_lane_order(int index) {
  using cuda::emulator::Order;
  constexpr Order kOrders[] = {Order::kRandom, Order::kForward, Order::kBackward};
  cuda::emulator::set_lane_order(kOrders[index], 0x5eed);
}

}  // namespace strata::gpu
