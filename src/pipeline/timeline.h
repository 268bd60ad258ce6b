// When each task of a graph ran: measured by the executor or foretold by the simulator, in the same
// shape, so that one can be laid over the other.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pipeline/step_graph.h"

namespace strata::pipeline {

struct TaskTime {
  double begin_s = 0, end_s = 0;  // since the graph's begin
};

struct Timeline {
  std::vector<TaskTime> tasks;  // as in the graph
  double seconds = 0;           // until the last has ended

  /// Seconds in which a lane had at least one task under way; of all disk lanes together for any of
  /// them.
  [[nodiscard]] double busy_s(const StepGraph& graph, Lane lane) const;
  /// Likewise, of that lane alone for disk lanes too.
  [[nodiscard]] double busy_alone_s(const StepGraph& graph, Lane lane) const;
};

}  // namespace strata::pipeline
