#include "cpu_adam/adam.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "cpu_adam/adam-inl.h"

#if HWY_ONCE

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "cpu_adam/definition.h"
#include "cpu_adam/reduction.h"

namespace strata::cpu_adam {
namespace {

HWY_EXPORT(update_run);
HWY_EXPORT(sum_part);

/// Calls run(begin, end, decay) for the pieces of [begin, end) that lie in one segment each.
template <class Run>
void for_each_run(std::span<const Segment> segments, int64_t begin, int64_t end, Run run) {
  int64_t segment_begin = 0;
  for (const Segment& segment : segments) {
    if (segment_begin >= end) break;
    const int64_t segment_end = segment_begin + segment.count;
    const int64_t run_begin = std::max(begin, segment_begin);
    const int64_t run_end = std::min(end, segment_end);
    if (run_begin < run_end) run(run_begin, run_end, segment.decay);
    segment_begin = segment_end;
  }
}

void check(const Shard& shard, std::span<const Segment> segments) {
  STRATA_CHECK(shard.count >= 0, "a shard cannot have a negative number of elements");
  int64_t covered = 0;
  for (const Segment& segment : segments) {
    STRATA_CHECK(segment.count >= 0, "a segment cannot have a negative number of elements");
    covered += segment.count;
  }
  STRATA_CHECK(covered >= shard.count, "the segments must cover the shard");
}

bool is_fraction(double value) { return value >= 0 && value < 1; }
bool is_amount(double value) { return value >= 0 && std::isfinite(value); }

}  // namespace

StepConstants step_constants(const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  STRATA_CHECK(step >= 1, "Adam's steps count from 1");
  const auto require = [](bool valid, const char* name, double value, const char* range) {
    if (valid) return;
    throw usage_error(fmt::format("{} is {}; it must be {}", name, value, range));
  };
  require(is_amount(hyper.learning_rate), "learning_rate", hyper.learning_rate,
          "finite and not negative");
  require(is_fraction(hyper.beta1), "adam_beta1", hyper.beta1, "at least 0 and below 1");
  require(is_fraction(hyper.beta2), "adam_beta2", hyper.beta2, "at least 0 and below 1");
  const bool epsilon_fits = hyper.epsilon > 0 && hyper.epsilon <= std::numeric_limits<float>::max();
  require(epsilon_fits && static_cast<float>(hyper.epsilon) > 0, "adam_epsilon", hyper.epsilon,
          "positive and within the range of fp32");
  require(is_amount(hyper.weight_decay), "weight_decay", hyper.weight_decay,
          "finite and not negative");
  require(is_amount(gradient_scale), "the gradient scale", gradient_scale,
          "finite and not negative");

  const auto steps = static_cast<double>(step);
  const double correction1 = 1 - std::pow(hyper.beta1, steps);
  const double correction2 = 1 - std::pow(hyper.beta2, steps);
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .beta1 = static_cast<float>(hyper.beta1),
          .one_minus_beta1 = static_cast<float>(1 - hyper.beta1),
          .beta2 = static_cast<float>(hyper.beta2),
          .one_minus_beta2 = static_cast<float>(1 - hyper.beta2),
          .inverse_sqrt_correction2 = static_cast<float>(1 / std::sqrt(correction2)),
          .step_size = static_cast<float>(hyper.learning_rate / correction1),
          .epsilon = static_cast<float>(hyper.epsilon),
          .decay = static_cast<float>(hyper.learning_rate * hyper.weight_decay)};
}

void update(tbb::task_arena& arena, const Shard& shard, std::span<const Segment> segments,
            const StepConstants& constants) {
  check(shard, segments);
  if (shard.count == 0) return;
  const int64_t chunks = (shard.count - 1) / kChunkElements + 1;
  for_each_index(arena, chunks, [&](int64_t chunk) {
    const int64_t begin = chunk * kChunkElements;
    const int64_t end = std::min(begin + kChunkElements, shard.count);
    for_each_run(segments, begin, end, [&](int64_t run_begin, int64_t run_end, bool decays) {
      HWY_DYNAMIC_DISPATCH(update_run)
      (shard, run_begin, run_end, constants, decays ? constants.decay : 0.0F);
    });
  });
}

void update_reference(const Shard& shard, std::span<const Segment> segments,
                      const StepConstants& constants) {
  check(shard, segments);
  for_each_run(segments, 0, shard.count, [&](int64_t begin, int64_t end, bool decays) {
    update_elements(shard, begin, end, constants, decays ? constants.decay : 0.0F);
  });
}

double sum_of_squares(tbb::task_arena& arena, const void* gradient, DType dtype, int64_t count) {
  STRATA_CHECK(count >= 0, "a gradient cannot have a negative number of elements");
  if (count == 0) return 0;
  const int64_t part_elements = sum_part_elements(count);
  const int64_t parts = (count - 1) / part_elements + 1;
  SumParts sums{};
  for_each_index(arena, parts, [&](int64_t part) {
    const int64_t begin = part * part_elements;
    const int64_t end = std::min(begin + part_elements, count);
    sums[static_cast<size_t>(part)] = HWY_DYNAMIC_DISPATCH(sum_part)(gradient, dtype, begin, end);
  });
  return sum_by_halves(sums);
}

}  // namespace strata::cpu_adam

#endif  // HWY_ONCE
