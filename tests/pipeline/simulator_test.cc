#include "pipeline/simulator.h"

#include <algorithm>
#include <random>

#include "catch.h"

namespace strata::pipeline {
namespace {

/// A graph by hand: tasks with their seconds.
class Graph {
 public:
  TaskId add(Lane lane, double seconds, std::vector<TaskId> after = {}) {
    Task task;
    task.lane = lane;
    task.after = std::move(after);
    graph_.push_back(std::move(task));
    seconds_.push_back(seconds);
    return static_cast<TaskId>(graph_.size() - 1);
  }
  [[nodiscard]] Timeline play(const LaneSharing& sharing = {}) const {
    return simulate(graph_, seconds_, sharing);
  }
  [[nodiscard]] const StepGraph& graph() const { return graph_; }
  std::vector<double>& seconds() { return seconds_; }

 private:
  StepGraph graph_;
  std::vector<double> seconds_;
};

void check_times(const Timeline& timeline, TaskId task, double begin_s, double end_s) {
  INFO("task " << task);
  CHECK(timeline.tasks[static_cast<size_t>(task)].begin_s == begin_s);
  CHECK(timeline.tasks[static_cast<size_t>(task)].end_s == end_s);
}

/// The same rules in another way: time in whole seconds, one at a time, every task looked at in
/// each. Tasks of no length (none of a disk lane's) end
/// as they begin.
Timeline slow_simulate(const StepGraph& graph, const std::vector<double>& seconds) {
  const size_t count = graph.size();
  std::vector<int> left(count);
  for (size_t t = 0; t < count; ++t) left[t] = static_cast<int>(seconds[t]);
  std::vector<bool> begun(count), ready(count), ended(count);
  Timeline timeline;
  timeline.tasks.resize(count);
  size_t ended_count = 0;
  const auto after_ended = [&](size_t t) {
    return std::all_of(graph[t].after.begin(), graph[t].after.end(),
                       [&](TaskId earlier) { return ended[static_cast<size_t>(earlier)]; });
  };
  const auto all_before_on_lane = [&](size_t t, const std::vector<bool>& state) {
    for (size_t i = 0; i < t; ++i) {
      if (graph[i].lane == graph[t].lane && !state[i]) return false;
    }
    return true;
  };
  for (int now = 0; ended_count < count; ++now) {
    size_t served = count;
    for (bool changed = true; changed;) {
      changed = false;
      const auto end = [&](size_t t) {
        ended[t] = true;
        ++ended_count;
        timeline.tasks[t].end_s = now;
        timeline.seconds = now;
        changed = true;
      };
      for (size_t t = 0; t < count; ++t) {
        if (ended[t]) continue;
        if (is_disk_lane(graph[t].lane)) {
          if (!ready[t] && after_ended(t) && all_before_on_lane(t, ready)) {
            ready[t] = true;
            changed = true;
          }
        } else if (!begun[t] && after_ended(t) && all_before_on_lane(t, ended)) {
          begun[t] = true;
          timeline.tasks[t].begin_s = now;
          changed = true;
        }
        if (begun[t] && left[t] == 0) end(t);
      }
      served = count;
      for (size_t t = 0; t < count; ++t) {
        if (!is_disk_lane(graph[t].lane) || !ready[t] || ended[t]) continue;
        if (served == count || graph[t].lane < graph[served].lane) served = t;
      }
      if (!changed && served < count && left[served] == 0) end(served);
    }
    if (served < count) {
      if (!begun[served]) timeline.tasks[served].begin_s = now;
      begun[served] = true;
      --left[served];
    }
    for (size_t t = 0; t < count; ++t) {
      if (!is_disk_lane(graph[t].lane) && begun[t] && !ended[t]) --left[t];
    }
  }
  return timeline;
}

Graph random_graph(std::mt19937& random, size_t count, size_t lanes, int longest) {
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  Graph graph;
  for (size_t t = 0; t < count; ++t) {
    std::vector<TaskId> after;
    for (size_t i = below(3); i > 0 && t > 0; --i) {
      after.push_back(static_cast<TaskId>(t - 1 - below(std::min<size_t>(t, 12))));
    }
    const Lane lane = kAllLanes[below(lanes)];
    // What the drives do takes time; the order of an instant is not part of the rules.
    const int seconds = static_cast<int>(below(static_cast<size_t>(longest) + 1));
    graph.add(lane, is_disk_lane(lane) ? std::max(seconds, 1) : seconds, std::move(after));
  }
  return graph;
}

}  // namespace

TEST_CASE("a lane works in order, on one task at a time") {
  Graph graph;
  const TaskId upload = graph.add(Lane::kUpload, 3);
  const TaskId first = graph.add(Lane::kCompute, 2, {upload});
  const TaskId second = graph.add(Lane::kCompute, 4);  // could begin at once, but is second
  const Timeline timeline = graph.play();
  check_times(timeline, upload, 0, 3);
  check_times(timeline, first, 3, 5);
  check_times(timeline, second, 5, 9);
  CHECK(timeline.seconds == 9);
  CHECK(timeline.busy_s(graph.graph(), Lane::kCompute) == 6);
  CHECK(timeline.busy_s(graph.graph(), Lane::kUpload) == 3);
  CHECK(timeline.busy_s(graph.graph(), Lane::kCpu) == 0);
}

TEST_CASE("a task begins when the last of those before it has ended") {
  Graph graph;
  const TaskId a = graph.add(Lane::kUpload, 1);
  const TaskId b = graph.add(Lane::kCpu, 5);
  const TaskId c = graph.add(Lane::kDownload, 2);
  const TaskId join = graph.add(Lane::kCompute, 1, {a, b, c});
  const Timeline timeline = graph.play();
  check_times(timeline, join, 5, 6);
}

TEST_CASE("slots bound how far uploads run ahead") {
  // Six units, upload 1 s, compute 3 s; the upload of unit u needs the slot of unit u - slots.
  const auto step_s = [](int slots, double upload_s) {
    Graph graph;
    std::vector<TaskId> computes;
    for (int unit = 0; unit < 6; ++unit) {
      std::vector<TaskId> after;
      if (unit >= slots) after.push_back(computes[static_cast<size_t>(unit - slots)]);
      const TaskId upload = graph.add(Lane::kUpload, upload_s, after);
      computes.push_back(graph.add(Lane::kCompute, 3, {upload}));
    }
    return graph.play().seconds;
  };
  CHECK(step_s(1, 1) == 6 * 4);      // nothing overlaps
  CHECK(step_s(2, 1) == 1 + 6 * 3);  // all but the first upload is hidden
  CHECK(step_s(2, 4) == 6 * 4 + 3);  // the link bounds
}

TEST_CASE("the drives serve weights, then state, then writes, and interrupt what goes after") {
  Graph graph;
  const TaskId write = graph.add(Lane::kWrite, 10);
  const TaskId second_write = graph.add(Lane::kWrite, 1);
  const TaskId delay = graph.add(Lane::kCompute, 2);
  const TaskId state = graph.add(Lane::kReadState, 4, {delay});
  const TaskId longer = graph.add(Lane::kCompute, 1);
  const TaskId weight = graph.add(Lane::kReadWeight, 3, {longer});
  const Timeline timeline = graph.play();
  check_times(timeline, write, 0, 17);  // 2 s, then interrupted for 7, then 8
  check_times(timeline, state, 2, 9);   // 1 s, then interrupted for 3, then 3
  check_times(timeline, weight, 3, 6);
  check_times(timeline, second_write, 17, 18);
  CHECK(timeline.seconds == 18);
  for (const Lane lane : {Lane::kReadWeight, Lane::kReadState, Lane::kWrite}) {
    CHECK(timeline.busy_s(graph.graph(), lane) == 18);
  }
}

TEST_CASE("a disk lane's later task may be worked on while an earlier one waits for the drives") {
  // Both reads of state are ready at 0; the weight takes the drives from the second, not the first.
  Graph graph;
  const TaskId first = graph.add(Lane::kReadState, 2);
  const TaskId second = graph.add(Lane::kReadState, 2);
  const TaskId delay = graph.add(Lane::kCpu, 3);
  const TaskId weight = graph.add(Lane::kReadWeight, 1, {delay});
  const Timeline timeline = graph.play();
  check_times(timeline, first, 0, 2);
  check_times(timeline, second, 2, 5);
  check_times(timeline, weight, 3, 4);
}

TEST_CASE("a disk task whose turn has not come holds up those behind it on its lane only") {
  Graph graph;
  const TaskId delay = graph.add(Lane::kCpu, 5);
  const TaskId held = graph.add(Lane::kReadState, 1, {delay});
  const TaskId behind = graph.add(Lane::kReadState, 1);
  const TaskId write = graph.add(Lane::kWrite, 2);
  const Timeline timeline = graph.play();
  check_times(timeline, write, 0, 2);
  check_times(timeline, held, 5, 6);
  check_times(timeline, behind, 6, 7);
  CHECK(timeline.busy_s(graph.graph(), Lane::kReadWeight) == 4);
}

TEST_CASE("a disk task that is passed over in the instant of its turn has not begun") {
  Graph graph;
  const TaskId a = graph.add(Lane::kCompute, 2);
  const TaskId write = graph.add(Lane::kWrite, 1, {a});
  const TaskId nothing = graph.add(Lane::kCompute, 0, {a});
  const TaskId weight = graph.add(Lane::kReadWeight, 3, {nothing});
  const Timeline timeline = graph.play();
  check_times(timeline, weight, 2, 5);
  check_times(timeline, write, 5, 6);
}

TEST_CASE("both directions of a link at once may be slower than each alone") {
  Graph graph;
  const TaskId up = graph.add(Lane::kUpload, 4);
  const TaskId delay = graph.add(Lane::kCpu, 1);
  const TaskId down = graph.add(Lane::kDownload, 1, {delay});
  const Timeline apart = graph.play();
  check_times(apart, up, 0, 4);
  check_times(apart, down, 1, 2);
  // Half speed each from 1 until the download has ended at 3, when the upload has 2 s left.
  const Timeline shared = graph.play({.both_links = 0.5});
  check_times(shared, down, 1, 3);
  check_times(shared, up, 0, 5);
}

TEST_CASE("a device without processors of its own shares them with the optimizer") {
  Graph graph;
  const TaskId compute = graph.add(Lane::kCompute, 4);
  const TaskId cpu = graph.add(Lane::kCpu, 1);
  const TaskId upload = graph.add(Lane::kUpload, 1);
  const Timeline timeline = graph.play({.compute_with_cpu = 0.25});
  check_times(timeline, cpu, 0, 4);
  check_times(timeline, compute, 0, 7);  // a second's work in the first four
  check_times(timeline, upload, 0, 1);
}

TEST_CASE("lanes that together want more than host memory gives slow down alike") {
  LaneSharing sharing;
  sharing.host_memory[static_cast<size_t>(Lane::kCpu)] = 0.75;
  sharing.host_memory[static_cast<size_t>(Lane::kUpload)] = 0.5;
  sharing.host_memory[static_cast<size_t>(Lane::kWrite)] = 0.75;
  sharing.host_memory[static_cast<size_t>(Lane::kReadWeight)] = 0.25;
  Graph graph;
  const TaskId cpu = graph.add(Lane::kCpu, 4);
  const TaskId compute = graph.add(Lane::kCompute, 1);
  const TaskId upload = graph.add(Lane::kUpload, 1, {compute});
  const Timeline two = graph.play(sharing);
  check_times(two, compute, 0, 1);
  check_times(two, upload, 1, 2.25);  // 1.25 of the memory is wanted
  check_times(two, cpu, 0, 4.25);
  // The drives want less of it while they read than while they write.
  Graph disk;
  const TaskId other = disk.add(Lane::kCpu, 4);
  const TaskId write = disk.add(Lane::kWrite, 2);
  const TaskId delay = disk.add(Lane::kCompute, 1.5);
  const TaskId read = disk.add(Lane::kReadWeight, 1, {delay});
  const Timeline three = disk.play(sharing);
  check_times(three, read, 1.5, 2.5);  // 0.75 + 0.25: room for both
  check_times(three, write, 0, 4);     // at 2/3 of its speed until 1.5 and from 2.5
  check_times(three, other, 0, 5);     // likewise, and alone for the last second
}

TEST_CASE("sharing never makes lanes that work in order faster") {
  std::mt19937 random(17);
  for (int i = 0; i < 100; ++i) {
    Graph graph = random_graph(random, 50, static_cast<size_t>(Lane::kReadWeight), 5);
    LaneSharing sharing{.both_links = 0.6, .compute_with_cpu = 0.7};
    sharing.host_memory.fill(0.4);
    const Timeline alone = graph.play();
    const Timeline shared = graph.play(sharing);
    for (size_t t = 0; t < graph.graph().size(); ++t) {
      REQUIRE(shared.tasks[t].end_s >= alone.tasks[t].end_s * (1 - 1e-12));
    }
    sharing = {};
    sharing.host_memory.fill(0.2);  // five lanes just fit
    REQUIRE(graph.play(sharing).seconds == alone.seconds);
  }
}

TEST_CASE("tasks of no length and graphs of no tasks take no time") {
  CHECK(Graph().play().seconds == 0);
  CHECK(critical_path({}, {}).empty());
  Graph graph;
  TaskId last = graph.add(Lane::kCompute, 0);
  for (const Lane lane : kAllLanes) last = graph.add(lane, 0, {last});
  CHECK(graph.play().seconds == 0);
  graph.add(Lane::kWrite, 1, {last});
  CHECK(graph.play().seconds == 1);
}

TEST_CASE("random graphs run as in a simulation second by second") {
  std::mt19937 random(7);
  int interrupted = 0;
  for (int i = 0; i < 400; ++i) {
    const size_t count = 1 + random() % 60;
    Graph graph = random_graph(random, count, kLanes, 1 + i % 6);
    const Timeline fast = graph.play();
    const Timeline slow = slow_simulate(graph.graph(), graph.seconds());
    REQUIRE(fast.seconds == slow.seconds);
    for (size_t t = 0; t < count; ++t) {
      INFO("graph " << i << ", task " << t << " on " << name_of(graph.graph()[t].lane));
      REQUIRE(fast.tasks[t].begin_s == slow.tasks[t].begin_s);
      REQUIRE(fast.tasks[t].end_s == slow.tasks[t].end_s);
      if (fast.tasks[t].end_s - fast.tasks[t].begin_s > graph.seconds()[t]) ++interrupted;
    }
  }
  CHECK(interrupted > 50);
}

TEST_CASE("a faster lane never makes a step slower where lanes work in order") {
  // With drives that interrupt it may: a weight that is read earlier can hold up a state on which
  // more depends. Lanes in order without them are a fixed graph of longest paths.
  std::mt19937 random(11);
  for (int i = 0; i < 200; ++i) {
    Graph graph = random_graph(random, 50, static_cast<size_t>(Lane::kReadWeight), 5);
    const Timeline before = graph.play();
    const Lane faster = kAllLanes[random() % static_cast<size_t>(Lane::kReadWeight)];
    for (size_t t = 0; t < graph.graph().size(); ++t) {
      if (graph.graph()[t].lane == faster) graph.seconds()[t] *= 0.5;
    }
    const Timeline after = graph.play();
    for (size_t t = 0; t < graph.graph().size(); ++t) {
      REQUIRE(after.tasks[t].end_s <= before.tasks[t].end_s);
    }
  }
}

TEST_CASE("the critical path says what each task waited for") {
  Graph graph;
  const TaskId write = graph.add(Lane::kWrite, 10);
  const TaskId upload = graph.add(Lane::kUpload, 2);
  const TaskId first = graph.add(Lane::kCompute, 1, {upload});
  const TaskId second = graph.add(Lane::kCompute, 1);
  const TaskId weight = graph.add(Lane::kReadWeight, 3, {second});
  const std::vector<PathStep> path = critical_path(graph.graph(), graph.play());
  REQUIRE(path.size() == 5);
  CHECK(path[0].task == upload);
  CHECK(path[0].waited_for == WaitedFor::kNothing);
  CHECK(path[1].task == first);
  CHECK(path[1].waited_for == WaitedFor::kDependency);
  CHECK(path[1].earlier == upload);
  CHECK(path[2].task == second);
  CHECK(path[2].waited_for == WaitedFor::kLane);
  CHECK(path[3].task == weight);
  CHECK(path[3].waited_for == WaitedFor::kDependency);
  CHECK(path[4].task == write);
  CHECK(path[4].waited_for == WaitedFor::kDrives);
  CHECK(path[4].earlier == weight);
  CHECK(path[4].begin_s == 7);
  CHECK(path[4].end_s == 13);
  CHECK(bounding_lane(graph.graph(), path) == Lane::kWrite);
  const auto seconds = path_seconds(graph.graph(), path);
  CHECK(seconds[static_cast<size_t>(Lane::kCompute)] == 2);
  CHECK(seconds[static_cast<size_t>(Lane::kWrite)] == 6);
}

TEST_CASE("disk lanes bound a step together") {
  Graph graph;
  const TaskId weight = graph.add(Lane::kReadWeight, 3);
  const TaskId compute = graph.add(Lane::kCompute, 5, {weight});
  const TaskId state = graph.add(Lane::kReadState, 2, {compute});
  graph.add(Lane::kWrite, 1, {state});
  const std::vector<PathStep> path = critical_path(graph.graph(), graph.play());
  CHECK(bounding_lane(graph.graph(), path) == Lane::kReadWeight);
}

TEST_CASE("the critical path is without gaps and as long as the step") {
  std::mt19937 random(13);
  size_t reasons[4] = {};
  for (int i = 0; i < 400; ++i) {
    Graph graph = random_graph(random, 1 + random() % 80, kLanes, i % 7);
    // Times that are not whole: only the very same numbers meet.
    for (double& seconds : graph.seconds()) seconds *= 0.1 + (random() % 1000) * 1e-4;
    LaneSharing sharing{.both_links = i % 2 == 0 ? 1 : 0.7};
    sharing.host_memory.fill(i % 3 == 0 ? 0 : 0.3);
    const Timeline timeline = graph.play(sharing);
    const std::vector<PathStep> path = critical_path(graph.graph(), timeline);
    REQUIRE(!path.empty());
    double sum = 0;
    double at = 0;
    for (const PathStep& step : path) {
      REQUIRE(step.begin_s == at);
      REQUIRE(step.gap_s == 0);
      at = step.end_s;
      sum += step.end_s - step.begin_s;
      ++reasons[static_cast<size_t>(step.waited_for)];
    }
    REQUIRE(at == timeline.seconds);
    REQUIRE(sum == Approx(timeline.seconds));
    // No other chain of dependencies and lanes is longer than the step.
    REQUIRE(path.front().waited_for == WaitedFor::kNothing);
    const auto on_lanes = path_seconds(graph.graph(), path);
    double total = 0;
    for (const double seconds : on_lanes) total += seconds;
    REQUIRE(total == Approx(timeline.seconds).margin(1e-12));
  }
  for (const size_t count : reasons) CHECK(count > 20);
}

TEST_CASE("the path through a measured timeline counts what nothing explains") {
  Graph graph;
  const TaskId upload = graph.add(Lane::kUpload, 0);
  const TaskId compute = graph.add(Lane::kCompute, 0, {upload});
  // Two reads under way at once, as real drives have them.
  const TaskId first = graph.add(Lane::kReadState, 0, {compute});
  const TaskId second = graph.add(Lane::kReadState, 0, {compute});
  Timeline timeline;
  timeline.tasks = {{0.5, 2}, {2.25, 4}, {4.5, 6}, {4.5, 7}};
  timeline.seconds = 7;
  const std::vector<PathStep> path = critical_path(graph.graph(), timeline);
  REQUIRE(path.size() == 4);
  CHECK(path[0].task == upload);
  CHECK(path[1].gap_s == 0.25);
  CHECK(path[2].task == first);
  CHECK(path[2].gap_s == 0.5);
  CHECK(path[3].task == second);
  CHECK(path[3].begin_s == 6);
  double sum = 0;
  for (const PathStep& step : path) sum += step.gap_s + step.end_s - step.begin_s;
  CHECK(sum == 7);
}

TEST_CASE("a read that overtakes an earlier one is not what the earlier one waited for") {
  Graph graph;
  const TaskId first = graph.add(Lane::kReadState, 0);
  graph.add(Lane::kReadState, 0);
  Timeline timeline;
  timeline.tasks = {{0, 5}, {1, 3}};
  timeline.seconds = 5;
  const std::vector<PathStep> path = critical_path(graph.graph(), timeline);
  REQUIRE(path.size() == 1);
  CHECK(path[0].task == first);
  CHECK(path[0].begin_s == 0);
}

}  // namespace strata::pipeline
