#include "train/learning_rate.h"

#include <cmath>

#include "catch.h"

namespace strata::train {
namespace {

TEST_CASE("the warm-up rises in equal steps to the peak", "[learning_rate]") {
  for (const LrScheduler scheduler :
       {LrScheduler::kCosine, LrScheduler::kLinear, LrScheduler::kConstant}) {
    const LearningRateSchedule schedule{scheduler, 0.8, 4, 20, 0.1};
    CHECK(learning_rate(schedule, 1) == Approx(0.2));
    CHECK(learning_rate(schedule, 2) == Approx(0.4));
    CHECK(learning_rate(schedule, 3) == Approx(0.6));
    CHECK(learning_rate(schedule, 4) == 0.8);
    CHECK(learning_rate(schedule, 5) == 0.8);
  }
}

TEST_CASE("cosine falls from the peak towards its floor", "[learning_rate]") {
  const LearningRateSchedule schedule{LrScheduler::kCosine, 1.0, 0, 10, 0.1};
  CHECK(learning_rate(schedule, 1) == 1.0);
  CHECK(learning_rate(schedule, 6) == Approx(0.55));  // half way
  CHECK(learning_rate(schedule, 10) == Approx(0.1 + 0.45 * (1 + std::cos(0.9 * M_PI))));
  CHECK(learning_rate(schedule, 10) > 0.1);
  CHECK(learning_rate(schedule, 11) == Approx(0.1));
  CHECK(learning_rate(schedule, 1000) == Approx(0.1));
  for (int64_t step = 2; step <= 11; ++step) {
    CHECK(learning_rate(schedule, step) < learning_rate(schedule, step - 1));
  }

  const LearningRateSchedule to_zero{LrScheduler::kCosine, 1.0, 2, 10, 0};
  CHECK(learning_rate(to_zero, 7) == Approx(0.5));
  CHECK(learning_rate(to_zero, 11) == Approx(0.0).margin(1e-15));
  const LearningRateSchedule flat{LrScheduler::kCosine, 0.5, 2, 10, 1};
  CHECK(learning_rate(flat, 9) == Approx(0.5));
}

TEST_CASE("linear reaches one part in the last step and 0 after it", "[learning_rate]") {
  const LearningRateSchedule schedule{LrScheduler::kLinear, 1.0, 5, 15, 0.1};
  CHECK(learning_rate(schedule, 6) == 1.0);
  CHECK(learning_rate(schedule, 11) == Approx(0.5));
  CHECK(learning_rate(schedule, 15) == Approx(0.1));
  CHECK(learning_rate(schedule, 16) == 0.0);
  CHECK(learning_rate(schedule, 17) == 0.0);
}

TEST_CASE("constant stays at the peak", "[learning_rate]") {
  const LearningRateSchedule schedule{LrScheduler::kConstant, 0.25, 0, 3, 0.1};
  for (const int64_t step : {1, 2, 3, 4, 1000}) CHECK(learning_rate(schedule, step) == 0.25);
}

TEST_CASE("runs of one step, and of nothing but warm-up", "[learning_rate]") {
  for (const LrScheduler scheduler :
       {LrScheduler::kCosine, LrScheduler::kLinear, LrScheduler::kConstant}) {
    CHECK(learning_rate({scheduler, 0.5, 0, 1, 0.1}, 1) == 0.5);
    CHECK(learning_rate({scheduler, 0.5, 1, 1, 0.1}, 1) == 0.5);
    CHECK(learning_rate({scheduler, 0.5, 4, 4, 0.1}, 2) == Approx(0.25));
    CHECK(learning_rate({scheduler, 0.5, 4, 4, 0.1}, 4) == 0.5);
  }
}

}  // namespace
}  // namespace strata::train
