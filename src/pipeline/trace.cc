#include "pipeline/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace strata::pipeline {
namespace {

std::string as_json(std::string_view text) { return nlohmann::json(text).dump(); }

/// The JSON text, grown event by event: a step can have tens of thousands.
class TraceWriter {
 public:
  TraceWriter(const Plan& plan, const StepGraph& graph, std::span<const UnitSpec> units)
      : plan_(plan), graph_(graph), units_(units) {}

  void add_process(int process, std::string_view name, const Timeline& timeline) {
    STRATA_CHECK(timeline.tasks.size() == graph_.size(), "a timeline of this graph");
    add(fmt::format(R"("name":"process_name","ph":"M","pid":{},"args":{{"name":{}}})", process,
                    as_json(name)));
    std::vector<size_t> order(graph_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return begin_ns(timeline.tasks[a]) < begin_ns(timeline.tasks[b]);
    });
    std::array<std::vector<int64_t>, kLanes> free_ns;  // when each of a lane's threads is free
    for (const size_t t : order) {
      const int64_t begin = begin_ns(timeline.tasks[t]);
      const int64_t end = std::max(begin, end_ns(timeline.tasks[t]));
      const auto lane = static_cast<size_t>(graph_[t].lane);
      std::vector<int64_t>& threads = free_ns[lane];
      const auto it =
          std::find_if(threads.begin(), threads.end(), [&](int64_t free) { return free <= begin; });
      const auto thread = static_cast<size_t>(it - threads.begin());
      if (it == threads.end()) {
        threads.push_back(end);
        add_thread(process, lane, thread);
      } else {
        *it = end;
      }
      add_task(process, id_of(lane, thread), graph_[t], begin, end);
    }
  }

  [[nodiscard]] std::string text() && {
    return fmt::format("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events_);
  }

 private:
  static int64_t begin_ns(const TaskTime& time) { return std::llround(time.begin_s * 1e9); }
  static int64_t end_ns(const TaskTime& time) { return std::llround(time.end_s * 1e9); }
  static size_t id_of(size_t lane, size_t thread) { return (lane + 1) * 10000 + thread; }
  /// Microseconds, to the nanosecond.
  static std::string us(int64_t ns) { return fmt::format("{}.{:03}", ns / 1000, ns % 1000); }

  void add(std::string_view members) {
    if (!events_.empty()) events_ += ",\n";
    fmt::format_to(std::back_inserter(events_), "{{{}}}", members);
  }

  void add_thread(int process, size_t lane, size_t thread) {
    std::string name(name_of(static_cast<Lane>(lane)));
    if (thread > 0) name += fmt::format(" ({})", thread + 1);
    add(fmt::format(R"("name":"thread_name","ph":"M","pid":{},"tid":{},"args":{{"name":{}}})",
                    process, id_of(lane, thread), as_json(name)));
    add(fmt::format(
        R"("name":"thread_sort_index","ph":"M","pid":{},"tid":{},"args":{{"sort_index":{}}})",
        process, id_of(lane, thread), id_of(lane, thread)));
  }

  void add_task(int process, size_t thread, const Task& task, int64_t begin, int64_t end) {
    std::string name(name_of(task.kind));
    std::string args;
    const auto argument = [&](std::string_view key, const std::string& value) {
      fmt::format_to(std::back_inserter(args), "{}\"{}\":{}", args.empty() ? "" : ",", key, value);
    };
    if (task.unit >= 0) {
      const std::string& unit = units_[static_cast<size_t>(task.unit)].name;
      name += " " + unit;
      argument("unit", as_json(unit));
      argument("unit_index", fmt::to_string(task.unit));
    }
    if (task.micro_batch >= 0) {
      name += fmt::format(" m{}", task.micro_batch);
      argument("micro_batch", fmt::to_string(task.micro_batch));
    }
    if (task.part != Use::kWhole) argument("part", fmt::to_string(task.part));
    if (task.level != SavedActivations::kNone) argument("saved", as_json(name_of(task.level)));
    if (const size_t bytes = moved_bytes(plan_, task); bytes > 0) {
      argument("bytes", fmt::to_string(bytes));
      if (end > begin) {
        argument("GB/s", fmt::format("{:.3f}", static_cast<double>(bytes) /
                                                   static_cast<double>(end - begin)));
      }
    }
    add(fmt::format(
        R"("name":{},"cat":{},"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"args":{{{}}})",
        as_json(name), as_json(name_of(task.kind)), process, thread, us(begin), us(end - begin),
        args));
  }

  const Plan& plan_;
  const StepGraph& graph_;
  std::span<const UnitSpec> units_;
  std::string events_;
};

}  // namespace

void write_trace(const std::filesystem::path& path, const Plan& plan, const StepGraph& graph,
                 std::span<const UnitSpec> units, const Timeline& measured,
                 const Timeline* predicted) {
  TraceWriter writer(plan, graph, units);
  writer.add_process(1, "measured", measured);
  if (predicted != nullptr) writer.add_process(2, "predicted", *predicted);
  write_text_file_atomically(path, std::move(writer).text());
}

LaneSummary summarize(const StepGraph& graph, const Timeline& timeline) {
  LaneSummary summary;
  summary.seconds = timeline.seconds;
  summary.drives_busy_s = timeline.busy_s(graph, Lane::kWrite);
  for (const Lane lane : kAllLanes) {
    summary.lanes[static_cast<size_t>(lane)].busy_s = timeline.busy_alone_s(graph, lane);
  }
  for (const Task& task : graph) {
    LaneSummary::Row& row = summary.lanes[static_cast<size_t>(task.lane)];
    ++row.tasks;
    row.moved_bytes += task.moved_bytes;
  }
  return summary;
}

}  // namespace strata::pipeline
