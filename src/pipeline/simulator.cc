#include "pipeline/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/error.h"

namespace strata::pipeline {
namespace {

constexpr size_t kFirstDiskLane = static_cast<size_t>(Lane::kReadWeight);
constexpr size_t kDiskLanes = kLanes - kFirstDiskLane;
// What works on one task at a time: each lane that is not a disk's, and the drives.
constexpr size_t kDrives = kFirstDiskLane;
constexpr size_t kServers = kDrives + 1;
constexpr size_t kUpload = static_cast<size_t>(Lane::kUpload);
constexpr size_t kDownload = static_cast<size_t>(Lane::kDownload);
constexpr size_t kCompute = static_cast<size_t>(Lane::kCompute);
constexpr size_t kCpu = static_cast<size_t>(Lane::kCpu);
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kNotEnded = -1;
constexpr double kNotBegun = -1;

/// A lane's tasks in order.
struct LaneQueue {
  size_t end = 0;         // in the common array
  size_t ready = 0;       // tasks before it may be worked on
  size_t met = 0;         // of the first task that is not ready: how many of `after` have ended
  TaskId waits_for = -1;  // the one after those; -1 where that is not known
  size_t next = 0;        // the first task that has not ended (disk), or not begun
};

struct Server {
  TaskId task = -1;
  double remaining_s = 0;  // at full speed, as of since_s
  double since_s = 0;
  double speed = 1;
  double end_s = kNever;

  void begin(TaskId begun, double seconds, double now_s) {
    *this = {.task = begun, .remaining_s = seconds, .since_s = now_s, .end_s = now_s + seconds};
  }
  /// Work left at `now_s`; exactly what it was if no time has passed.
  [[nodiscard]] double left_s(double now_s) const {
    if (now_s == since_s) return remaining_s;
    return std::max(0.0, remaining_s - (now_s - since_s) * speed);
  }
  void set_speed(double new_speed, double now_s) {
    if (new_speed == speed) return;  // so that an end once foretold stays what it is, to the bit
    remaining_s = left_s(now_s);
    since_s = now_s;
    speed = new_speed;
    end_s = now_s + remaining_s / speed;
  }
};

class Run {
 public:
  Run(const StepGraph& graph, std::span<const double> seconds, const LaneSharing& sharing)
      : graph_(graph),
        seconds_(seconds),
        sharing_(sharing),
        lanes_share_(sharing != LaneSharing{}),
        order_(graph.size()) {
    std::array<size_t, kLanes> counts{};
    for (const Task& task : graph) ++counts[static_cast<size_t>(task.lane)];
    size_t begin = 0;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes_[lane].ready = lanes_[lane].next = lanes_[lane].end = begin;
      begin += counts[lane];
    }
    for (size_t t = 0; t < graph.size(); ++t) {
      STRATA_CHECK(std::isfinite(seconds[t]) && seconds[t] >= 0, "a task takes no such time");
      LaneQueue& queue = lanes_[static_cast<size_t>(graph[t].lane)];
      order_[queue.end++] = static_cast<TaskId>(t);
    }
    times_.tasks.assign(graph.size(), {.begin_s = 0, .end_s = kNotEnded});
  }

  Timeline play() {
    for (;;) {
      begin_tasks();
      double next_s = kNever;
      for (const Server& server : servers_) next_s = std::min(next_s, server.end_s);
      if (next_s == kNever) break;
      now_s_ = next_s;
      for (size_t server = 0; server < kServers; ++server) {
        if (servers_[server].end_s == now_s_) end_task(server);
      }
    }
    STRATA_CHECK(ended_ == graph_.size(), "a graph whose tasks all come to run");
    times_.seconds = now_s_;
    return std::move(times_);
  }

 private:
  TaskTime& time(TaskId task) { return times_.tasks[static_cast<size_t>(task)]; }

  /// Whether all that the lane's first task that is not ready comes after has ended.
  bool is_next_ready(LaneQueue& queue) {
    // Mostly the answer is no, and this spares looking at the task.
    if (queue.waits_for >= 0 && time(queue.waits_for).end_s == kNotEnded) return false;
    if (queue.ready == queue.end) return false;
    const TaskId task = order_[queue.ready];
    const std::vector<TaskId>& after = graph_[static_cast<size_t>(task)].after;
    for (; queue.met < after.size(); ++queue.met) {
      const TaskId earlier = after[queue.met];
      STRATA_CHECK(earlier >= 0 && earlier < task, "tasks come after earlier ones only");
      queue.waits_for = earlier;
      if (time(earlier).end_s == kNotEnded) return false;
    }
    queue.waits_for = -1;
    return true;
  }

  void begin_tasks() {
    for (size_t lane = 0; lane < kFirstDiskLane; ++lane) {
      LaneQueue& queue = lanes_[lane];
      if (servers_[lane].task >= 0 || !is_next_ready(queue)) continue;
      const TaskId task = order_[queue.ready++];
      queue.met = 0;
      time(task).begin_s = now_s_;
      servers_[lane].begin(task, seconds_[static_cast<size_t>(task)], now_s_);
    }
    for (size_t lane = kFirstDiskLane; lane < kLanes; ++lane) {
      LaneQueue& queue = lanes_[lane];
      while (is_next_ready(queue)) {
        ++queue.ready;
        queue.met = 0;
      }
    }
    serve_first();
    if (lanes_share_) set_speeds();
  }

  void set_speeds() {
    std::array<double, kServers> speeds;
    speeds.fill(1);
    const auto beside = [&](size_t a, size_t b, double speed) {
      if (servers_[a].task < 0 || servers_[b].task < 0) return;
      speeds[a] = speeds[b] = speed;
    };
    beside(kUpload, kDownload, sharing_.both_links);
    beside(kCompute, kCpu, sharing_.compute_with_cpu);
    std::array<double, kServers> taken{};
    double sum = 0;
    for (size_t server = 0; server < kServers; ++server) {
      if (servers_[server].task < 0) continue;
      taken[server] = sharing_.host_memory[lane_of(servers_[server].task)] * speeds[server];
      sum += taken[server];
    }
    for (size_t server = 0; server < kServers; ++server) {
      if (servers_[server].task < 0) continue;
      servers_[server].set_speed(
          sum > 1 && taken[server] > 0 ? speeds[server] / sum : speeds[server], now_s_);
    }
  }

  /// Lets the drives work on the first ready task of the lane that goes before the others.
  void serve_first() {
    for (size_t lane = kFirstDiskLane; lane < kLanes; ++lane) {
      const LaneQueue& queue = lanes_[lane];
      if (queue.next == queue.ready) continue;
      const TaskId task = order_[queue.next];
      Server& drives = servers_[kDrives];
      if (drives.task == task) return;
      if (drives.task >= 0) left_s_[lane_of(drives.task)] = drives.left_s(now_s_);
      double& left_s = left_s_[lane];
      if (left_s == kNotBegun) {
        left_s = seconds_[static_cast<size_t>(task)];
        time(task).begin_s = now_s_;
      } else if (left_s == seconds_[static_cast<size_t>(task)]) {
        time(task).begin_s = now_s_;  // it was chosen before and not worked on
      }
      drives.begin(task, left_s, now_s_);
      return;
    }
  }

  void end_task(size_t server) {
    const TaskId task = servers_[server].task;
    time(task).end_s = now_s_;
    servers_[server] = {};
    ++ended_;
    if (server == kDrives) {
      const size_t lane = lane_of(task);
      ++lanes_[lane].next;
      left_s_[lane] = kNotBegun;
    }
  }

  [[nodiscard]] size_t lane_of(TaskId task) const {
    return static_cast<size_t>(graph_[static_cast<size_t>(task)].lane);
  }

  const StepGraph& graph_;
  std::span<const double> seconds_;
  LaneSharing sharing_;
  bool lanes_share_;
  std::vector<TaskId> order_;  // by lane, then as in the graph
  std::array<LaneQueue, kLanes> lanes_;
  std::array<Server, kServers> servers_;
  // Of each disk lane's first task that has not ended: the work left, kNotBegun before any.
  std::array<double, kLanes> left_s_ = filled(kNotBegun);
  Timeline times_;
  double now_s_ = 0;
  size_t ended_ = 0;

  static constexpr std::array<double, kLanes> filled(double value) {
    std::array<double, kLanes> all{};
    all.fill(value);
    return all;
  }
};

/// Finds what each task waited for.
class Causes {
 public:
  Causes(const StepGraph& graph, const Timeline& timeline)
      : graph_(graph), timeline_(timeline), previous_(graph.size(), -1) {
    std::array<TaskId, kLanes> last;
    last.fill(-1);
    for (size_t t = 0; t < graph.size(); ++t) {
      const auto lane = static_cast<size_t>(graph[t].lane);
      previous_[t] = std::exchange(last[lane], static_cast<TaskId>(t));
      if (lane >= kFirstDiskLane) by_end_[lane - kFirstDiskLane].push_back(static_cast<TaskId>(t));
    }
    for (std::vector<TaskId>& tasks : by_end_) {
      std::stable_sort(tasks.begin(), tasks.end(),
                       [this](TaskId a, TaskId b) { return end_s(a) < end_s(b); });
    }
  }

  /// The step of the path in which `task` is worked on until `until_s`.
  PathStep step(TaskId task, double until_s) const {
    const double begun_s = std::min(timeline_.tasks[static_cast<size_t>(task)].begin_s, until_s);
    PathStep step{.task = task, .begin_s = begun_s, .end_s = until_s, .gap_s = begun_s};
    const bool on_disk = is_disk_lane(lane(task));
    if (on_disk) {
      const TaskId other = served_last(task, until_s, /*inclusive=*/false);
      if (other >= 0 && end_s(other) > begun_s) {
        return {.task = task,
                .begin_s = end_s(other),
                .end_s = until_s,
                .waited_for = lane(other) == lane(task) ? WaitedFor::kLane : WaitedFor::kDrives,
                .earlier = other};
      }
    }
    double latest_s = -1;
    const auto consider = [&](TaskId earlier, WaitedFor why) {
      const double ended_s = std::min(end_s(earlier), begun_s);  // clocks may differ a little
      if (ended_s <= latest_s) return;
      latest_s = ended_s;
      step.waited_for = why;
      step.earlier = earlier;
      step.gap_s = begun_s - ended_s;
    };
    const TaskId previous = previous_[static_cast<size_t>(task)];
    if (previous >= 0 && (!on_disk || end_s(previous) <= begun_s)) {
      consider(previous, WaitedFor::kLane);
    }
    if (on_disk) {
      const TaskId other = served_last(task, begun_s, /*inclusive=*/true);
      if (other >= 0) {
        consider(other, lane(other) == lane(task) ? WaitedFor::kLane : WaitedFor::kDrives);
      }
    }
    for (const TaskId earlier : graph_[static_cast<size_t>(task)].after) {
      consider(earlier, WaitedFor::kDependency);
    }
    if (begun_s <= 0) {
      step.waited_for = WaitedFor::kNothing;
      step.earlier = -1;
      step.gap_s = 0;
    }
    return step;
  }

  [[nodiscard]] double end_s(TaskId task) const {
    return timeline_.tasks[static_cast<size_t>(task)].end_s;
  }

 private:
  [[nodiscard]] Lane lane(TaskId task) const { return graph_[static_cast<size_t>(task)].lane; }

  /// Of the disk tasks that go before `task` and took any time: the last to end before `until_s`,
  /// or at it. Taking time is what keeps the path from going in circles.
  [[nodiscard]] TaskId served_last(TaskId task, double until_s, bool inclusive) const {
    TaskId last = -1;
    for (size_t disk = 0; disk <= static_cast<size_t>(lane(task)) - kFirstDiskLane; ++disk) {
      const std::vector<TaskId>& tasks = by_end_[disk];
      auto it = std::partition_point(tasks.begin(), tasks.end(), [&](TaskId other) {
        return inclusive ? end_s(other) <= until_s : end_s(other) < until_s;
      });
      while (it != tasks.begin()) {
        const TaskId other = *--it;
        if (last >= 0 && end_s(other) <= end_s(last)) break;
        const bool before = lane(other) != lane(task) || other < task;
        if (!before || timeline_.tasks[static_cast<size_t>(other)].begin_s >= end_s(other)) {
          continue;
        }
        last = other;
        break;
      }
    }
    return last;
  }

  const StepGraph& graph_;
  const Timeline& timeline_;
  std::vector<TaskId> previous_;  // on the lane
  std::array<std::vector<TaskId>, kDiskLanes> by_end_;
};

}  // namespace

std::string_view name_of(WaitedFor waited_for) noexcept {
  switch (waited_for) {
    case WaitedFor::kNothing:
      return "nothing";
    case WaitedFor::kLane:
      return "lane";
    case WaitedFor::kDependency:
      return "dependency";
    case WaitedFor::kDrives:
      return "drives";
  }
  return "?";
}

Timeline simulate(const StepGraph& graph, std::span<const double> seconds,
                  const LaneSharing& sharing) {
  STRATA_CHECK(seconds.size() == graph.size(), "seconds for each task");
  for (const double part : {sharing.both_links, sharing.compute_with_cpu}) {
    STRATA_CHECK(part > 0 && part <= 1, "a part of a lane's speed");
  }
  for (const double part : sharing.host_memory) {
    STRATA_CHECK(part >= 0 && std::isfinite(part), "a part of host memory's speed");
  }
  return Run(graph, seconds, sharing).play();
}

std::vector<PathStep> critical_path(const StepGraph& graph, const Timeline& timeline) {
  STRATA_CHECK(timeline.tasks.size() == graph.size(), "a timeline of this graph");
  std::vector<PathStep> path;
  if (graph.empty()) return path;
  const Causes causes(graph, timeline);
  TaskId task = 0;
  for (size_t t = 0; t < graph.size(); ++t) {
    if (timeline.tasks[t].end_s > causes.end_s(task)) task = static_cast<TaskId>(t);
  }
  for (double until_s = causes.end_s(task);;) {
    const PathStep& step = path.emplace_back(causes.step(task, until_s));
    if (step.earlier < 0) break;
    task = step.earlier;
    until_s = std::min(causes.end_s(task), step.begin_s);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

std::array<double, kLanes> path_seconds(const StepGraph& graph, std::span<const PathStep> path) {
  std::array<double, kLanes> seconds{};
  for (const PathStep& step : path) {
    seconds[static_cast<size_t>(graph[static_cast<size_t>(step.task)].lane)] +=
        step.end_s - step.begin_s;
  }
  return seconds;
}

Lane bounding_lane(const StepGraph& graph, std::span<const PathStep> path) {
  const std::array<double, kLanes> seconds = path_seconds(graph, path);
  const auto longest = [&](size_t from, size_t to) {
    return static_cast<size_t>(std::max_element(seconds.begin() + static_cast<std::ptrdiff_t>(from),
                                                seconds.begin() + static_cast<std::ptrdiff_t>(to)) -
                               seconds.begin());
  };
  double drives = 0;
  for (size_t lane = kFirstDiskLane; lane < kLanes; ++lane) drives += seconds[lane];
  const size_t other = longest(0, kFirstDiskLane);
  return static_cast<Lane>(drives > seconds[other] ? longest(kFirstDiskLane, kLanes) : other);
}

}  // namespace strata::pipeline
