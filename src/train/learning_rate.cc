#include "train/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace strata::train {

double learning_rate(const LearningRateSchedule& schedule, int64_t step) {
  STRATA_CHECK(step >= 1, "optimizer steps count from 1");
  const auto warmup = static_cast<double>(schedule.warmup_steps);
  const auto total = static_cast<double>(schedule.total_steps);
  const auto now = static_cast<double>(step);
  if (step <= schedule.warmup_steps) return schedule.peak * (now / warmup);

  // Past the planned end (a run continued with other settings) the rate stays where it ended.
  const double progress = schedule.total_steps > schedule.warmup_steps
                              ? std::min(1.0, (now - 1 - warmup) / (total - warmup))
                              : 1.0;
  switch (schedule.scheduler) {
    case LrScheduler::kCosine: {
      const double floor = schedule.cosine_min_lr_ratio;
      return schedule.peak *
             (floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
    }
    case LrScheduler::kLinear:
      return schedule.peak * (1 - progress);
    case LrScheduler::kConstant:
      break;
  }
  return schedule.peak;
}

}  // namespace strata::train
