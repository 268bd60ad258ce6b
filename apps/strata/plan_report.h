// A foretold plan as a table for people and as JSON (docs/plan.md).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "apps/strata/plan_ranks.h"
#include "model/llama.h"
#include "pipeline/planner.h"

namespace strata::app {

struct PlanReport {
  std::string model_name;
  std::string model_note;  // empty: none
  const model::Llama* llama = nullptr;
  const pipeline::MachineProfile* profile = nullptr;
  pipeline::PlanRequest request;
  pipeline::Foretold foretold;
  std::vector<pipeline::Advice> advice;
  std::optional<RanksReport> ranks;  // where there are several, or more were asked for
};

void print_table(const PlanReport& report);
void print_json(const PlanReport& report);

}  // namespace strata::app
