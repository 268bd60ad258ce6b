// What tasks of the compute lane cost, read off timelines of a plan that ran: what foretells other
// plans of the same model and shape. Pure functions; any thread.
#pragma once

#include <span>

#include "pipeline/cost_model.h"
#include "pipeline/plan.h"
#include "pipeline/timeline.h"

namespace strata::pipeline {

/// Medians over the tasks of one class, kind and level in all `timelines` of plan.train (measured
/// ones: a task's time is what it took beside whatever else ran): forward, backward and loss, and
/// finished gradients. Units that share a class count as equal, so a class that is not kInner has
/// few tasks a step and is the better for several timelines. The first step of an executor is not
/// worth having: it warms up. What a plan has no task of stays unmeasured.
[[nodiscard]] UnitCosts measure_unit_costs(const Plan& plan, std::span<const Timeline> timelines);
[[nodiscard]] UnitCosts measure_unit_costs(const Plan& plan, const Timeline& timeline);

}  // namespace strata::pipeline
