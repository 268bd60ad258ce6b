// The learning rate of each optimizer step.
#pragma once

#include <cstdint>

namespace strata::train {

enum class LrScheduler : uint8_t { kCosine, kLinear, kConstant };

struct LearningRateSchedule {
  LrScheduler scheduler = LrScheduler::kCosine;
  double peak = 3e-4;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double cosine_min_lr_ratio = 0.1;  // what the cosine falls towards, as a part of the peak
};

/// `step` counts from 1. With W = warmup_steps and N = total_steps:
///
///   step <= W:  peak * step / W          rises to the peak in equal steps, the first above 0
///   step >  W:  peak * decay(p),         p = (step - 1 - W) / (N - W), at most 1
///     cosine    decay(p) = r + (1 - r) * (1 + cos(pi * p)) / 2,  r = cosine_min_lr_ratio
///     linear    decay(p) = 1 - p
///     constant  decay(p) = 1
///
/// So p is 0 in the first step after the warm-up and 1 only in the step after the last: no step of
/// the run is spent on a rate of 0. The decay is that of Hugging Face's schedules; cosine is
/// Loshchilov and Hutter, "SGDR" (ICLR 2017), equation 5, without restarts.
/// A function of its arguments alone, so a resumed run goes on exactly.
[[nodiscard]] double learning_rate(const LearningRateSchedule& schedule, int64_t step);

}  // namespace strata::train
