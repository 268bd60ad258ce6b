// The norm of a gradient, and the step that is clipped by it.
#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/adam_fixture.h"

namespace strata::cpu_adam {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// The reduction tree of docs/adam.md, written out once more.
double sum_by_the_book(const Gradient& gradient, size_t count) {
  const size_t even = (count + 255) / 256;
  const size_t part_elements = std::max<size_t>(32768, (even + 15) / 16 * 16);
  std::vector<double> parts(256);
  for (size_t part = 0; part * part_elements < count; ++part) {
    std::vector<double> lanes(16);
    const size_t end = std::min(count, (part + 1) * part_elements);
    for (size_t i = part * part_elements; i < end; ++i) {
      lanes[i % 16] += static_cast<double>(gradient[i]) * static_cast<double>(gradient[i]);
    }
    for (size_t width : {8, 4, 2, 1}) {
      for (size_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    parts[part] = lanes[0];
  }
  for (size_t width = 128; width > 0; width /= 2) {
    for (size_t i = 0; i < width; ++i) parts[i] += parts[i + width];
  }
  return parts[0];
}

TEST_CASE("the sum of squares has the same bits for every target, thread count and alignment") {
  CAPTURE(kSeed);
  const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 8);
  // The last is beyond 256 parts of the smallest size.
  for (const size_t count :
       {size_t{0}, size_t{1}, size_t{15}, size_t{16}, size_t{17}, size_t{32767}, size_t{32768},
        size_t{32769}, size_t{1'000'003}, size_t{32768 * 256 + 1}}) {
    std::vector<float> values(count);
    CounterRandom random(kSeed, 8);
    for (float& value : values) value = random_scale(random, -20, 10);
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      CAPTURE(count, name_of(dtype));
      const Gradient gradient(values, dtype, 3);
      long double exact = 0;
      for (size_t i = 0; i < count; ++i) {
        exact += static_cast<long double>(gradient[i]) * gradient[i];
      }
      const double expected = sum_by_the_book(gradient, count);
      REQUIRE(std::abs(expected - exact) <= 1e-12L * exact);
      const auto count64 = static_cast<int64_t>(count);
      for_each_target([&] {
        tbb::task_arena arena(2);
        REQUIRE(sum_of_squares(arena, gradient.data(), dtype, count64) == expected);
      });
      for (const int threads : {1, 3, 8}) {
        tbb::task_arena arena(threads);
        REQUIRE(sum_of_squares(arena, gradient.data(), dtype, count64) == expected);
      }
      if (count > 40'000) continue;
      for (size_t offset = 0; offset < 16; ++offset) {
        tbb::task_arena arena(1);
        const Gradient moved(values, dtype, offset);
        REQUIRE(sum_of_squares(arena, moved.data(), dtype, count64) == expected);
      }
    }
  }
}

TEST_CASE("the sum of squares says that a gradient is not finite, and holds what fp32 cannot") {
  tbb::task_arena arena(2);
  constexpr size_t kCount = 40'000;
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const size_t at : {size_t{0}, size_t{31}, size_t{33'000}, kCount - 1}) {
      CAPTURE(name_of(dtype), at);
      Gradient gradient(kCount, dtype);
      for_each_target([&] {
        gradient.set(at, 0x1p100F);
        CHECK(sum_of_squares(arena, gradient.data(), dtype, kCount) == 0x1p200);
        gradient.set(at, 0x1p-149F);
        CHECK(sum_of_squares(arena, gradient.data(), dtype, kCount) ==
              (dtype == DType::kF32 ? 0x1p-298 : 0));
        gradient.set(at, -kInfinity);
        CHECK(std::isinf(sum_of_squares(arena, gradient.data(), dtype, kCount)));
        gradient.set(at, kNan);
        CHECK(std::isnan(sum_of_squares(arena, gradient.data(), dtype, kCount)));
      });
    }
  }
}

const Hyperparameters kHyper{.learning_rate = 1e-3, .weight_decay = 0.1};

TEST_CASE("a gradient that is not finite is reported, and changes not one byte") {
  constexpr size_t kCount = 40'000;
  tbb::task_arena arena(2);
  const Values values = values_as_in_training(kCount, 1);
  const Segment segment{kCount, true};
  for (const Types types : kAllTypes) {
    for (const MomentFormat format : kMomentFormats) {
      CAPTURE(name_of(types.weight), name_of(types.gradient), name_of(format));
      const State initial(values, types.weight, format);
      Gradient gradient(values.gradient, types.gradient);
      for (const float bad : {kInfinity, -kInfinity, kNan, -kNan}) {
        for (const size_t at : {size_t{0}, size_t{37'777}, kCount - 1}) {
          const float good = gradient[at];
          gradient.set(at, bad);
          State state = initial;
          State other = initial;
          std::fill_n(other.moment1.data(), other.moment1.size(), std::byte{0x5a});
          const State untouched = other;
          for (State* out : {&state, &other}) {
            const StepResult result = clip_and_update(arena, make_shard(gradient, state, *out),
                                                      {&segment, 1}, kHyper, 1.0);
            CHECK_FALSE(result.finite);
            CHECK_FALSE(result.clipped);
            CHECK_FALSE(std::isfinite(result.gradient_norm));
          }
          CHECK(state.same_bits(initial));
          CHECK(other.same_bits(untouched));
          gradient.set(at, good);
        }
      }
      // And the very largest gradients are finite.
      for (size_t i = 0; i < kCount; ++i) gradient.set(i, i % 2 == 0 ? FLT_MAX : -FLT_MAX);
      State state = initial;
      const StepResult result =
          clip_and_update(arena, make_shard(gradient, state, state), {&segment, 1}, kHyper, 1.0);
      CHECK(result.finite);
      CHECK(result.clipped);
      CHECK_FALSE(state.same_bits(initial));
    }
  }
}

TEST_CASE("clipping is one factor on the gradient, and none within the bound") {
  constexpr size_t kCount = 5000;
  tbb::task_arena arena(2);
  const Values values = values_as_in_training(kCount, 2);
  const Segment segment{kCount, true};
  for (const MomentFormat format : kMomentFormats) {
    const State initial(values, DType::kBf16, format);
    const Gradient gradient(values.gradient, DType::kBf16);
    const double norm = std::sqrt(sum_of_squares(arena, gradient.data(), DType::kBf16, kCount));
    struct Case {
      double max_norm, scale;
      bool clipped;
    };
    const Case cases[] = {{0, 1, false},
                          {2 * norm, 1, false},
                          {norm + 1e-6, 1, false},
                          {norm, norm / (norm + 1e-6), true},
                          {norm / 7, norm / 7 / (norm + 1e-6), true}};
    for (const Case& one : cases) {
      CAPTURE(name_of(format), norm, one.max_norm);
      State expected = initial;
      const Shard shard = make_shard(gradient, expected, expected);
      update(arena, shard, {&segment, 1}, step_constants(kHyper, shard.step, one.scale));
      State state = initial;
      const StepResult result = clip_and_update(arena, make_shard(gradient, state, state),
                                                {&segment, 1}, kHyper, one.max_norm);
      CHECK(result.gradient_norm == norm);
      CHECK(result.clipped == one.clipped);
      CHECK(result.finite);
      CHECK(state.same_bits(expected));
    }
  }
}

}  // namespace
}  // namespace strata::cpu_adam
