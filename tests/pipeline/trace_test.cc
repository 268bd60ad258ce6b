#include "pipeline/trace.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "catch.h"
#include "pipeline/simulator.h"
#include "temporary_directory.h"

namespace strata::pipeline {
namespace {

using Json = nlohmann::json;

const std::vector<UnitSpec> kUnits = {{.name = "embedding"}, {.name = "block \"1\"\\"}};

Task task_of(TaskKind kind, Lane lane, int unit, std::vector<TaskId> after = {}) {
  Task task;
  task.kind = kind;
  task.lane = lane;
  task.unit = unit;
  task.after = std::move(after);
  return task;
}

/// Two reads at once, a transfer of 3000 bytes, a call, and a task of no unit.
StepGraph small_graph() {
  StepGraph graph;
  graph.push_back(task_of(TaskKind::kClearScalars, Lane::kCompute, -1));
  graph.push_back(task_of(TaskKind::kReadState, Lane::kReadState, 0));
  graph.push_back(task_of(TaskKind::kReadState, Lane::kReadState, 1));
  graph.push_back(task_of(TaskKind::kUploadWeight, Lane::kUpload, 1, {2}));
  graph.push_back(task_of(TaskKind::kForward, Lane::kCompute, 1, {3}));
  graph[1].moved_bytes = 1000;
  graph[2].moved_bytes = 2000;
  graph[2].part = 4;
  graph[3].moved_bytes = 3000;
  graph[4].micro_batch = 2;
  graph[4].level = SavedActivations::kAll;
  return graph;
}

Timeline small_timeline() {
  Timeline timeline;
  timeline.tasks = {{0, 1e-6}, {0, 3e-6}, {1e-6, 4e-6}, {4e-6, 6e-6}, {6e-6, 9.5e-6}};
  timeline.seconds = 9.5e-6;
  return timeline;
}

int64_t ns(const Json& us) { return std::llround(us.get<double>() * 1000); }

/// Parses the trace; checks that a thread's events do not overlap and that threads have names.
Json read_trace(const std::string& path) {
  Json events = Json::parse(read_text_file(path)).at("traceEvents");
  std::map<std::pair<int, int>, std::vector<std::pair<int64_t, int64_t>>> spans;
  std::set<std::pair<int, int>> named;
  for (const Json& event : events) {
    const int process = event.at("pid");
    if (event.at("ph") == "X") {
      const int64_t begin = ns(event.at("ts"));
      const int64_t length = ns(event.at("dur"));
      CHECK(begin >= 0);
      CHECK(length >= 0);
      spans[{process, event.at("tid")}].emplace_back(begin, begin + length);
    } else if (event.at("name") == "thread_name") {
      CHECK(named.insert({process, event.at("tid")}).second);
    }
  }
  for (auto& [thread, list] : spans) {
    CHECK(named.count(thread) == 1);
    std::sort(list.begin(), list.end());
    for (size_t i = 1; i < list.size(); ++i) CHECK(list[i].first >= list[i - 1].second);
  }
  return events;
}

const Json& event_of(const Json& events, int process, std::string_view name) {
  for (const Json& event : events) {
    if (event.at("pid") == process && event.at("name") == name) return event;
  }
  FAIL("no event '" << name << "'");
  throw 0;
}

}  // namespace

TEST_CASE("a trace tells of each task what it is, when, and how fast") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("trace.json");
  const StepGraph graph = small_graph();
  write_trace(path, Plan{}, graph, kUnits, small_timeline());
  const Json events = read_trace(path);
  const Json& upload = event_of(events, 1, "upload weight block \"1\"\\");
  CHECK(ns(upload.at("ts")) == 4000);
  CHECK(ns(upload.at("dur")) == 2000);
  CHECK(upload.at("args").at("unit") == "block \"1\"\\");
  CHECK(upload.at("args").at("unit_index") == 1);
  CHECK(upload.at("args").at("bytes") == 3000);
  CHECK(upload.at("args").at("GB/s").get<double>() == 1.5);
  CHECK(!upload.at("args").contains("micro_batch"));
  CHECK(!upload.at("args").contains("part"));
  const Json& forward = event_of(events, 1, "forward block \"1\"\\ m2");
  CHECK(forward.at("args").at("micro_batch") == 2);
  CHECK(forward.at("args").at("saved") == "all");
  CHECK(!forward.at("args").contains("bytes"));
  CHECK(event_of(events, 1, "read state block \"1\"\\").at("args").at("part") == 4);
  CHECK(event_of(events, 1, "clear scalars").at("args").empty());
  CHECK(event_of(events, 1, "process_name").at("args").at("name") == "measured");
  size_t tasks = 0;
  std::set<std::string> threads;
  for (const Json& event : events) {
    if (event.at("ph") == "X") ++tasks;
    if (event.at("name") == "thread_name") threads.insert(event.at("args").at("name"));
    CHECK(event.at("pid") == 1);
  }
  CHECK(tasks == graph.size());
  CHECK(threads == std::set<std::string>{"compute", "upload", "read state", "read state (2)"});
}

TEST_CASE("a trace lays what was foretold beside what was measured") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("trace.json");
  const StepGraph graph = small_graph();
  const Timeline predicted = simulate(graph, std::vector<double>{1e-6, 1e-6, 1e-6, 1e-6, 2e-6});
  write_trace(path, Plan{}, graph, kUnits, small_timeline(), &predicted);
  const Json events = read_trace(path);
  CHECK(event_of(events, 2, "process_name").at("args").at("name") == "predicted");
  CHECK(ns(event_of(events, 1, "forward block \"1\"\\ m2").at("ts")) == 6000);
  CHECK(ns(event_of(events, 2, "forward block \"1\"\\ m2").at("ts")) == 3000);
  size_t tasks = 0;
  for (const Json& event : events) tasks += event.at("ph") == "X" ? 1 : 0;
  CHECK(tasks == 2 * graph.size());
}

TEST_CASE("events do not overlap where times fall between nanoseconds") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("trace.json");
  StepGraph graph;
  std::vector<double> seconds;
  for (int i = 0; i < 300; ++i) {
    graph.push_back(task_of(TaskKind::kForward, kAllLanes[static_cast<size_t>(i) % kLanes], 0));
    seconds.push_back(1e-9 * (0.3 + 0.37 * (i % 11)));
  }
  write_trace(path, Plan{}, graph, kUnits, simulate(graph, seconds));
  CHECK(read_trace(path).size() > graph.size());
}

TEST_CASE("a summary counts tasks, bytes and busy seconds of each lane") {
  const LaneSummary summary = summarize(small_graph(), small_timeline());
  CHECK(summary.seconds == 9.5e-6);
  CHECK(summary.of(Lane::kCompute).tasks == 2);
  CHECK(summary.of(Lane::kCompute).busy_s == Approx(4.5e-6));
  CHECK(summary.of(Lane::kUpload).moved_bytes == 3000);
  CHECK(summary.of(Lane::kUpload).busy_s == Approx(2e-6));
  CHECK(summary.of(Lane::kReadState).moved_bytes == 3000);
  CHECK(summary.of(Lane::kReadState).busy_s == Approx(4e-6));
  CHECK(summary.of(Lane::kWrite).tasks == 0);
  CHECK(summary.of(Lane::kWrite).busy_s == 0);
  CHECK(summary.drives_busy_s == Approx(4e-6));
}

}  // namespace strata::pipeline
