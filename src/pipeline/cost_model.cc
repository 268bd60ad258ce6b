#include "pipeline/cost_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/error.h"
#include "pipeline/collective_cost.h"
#include "pipeline/simulator.h"

namespace strata::pipeline {
namespace {

/// Figures of one plan on one machine.
class Costs {
 public:
  Costs(const Plan& plan, const UnitModel& model, const MachineProfile& profile,
        const UnitCosts* measured)
      : plan_(plan),
        model_(model),
        profile_(profile),
        measured_(measured),
        flops_per_s_(plan.dtype == DType::kBf16 ? profile.matmul_bf16_flops_per_s
                                                : profile.matmul_fp32_flops_per_s),
        sequence_length_(plan.shape.tokens / std::max<int64_t>(plan.shape.max_sequences, 1)) {
    const RankLayout& ranks = plan.placement.ranks;
    if (ranks.ranks == 1) return;
    links_ = with_assumed_links(profile, ranks.ranks);
    shard_group_ = shard_group_shape(ranks, links_.ranks_per_node);
    replica_group_ = replica_group_shape(ranks, links_.ranks_per_node);
    world_ = world_shape(ranks, links_.ranks_per_node);
  }

  [[nodiscard]] double seconds(const Task& task) const {
    const auto bytes = static_cast<double>(moved_bytes(plan_, task));
    switch (task.lane) {
      case Lane::kUpload:
        return profile_.link_latency_s + bytes / profile_.upload_bytes_per_s;
      case Lane::kDownload:
        return profile_.link_latency_s + bytes / profile_.download_bytes_per_s;
      case Lane::kCollective:
        return collective_s(task);
      case Lane::kCpu:
        return bytes / profile_.adam_bytes_per_s;
      case Lane::kReadWeight:
      case Lane::kReadState:
        return bytes / drives(profile_.read_bytes_per_s);
      case Lane::kWrite:
        return bytes / drives(profile_.write_bytes_per_s);
      case Lane::kCompute:
        return measured_ != nullptr ? measured(task) : computed(task, task.level, tokens());
    }
    return 0;
  }

 private:
  [[nodiscard]] int64_t tokens() const { return plan_.shape.tokens; }

  [[nodiscard]] double drives(double bytes_per_s) const {
    if (bytes_per_s <= 0) {
      throw usage_error(
          fmt::format("the plan uses NVMe drives and machine profile '{}' has none; give a profile "
                      "with drives, or a plan without",
                      profile_.name));
    }
    return bytes_per_s;
  }

  [[nodiscard]] double collective_s(const Task& task) const {
    using comm::Collective;
    const auto whole = [&](DType dtype) {
      return static_cast<size_t>(plan_.whole_elements(task.unit)) * size_of(dtype);
    };
    switch (task.kind) {
      case TaskKind::kGatherWeight:
        return collective_seconds(Collective::kAllGather, whole(plan_.dtype), shard_group_, links_);
      case TaskKind::kReduceGradient: {
        const size_t bytes = whole(plan_.placement.ranks.reduce_dtype);
        const auto shards = static_cast<size_t>(plan_.placement.ranks.shard_ranks);
        return collective_seconds(Collective::kReduceScatter, bytes, shard_group_, links_) +
               collective_seconds(Collective::kAllReduce, bytes / shards, replica_group_, links_);
      }
      case TaskKind::kGatherScalars:
        return collective_seconds(Collective::kAllGather,
                                  plan_.buffer(plan_.buffers.all_scalars).size_bytes, world_,
                                  links_);
      default:
        STRATA_CHECK(false, "a task of the collective lane");
        return 0;
    }
  }

  /// The call of `task` as if it were of that level and so many tokens.
  [[nodiscard]] double computed(const Task& task, SavedActivations level, int64_t tokens) const {
    const auto memory_s = [&](double bytes) { return bytes / profile_.device_memory_bytes_per_s; };
    double work_s = 0;
    switch (task.kind) {
      case TaskKind::kForward:
        work_s = call_s(task.unit, Pass::kForward, tokens, level);
        break;
      case TaskKind::kBackward:
        work_s = call_s(task.unit, Pass::kBackward, tokens, level);
        break;
      case TaskKind::kLoss:
        work_s = call_s(task.unit, task.with_backward ? Pass::kLossAndBackward : Pass::kLoss,
                        tokens, level);
        break;
      case TaskKind::kFinishGradient: {
        const int64_t count = plan_.parts[static_cast<size_t>(task.unit)].parameter_count;
        work_s = memory_s(static_cast<double>(count) *
                          static_cast<double>(sizeof(float) + size_of(plan_.dtype)));
        if (plan_.buffers.rounded_gradient != kNoBuffer) work_s += memory_s(rounded_bytes(count));
        break;
      }
      case TaskKind::kRoundGradient:
        work_s = memory_s(rounded_bytes(plan_.whole_elements(task.unit)));
        break;
      default:
        work_s = memory_s(static_cast<double>(moved_bytes(plan_, task)));
    }
    return profile_.launch_s + work_s;
  }

  /// Of gradients between fp32 and what they are summed over ranks in.
  [[nodiscard]] double rounded_bytes(int64_t count) const {
    return static_cast<double>(count) *
           static_cast<double>(sizeof(float) + size_of(plan_.placement.ranks.reduce_dtype));
  }

  [[nodiscard]] double call_s(int unit, Pass pass, int64_t tokens, SavedActivations level) const {
    return model_.matmul_flops(unit, pass, tokens, sequence_length_, level) / flops_per_s_ +
           model_.other_bytes(unit, pass, tokens, level) / profile_.device_memory_bytes_per_s;
  }

  [[nodiscard]] double measured(const Task& task) const {
    const double here_s = computed(task, task.level, tokens());
    if (task.unit < 0 || (task.kind == TaskKind::kLoss && !task.with_backward)) return here_s;
    const UnitClass unit = class_of(task.unit, plan_.parts.size());
    std::optional<double> found_s;
    SavedActivations found_level = SavedActivations::kNone;
    int nearest = 3;
    for (const SavedActivations level :
         {SavedActivations::kNone, SavedActivations::kAttention, SavedActivations::kAll}) {
      const int distance = std::abs(static_cast<int>(level) - static_cast<int>(task.level));
      const std::optional<double> seconds = measured_->seconds(unit, task.kind, level);
      if (!seconds || distance >= nearest) continue;
      found_s = seconds;
      found_level = level;
      nearest = distance;
    }
    if (!found_s) return here_s;
    if (nearest == 0 && measured_->tokens() == tokens()) return *found_s;
    const double there_s = computed(task, found_level, measured_->tokens());
    return there_s > 0 ? *found_s * (here_s / there_s) : *found_s;
  }

  const Plan& plan_;
  const UnitModel& model_;
  const MachineProfile& profile_;
  const UnitCosts* measured_;
  double flops_per_s_;
  int64_t sequence_length_;
  // Of plans for several ranks.
  MachineProfile links_;
  GroupShape shard_group_, replica_group_, world_;
};

}  // namespace

void UnitCosts::set(UnitClass unit, TaskKind kind, SavedActivations level, double seconds) {
  STRATA_CHECK(std::isfinite(seconds) && seconds > 0, "a call takes no such time");
  seconds_[static_cast<size_t>(unit)][static_cast<size_t>(kind)][static_cast<size_t>(level)] =
      seconds;
}

std::optional<double> UnitCosts::seconds(UnitClass unit, TaskKind kind,
                                         SavedActivations level) const {
  const double seconds =
      seconds_[static_cast<size_t>(unit)][static_cast<size_t>(kind)][static_cast<size_t>(level)];
  return seconds > 0 ? std::optional(seconds) : std::nullopt;
}

std::vector<double> task_seconds(const Plan& plan, const StepGraph& graph, const UnitModel& model,
                                 const MachineProfile& profile, const UnitCosts* measured) {
  const Costs costs(plan, model, profile, measured);
  std::vector<double> seconds;
  seconds.reserve(graph.size());
  for (const Task& task : graph) seconds.push_back(costs.seconds(task));
  return seconds;
}

Timeline predict(const Plan& plan, const StepGraph& graph, const UnitModel& model,
                 const MachineProfile& profile, const UnitCosts* measured) {
  return simulate(graph, task_seconds(plan, graph, model, profile, measured), profile.sharing());
}

}  // namespace strata::pipeline
