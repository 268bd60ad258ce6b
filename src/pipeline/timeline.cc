#include "pipeline/timeline.h"

#include <algorithm>

#include "base/error.h"

namespace strata::pipeline {

namespace {

/// Seconds covered by at least one of the tasks for which `counts`.
template <class Counts>
double covered_s(const StepGraph& graph, const Timeline& timeline, const Counts& counts) {
  STRATA_CHECK(timeline.tasks.size() == graph.size(), "a timeline of this graph");
  std::vector<TaskTime> spans;
  for (size_t t = 0; t < graph.size(); ++t) {
    if (counts(graph[t].lane)) spans.push_back(timeline.tasks[t]);
  }
  std::sort(spans.begin(), spans.end(),
            [](const TaskTime& a, const TaskTime& b) { return a.begin_s < b.begin_s; });
  double sum = 0;
  double until = 0;  // all before is counted
  for (const TaskTime& span : spans) {
    const double begin = std::max(span.begin_s, until);
    if (span.end_s <= begin) continue;
    sum += span.end_s - begin;
    until = span.end_s;
  }
  return sum;
}

}  // namespace

double Timeline::busy_s(const StepGraph& graph, Lane lane) const {
  return covered_s(graph, *this, [lane](Lane other) {
    return is_disk_lane(lane) ? is_disk_lane(other) : other == lane;
  });
}

double Timeline::busy_alone_s(const StepGraph& graph, Lane lane) const {
  return covered_s(graph, *this, [lane](Lane other) { return other == lane; });
}

}  // namespace strata::pipeline
