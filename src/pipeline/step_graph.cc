#include "pipeline/step_graph.h"

#include <fmt/format.h>

#include <algorithm>
#include <bitset>
#include <utility>

#include "base/error.h"

namespace strata::pipeline {

std::string_view name_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::kUpload:
      return "upload";
    case Lane::kCompute:
      return "compute";
    case Lane::kDownload:
      return "download";
    case Lane::kCollective:
      return "collective";
    case Lane::kCpu:
      return "cpu";
    case Lane::kReadWeight:
      return "read weight";
    case Lane::kReadState:
      return "read state";
    case Lane::kWrite:
      return "write";
  }
  return "?";
}

std::string_view name_of(TaskKind kind) noexcept {
  switch (kind) {
    case TaskKind::kUploadBatch:
      return "upload batch";
    case TaskKind::kUploadWeight:
      return "upload weight";
    case TaskKind::kUploadActivation:
      return "upload activation";
    case TaskKind::kClearScalars:
      return "clear scalars";
    case TaskKind::kForward:
      return "forward";
    case TaskKind::kBackward:
      return "backward";
    case TaskKind::kLoss:
      return "loss";
    case TaskKind::kRoundGradient:
      return "round gradient";
    case TaskKind::kReduceGradient:
      return "reduce gradient";
    case TaskKind::kFinishGradient:
      return "finish gradient";
    case TaskKind::kDownloadGradient:
      return "download gradient";
    case TaskKind::kDownloadActivation:
      return "download activation";
    case TaskKind::kGatherScalars:
      return "gather scalars";
    case TaskKind::kGatherWeight:
      return "gather weight";
    case TaskKind::kDownloadScalars:
      return "download scalars";
    case TaskKind::kAdam:
      return "adam";
    case TaskKind::kReadState:
      return "read state";
    case TaskKind::kWriteState:
      return "write state";
    case TaskKind::kReadActivation:
      return "read activation";
    case TaskKind::kWriteActivation:
      return "write activation";
  }
  return "?";
}

std::string_view name_of(Purpose purpose) noexcept {
  switch (purpose) {
    case Purpose::kWeights:
      return "weights";
    case Purpose::kOptimizerState:
      return "optimizer state";
    case Purpose::kGradients:
      return "gradients";
    case Purpose::kSlots:
      return "slots";
    case Purpose::kAccumulators:
      return "gradient accumulators";
    case Purpose::kBoundaries:
      return "boundaries";
    case Purpose::kSavedActivations:
      return "saved activations";
    case Purpose::kWorkspace:
      return "workspace";
    case Purpose::kBatches:
      return "batches";
    case Purpose::kConstants:
      return "constants";
  }
  return "?";
}

GraphBuilder::GraphBuilder(const std::vector<Buffer>& buffers) {
  uses_.reserve(buffers.size());
  for (const Buffer& buffer : buffers) uses_.emplace_back(static_cast<size_t>(buffer.parts));
}

void GraphBuilder::add(Task task) {
  const auto id = static_cast<TaskId>(graph_.size());
  std::array<TaskId, kLanes> latest;
  latest.fill(-1);
  std::vector<TaskId> each;  // of lanes whose tasks may end out of order
  const auto follow = [&](TaskId earlier) {
    if (earlier < 0) return;
    const Lane lane = graph_[static_cast<size_t>(earlier)].lane;
    if (is_disk_lane(lane)) {
      each.push_back(earlier);
      return;
    }
    if (lane == task.lane) return;
    TaskId& last = latest[static_cast<size_t>(lane)];
    last = std::max(last, earlier);
  };
  const auto for_each_part = [&](const Use& use, const auto& visit) {
    std::vector<PartUse>& parts = uses_[static_cast<size_t>(use.buffer)];
    if (use.part == Use::kWhole) {
      for (PartUse& part : parts) visit(part);
    } else {
      visit(parts[static_cast<size_t>(use.part)]);
    }
  };
  for (const Use& use : task.reads) {
    for_each_part(use, [&](PartUse& part) { follow(part.writer); });
  }
  for (const Use& use : task.writes) {
    for_each_part(use, [&](PartUse& part) {
      follow(part.writer);
      for (const TaskId reader : part.readers) follow(reader);
    });
  }
  for (const TaskId earlier : latest) {
    if (earlier >= 0) task.after.push_back(earlier);
  }
  std::sort(each.begin(), each.end());
  each.erase(std::unique(each.begin(), each.end()), each.end());
  task.after.insert(task.after.end(), each.begin(), each.end());
  for (const Use& use : task.reads) {
    for_each_part(use, [&](PartUse& part) { part.readers.push_back(id); });
  }
  for (const Use& use : task.writes) {
    for_each_part(use, [&](PartUse& part) {
      part.writer = id;
      part.readers.clear();
    });
  }
  graph_.push_back(std::move(task));
}

namespace {

bool overlap(const Use& a, const Use& b) {
  return a.buffer == b.buffer &&
         (a.part == Use::kWhole || b.part == Use::kWhole || a.part == b.part);
}

/// The buffer that both touch and one of them writes.
BufferId conflict(const Task& a, const Task& b) {
  for (const Use& mine : a.writes) {
    for (const auto* list : {&b.reads, &b.writes}) {
      for (const Use& other : *list) {
        if (overlap(mine, other)) return mine.buffer;
      }
    }
  }
  for (const Use& mine : a.reads) {
    for (const Use& other : b.writes) {
      if (overlap(mine, other)) return mine.buffer;
    }
  }
  return kNoBuffer;
}

}  // namespace

std::string find_race(const StepGraph& graph, const std::vector<Buffer>& buffers) {
  // before[t] holds all tasks that have ended when t begins: the closure over `after` and the order
  // of lanes that end their tasks in order.
  constexpr size_t kMaxTasks = 4096;
  STRATA_CHECK(graph.size() <= kMaxTasks, "find_race is for graphs of tests");
  std::vector<std::bitset<kMaxTasks>> before(graph.size());
  std::array<TaskId, kLanes> last;
  last.fill(-1);
  for (size_t t = 0; t < graph.size(); ++t) {
    const auto inherit = [&](TaskId earlier) {
      if (earlier < 0) return;
      before[t] |= before[static_cast<size_t>(earlier)];
      before[t].set(static_cast<size_t>(earlier));
    };
    if (!is_disk_lane(graph[t].lane)) {
      TaskId& previous = last[static_cast<size_t>(graph[t].lane)];
      inherit(previous);
      previous = static_cast<TaskId>(t);
    }
    for (const TaskId earlier : graph[t].after) inherit(earlier);
  }
  for (size_t late = 0; late < graph.size(); ++late) {
    for (size_t early = 0; early < late; ++early) {
      if (before[late].test(early)) continue;
      const BufferId buffer = conflict(graph[early], graph[late]);
      if (buffer == kNoBuffer) continue;
      return fmt::format("'{}' of unit {} (task {}) and '{}' of unit {} (task {}) on {}",
                         name_of(graph[early].kind), graph[early].unit, early,
                         name_of(graph[late].kind), graph[late].unit, late,
                         buffers[static_cast<size_t>(buffer)].name);
    }
  }
  return {};
}

}  // namespace strata::pipeline
