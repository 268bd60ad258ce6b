// The AdamW update of one parameter: what every other implementation must equal bit for bit.
#pragma once

#include <cmath>

#include "base/bf16.h"
#include "cpu_adam/adam.h"

namespace strata::cpu_adam {

struct Element {
  float master, moment1, moment2;
};

/// `decay` is constants.decay, or 0 in a segment without decay. Each line is one or more binary32
/// operations in the order of the parentheses, numbered as in docs/adam.md. The build must not
/// contract them (-ffp-contract=off), nor relax them (-ffast-math).
[[nodiscard]] inline Element update_element(const Element& old, float gradient,
                                            const StepConstants& constants, float decay) noexcept {
  const float g = gradient * constants.gradient_scale;                                      // 1
  const float m = (constants.beta1 * old.moment1) + (constants.one_minus_beta1 * g);        // 2-4
  const float v = (constants.beta2 * old.moment2) + ((constants.one_minus_beta2 * g) * g);  // 5-8
  const float denominator =
      (std::sqrt(v) * constants.inverse_sqrt_correction2) + constants.epsilon;            // 9-11
  const float update = (constants.step_size * (m / denominator)) + (decay * old.master);  // 12-15
  return {old.master - update, m, v};                                                     // 16
}

/// update_element over elements [begin, end) of the shard.
void update_elements(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                     float decay) noexcept;

}  // namespace strata::cpu_adam
