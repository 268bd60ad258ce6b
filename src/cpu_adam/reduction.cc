#include "cpu_adam/reduction.h"

namespace strata::cpu_adam {

double finish_part(SumLanes lanes, const void* gradient, DType dtype, int64_t begin,
                   int64_t end) noexcept {
  for (int64_t i = begin; i < end; ++i) {
    const double x = dtype == DType::kF32
                         ? static_cast<const float*>(gradient)[i]
                         : to_float(Bf16{static_cast<const uint16_t*>(gradient)[i]});
    lanes[static_cast<size_t>(i - begin)] += x * x;
  }
  return sum_by_halves(lanes);
}

}  // namespace strata::cpu_adam
