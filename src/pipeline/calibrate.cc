#include "pipeline/calibrate.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "base/error.h"

namespace strata::pipeline {
namespace {

bool is_measured(const Task& task) {
  switch (task.kind) {
    case TaskKind::kForward:
    case TaskKind::kBackward:
    case TaskKind::kFinishGradient:
      return true;
    case TaskKind::kLoss:
      return task.with_backward;
    default:
      return false;
  }
}

double median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace

UnitCosts measure_unit_costs(const Plan& plan, std::span<const Timeline> timelines) {
  std::map<std::tuple<UnitClass, TaskKind, SavedActivations>, std::vector<double>> seconds;
  for (const Timeline& timeline : timelines) {
    STRATA_CHECK(timeline.tasks.size() == plan.train.size(), "a timeline of the plan's step");
    for (size_t t = 0; t < plan.train.size(); ++t) {
      const Task& task = plan.train[t];
      if (!is_measured(task)) continue;
      const TaskTime& time = timeline.tasks[t];
      seconds[{class_of(task.unit, plan.parts.size()), task.kind, task.level}].push_back(
          time.end_s - time.begin_s);
    }
  }
  constexpr double kClockTick_s = 1e-9;
  UnitCosts costs(plan.shape.tokens);
  for (auto& [key, values] : seconds) {
    const auto& [unit, kind, level] = key;
    costs.set(unit, kind, level, std::max(median(values), kClockTick_s));
  }
  return costs;
}

UnitCosts measure_unit_costs(const Plan& plan, const Timeline& timeline) {
  return measure_unit_costs(plan, std::span(&timeline, 1));
}

}  // namespace strata::pipeline
