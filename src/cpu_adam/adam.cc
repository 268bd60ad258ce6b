#include "cpu_adam/adam.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "cpu_adam/adam-inl.h"
#include "cpu_adam/sum-inl.h"

#if HWY_ONCE

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/parallel.h"
#include "cpu_adam/definition.h"
#include "cpu_adam/reduction.h"
#include "cpu_adam/segments.h"

namespace strata::cpu_adam {
namespace {

HWY_EXPORT(update_chunk_vectors);
HWY_EXPORT(sum_part);

void check(const Shard& shard, std::span<const Segment> segments) {
  STRATA_CHECK(shard.count >= 0, "a shard cannot have a negative number of elements");
  int64_t covered = 0;
  for (const Segment& segment : segments) {
    STRATA_CHECK(segment.count >= 0, "a segment cannot have a negative number of elements");
    covered += segment.count;
  }
  STRATA_CHECK(covered >= shard.count, "the segments must cover the shard");
  STRATA_CHECK(shard.moment_format == MomentFormat::kF32 || shard.step >= 1,
               "stochastic rounding needs the step's number");
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

  const auto one_minus_beta1 = static_cast<float>(1 - hyper.beta1);
  const auto one_minus_beta2 = static_cast<float>(1 - hyper.beta2);
  // 1 - beta^step without cancellation.
  const auto correction = [step](float one_minus_beta) {
    return -std::expm1(static_cast<double>(step) *
                       std::log1p(-static_cast<double>(one_minus_beta)));
  };
  const double root2 = std::sqrt(correction(one_minus_beta2));
  const auto epsilon = static_cast<float>(hyper.epsilon * root2);
  require(epsilon > 0, "adam_epsilon", hyper.epsilon, "larger, to stay positive in fp32");
  return {
      .gradient_scale = static_cast<float>(gradient_scale),
      .one_minus_beta1 = one_minus_beta1,
      .one_minus_beta2 = one_minus_beta2,
      .step_size = static_cast<float>(hyper.learning_rate * root2 / correction(one_minus_beta1)),
      .epsilon = epsilon,
      .decay = static_cast<float>(hyper.learning_rate * hyper.weight_decay)};
}

void update_chunk(const Shard& shard, int64_t chunk, std::span<const Segment> segments,
                  const StepConstants& constants) {
  const int64_t begin = chunk * kChunkElements;
  const int64_t end = std::min(begin + kChunkElements, shard.count);
  SegmentCursor cursor(segments, constants.decay);
  HWY_DYNAMIC_DISPATCH(update_chunk_vectors)(shard, begin, end, constants, cursor);
}

void update(tbb::task_arena& arena, const Shard& shard, std::span<const Segment> segments,
            const StepConstants& constants) {
  check(shard, segments);
  for_each_index(arena, chunk_count(shard),
                 [&](int64_t chunk) { update_chunk(shard, chunk, segments, constants); });
}

void update_reference(const Shard& shard, std::span<const Segment> segments,
                      const StepConstants& constants) {
  check(shard, segments);
  SegmentCursor cursor(segments, constants.decay);
  for (int64_t begin = 0; begin < shard.count; begin += kChunkElements) {
    update_blocks(shard, begin, std::min(begin + kChunkElements, shard.count), constants, cursor);
  }
}

StepResult clip_and_update(tbb::task_arena& arena, const Shard& shard,
                           std::span<const Segment> segments, const Hyperparameters& hyper,
                           double max_norm) {
  const double norm =
      std::sqrt(sum_of_squares(arena, shard.gradient, shard.gradient_dtype, shard.count));
  if (!std::isfinite(norm)) return {.gradient_norm = norm, .clipped = false, .finite = false};
  const double factor = max_norm > 0 ? max_norm / (norm + 1e-6) : 1;
  update(arena, shard, segments, step_constants(hyper, shard.step, std::min(factor, 1.0)));
  return {.gradient_norm = norm, .clipped = factor < 1, .finite = true};
}

void convert_moment(tbb::task_arena& arena, bool second, int64_t count, MomentFormat from,
                    const void* in, MomentFormat to, void* out) {
  STRATA_CHECK(count >= 0, "a moment cannot have a negative number of elements");
  for_each_index(arena, (count + kMomentBlock - 1) / kMomentBlock, [&](int64_t block) {
    const int64_t begin = block * kMomentBlock;
    std::array<float, kMomentBlock> values;
    const auto part =
        std::span(values).first(static_cast<size_t>(std::min(kMomentBlock, count - begin)));
    load_elements(second, count, from, in, begin, part);
    store_block(second, count, to, out, begin, part, nullptr);
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
