#include "pipeline/calibrate.h"

#include <vector>

#include "catch.h"

namespace strata::pipeline {
namespace {

/// A plan of four units whose step is made by hand.
struct HandMade {
  Plan plan;
  Timeline timeline;
  double now_s = 0;

  HandMade() {
    plan.shape = {.micro_batches = 1, .tokens = 96, .max_sequences = 1};
    plan.parts.resize(4);
  }
  void add(TaskKind kind, int unit, double seconds,
           SavedActivations level = SavedActivations::kNone, bool with_backward = false) {
    Task task;
    task.kind = kind;
    task.unit = unit;
    task.level = level;
    task.with_backward = with_backward;
    plan.train.push_back(task);
    now_s += 0.5;  // the lane waits: not the task's time
    timeline.tasks.push_back({now_s, now_s + seconds});
    timeline.seconds = now_s += seconds;
  }
};

}  // namespace

TEST_CASE("unit costs are medians over the tasks of a class, a kind and a level") {
  HandMade step;
  step.add(TaskKind::kClearScalars, -1, 64);
  step.add(TaskKind::kForward, 0, 0.25);
  step.add(TaskKind::kForward, 1, 2);
  step.add(TaskKind::kForward, 2, 4);
  step.add(TaskKind::kLoss, 3, 8, SavedActivations::kNone, true);
  step.add(TaskKind::kFinishGradient, 3, 0.125);
  step.add(TaskKind::kBackward, 2, 16, SavedActivations::kAll);
  step.add(TaskKind::kBackward, 1, 32, SavedActivations::kNone);
  const UnitCosts costs = measure_unit_costs(step.plan, step.timeline);

  using enum SavedActivations;
  CHECK(costs.tokens() == 96);
  CHECK(costs.seconds(UnitClass::kFirst, TaskKind::kForward, kNone) == 0.25);
  CHECK(costs.seconds(UnitClass::kInner, TaskKind::kForward, kNone) == 3);  // of two, the middle
  CHECK(costs.seconds(UnitClass::kLast, TaskKind::kLoss, kNone) == 8);
  CHECK(costs.seconds(UnitClass::kLast, TaskKind::kFinishGradient, kNone) == 0.125);
  CHECK(costs.seconds(UnitClass::kInner, TaskKind::kBackward, kAll) == 16);
  CHECK(costs.seconds(UnitClass::kInner, TaskKind::kBackward, kNone) == 32);
  // There was no such task.
  CHECK_FALSE(costs.seconds(UnitClass::kInner, TaskKind::kBackward, kAttention));
  CHECK_FALSE(costs.seconds(UnitClass::kFirst, TaskKind::kBackward, kNone));
  CHECK_FALSE(costs.seconds(UnitClass::kInner, TaskKind::kFinishGradient, kNone));
  CHECK_FALSE(costs.seconds(UnitClass::kFirst, TaskKind::kClearScalars, kNone));
}

TEST_CASE("unit costs of several timelines: one slow step of three changes nothing") {
  HandMade step;
  step.add(TaskKind::kForward, 1, 2);
  step.add(TaskKind::kForward, 2, 2);
  step.add(TaskKind::kLoss, 3, 8);  // of an evaluation: without backward
  std::vector<Timeline> timelines(3, step.timeline);
  for (TaskTime& time : timelines[1].tasks) time.end_s += 100;
  const UnitCosts costs = measure_unit_costs(step.plan, timelines);
  CHECK(costs.seconds(UnitClass::kInner, TaskKind::kForward, SavedActivations::kNone) == 2);
  CHECK_FALSE(costs.seconds(UnitClass::kLast, TaskKind::kLoss, SavedActivations::kNone));
}

TEST_CASE("unit costs of a task that took no time on the clock can still be set") {
  HandMade step;
  step.add(TaskKind::kFinishGradient, 1, 0);
  const auto seconds =
      measure_unit_costs(step.plan, step.timeline)
          .seconds(UnitClass::kInner, TaskKind::kFinishGradient, SavedActivations::kNone);
  REQUIRE(seconds);
  CHECK(*seconds > 0);
  CHECK(*seconds < 1e-6);
}

}  // namespace strata::pipeline
