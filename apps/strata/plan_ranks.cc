#include "apps/strata/plan_ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "base/bytes.h"
#include "pipeline/classic_layout.h"
#include "pipeline/rank_formulas.h"

namespace strata::app {
namespace {

using nlohmann::ordered_json;
using pipeline::kTiers;
using pipeline::Purpose;
using pipeline::RankForecast;
using pipeline::Sharding;
using pipeline::StateKind;
using pipeline::TaskKind;
using pipeline::Tier;

/// Bytes that a rank sends in a step, as its graph counts them.
struct Sent {
  size_t gathers = 0, reductions = 0, scalars = 0;
};

Sent sent_by(const pipeline::Plan& plan) {
  Sent sent;
  for (const pipeline::Task& task : plan.train) {
    if (task.lane != pipeline::Lane::kCollective) continue;
    size_t& sum = task.kind == TaskKind::kGatherWeight     ? sent.gathers
                  : task.kind == TaskKind::kReduceGradient ? sent.reductions
                                                           : sent.scalars;
    sum += task.moved_bytes;
  }
  return sent;
}

pipeline::RankedModel ranked_model(const pipeline::Plan& plan, const model::Llama& llama) {
  return {.units = llama.units(),
          .ranks = plan.placement.ranks,
          .dtype = plan.dtype,
          .moments = plan.placement.moments};
}

size_t state_of(const std::array<size_t, pipeline::kStateKinds>& bytes, StateKind kind) {
  return bytes[static_cast<size_t>(kind)];
}

std::string efficiency_text(double part) {
  return part > 0 ? fmt::format("{:.1f}%", 100 * part) : "-";
}

void print_scaling(const RanksReport& report) {
  fmt::print("\nscaling of {}, each number of ranks planned anew, {}\n",
             name_of(report.request.sharding),
             report.request.sequences > 0
                 ? fmt::format("{} sequences a step divided among them", report.request.sequences)
                 : "each rank with the same tokens");
  fmt::print("{:>5} {:>10} {:>10} {:>10} {:>10} {:>11} {:>9} {:>12} {:>10} {:>10}\n", "ranks",
             "device", "host", "nvme", "sent/rank", "collective", "step", "tokens/s", "per rank",
             "efficiency");
  for (size_t i = 0; i < report.scaling.size(); ++i) {
    const RankForecast& one = report.scaling[i];
    if (!one.fits) {
      fmt::print("{:>5} {}\n", one.ranks.ranks, one.why_not.substr(0, one.why_not.find(';')));
      continue;
    }
    fmt::print(
        "{:>5} {:>10} {:>10} {:>10} {:>10} {:>9.2f} s {:>7.2f} s {:>12.0f} {:>10.0f} "
        "{:>10}\n",
        one.ranks.ranks, format_bytes(one.tier_bytes[0]), format_bytes(one.tier_bytes[1]),
        format_bytes(one.tier_bytes[2]), format_bytes(one.collective_bytes), one.collective_s,
        one.step_s, one.all_tokens_per_s(), one.tokens_per_s(),
        efficiency_text(scaling_efficiency(report.scaling, i)));
  }
}

std::string sharding_text(const pipeline::RankLayout& ranks) {
  // One graph in this program: gradients never rest whole.
  if (ranks.keeps_whole_weights()) return "shard_optimizer, shard_grad_op";
  if (ranks.sharding != Sharding::kHybridShard) return std::string(name_of(ranks.sharding));
  return fmt::format("{}, groups of {}", name_of(ranks.sharding), ranks.shard_ranks);
}

void print_advice(const RanksReport& report) {
  const auto& all = report.figures->shardings;
  fmt::print("\n{:<32} {:>12} {:>10} {:>9} {:>12}\n", "sharding of these ranks", "device",
             "sent/rank", "step", "tokens/s");
  for (size_t i = 0; i < all.size(); ++i) {
    const RankForecast& one = all[i];
    if (!one.fits) {
      fmt::print("{:<32} {}\n", sharding_text(one.ranks),
                 one.why_not.substr(0, one.why_not.find(';')));
      continue;
    }
    std::string notes;
    const auto note = [&](const std::optional<size_t>& index, std::string_view text) {
      if (index == i) notes += fmt::format("{}{}", notes.empty() ? "  " : ", ", text);
    };
    note(report.advice.least, "least that is enough");
    note(report.advice.least_without_offload, "least with all state on the device");
    note(report.advice.fastest, "fastest");
    fmt::print("{:<32} {:>12} {:>10} {:>7.2f} s {:>12.0f}{}\n", sharding_text(one.ranks),
               format_bytes(one.tier_bytes[0]), format_bytes(one.collective_bytes), one.step_s,
               one.all_tokens_per_s(), notes);
  }
  for (const pipeline::ClusterNeed& need : report.advice.needs) {
    fmt::print("{}: {}\n", name_of(need.need), need.reason);
  }
}

ordered_json forecast_json(const RankForecast& one) {
  ordered_json json{{"ranks", one.ranks.ranks},
                    {"sharding", name_of(one.ranks.sharding)},
                    {"shard_ranks", one.ranks.shard_ranks},
                    {"fits", one.fits},
                    {"why_not", one.why_not}};
  if (!one.fits) return json;
  json["state_on_device"] = one.state_on_device;
  for (const Tier tier : kTiers) {
    json[fmt::format("{}_bytes", name_of(tier))] = one.tier_bytes[static_cast<size_t>(tier)];
  }
  json["collective_bytes"] = one.collective_bytes;
  json["tokens_per_rank"] = one.tokens;
  json["step_s"] = one.step_s;
  json["compute_s"] = one.compute_s;
  json["collective_s"] = one.collective_s;
  json["tokens_per_s"] = one.all_tokens_per_s();
  json["tokens_per_s_per_rank"] = one.tokens_per_s();
  return json;
}

}  // namespace

void print_ranks(const RanksReport& report, const pipeline::Foretold& foretold,
                 const model::Llama& llama) {
  const pipeline::Plan& plan = foretold.plan;
  const pipeline::RankLayout& ranks = plan.placement.ranks;
  const RankForecast& now = report.forecast;
  if (ranks.ranks > 1) {
    const auto model = ranked_model(plan, llama);
    const auto state = state_at_rest_bytes(model);
    const Sent sent = sent_by(plan);
    fmt::print("\n{:<9} {} with {}, {} to a node: {} group{} of {}; sums of gradients in {}\n",
               "ranks", ranks.ranks, name_of(ranks.sharding), report.ranks_per_node,
               ranks.replicas(), ranks.replicas() > 1 ? "s" : "", ranks.shard_ranks,
               name_of(ranks.reduce_dtype));
    const size_t whole = kept_whole_weight_bytes(model);
    fmt::print(
        "{:<9} {} at rest: weight {}, residual {}, moments {}, gradient {}{}\n", "a rank",
        format_bytes(std::accumulate(state.begin(), state.end(), size_t{0})),
        format_bytes(state_of(state, StateKind::kWeight)),
        format_bytes(state_of(state, StateKind::kResidual)),
        format_bytes(state_of(state, StateKind::kMoment1) + state_of(state, StateKind::kMoment2)),
        format_bytes(state_of(state, StateKind::kGradient)),
        whole > 0 ? fmt::format("; whole weights on the device {}", format_bytes(whole)) : "");
    fmt::print(
        "{:<9} {} a step, whatever the micro-batches: gathers {}, reductions {}, scalars {}\n",
        "sends", format_bytes(now.collective_bytes), format_bytes(sent.gathers),
        format_bytes(sent.reductions), format_bytes(sent.scalars));
    fmt::print("{:<9} {:.0f} tokens/s, {:.0f} a rank", "together", now.all_tokens_per_s(),
               now.tokens_per_s());
    if (report.alone && report.alone->fits) {
      const double times = now.tokens_per_s() / report.alone->tokens_per_s();
      fmt::print("; {} what one rank alone does", times < 2 ? fmt::format("{:.1f}% of", 100 * times)
                                                            : fmt::format("{:.0f} times", times));
    } else if (report.alone) {
      fmt::print("; one rank alone has no room");
    }
    fmt::print("\n");
  }
  if (report.figures) print_advice(report);
  if (!report.scaling.empty()) print_scaling(report);
}

void add_ranks(ordered_json& json, const RanksReport& report, const pipeline::Foretold& foretold,
               const model::Llama& llama) {
  const pipeline::Plan& plan = foretold.plan;
  const pipeline::RankLayout& ranks = plan.placement.ranks;
  const auto model = ranked_model(plan, llama);
  const auto state = state_at_rest_bytes(model);
  const Sent sent = sent_by(plan);
  ordered_json kinds = ordered_json::object();
  for (size_t kind = 0; kind < pipeline::kStateKinds; ++kind) {
    kinds[std::string(name_of(static_cast<StateKind>(kind)))] = state[kind];
  }
  ordered_json entry = forecast_json(report.forecast);
  entry["replicas"] = ranks.replicas();
  entry["ranks_per_node"] = report.ranks_per_node;
  entry["reduce_dtype"] = name_of(ranks.reduce_dtype);
  entry["state_bytes"] = kinds;
  entry["whole_weight_bytes"] = kept_whole_weight_bytes(model);
  entry["sent_bytes"] = {{"gather_weight", sent.gathers},
                         {"reduce_gradient", sent.reductions},
                         {"gather_scalars", sent.scalars}};
  if (report.alone && report.alone->fits) {
    entry["efficiency"] = report.forecast.tokens_per_s() / report.alone->tokens_per_s();
  }
  json["ranks"] = std::move(entry);
  if (!report.scaling.empty()) {
    ordered_json rows = ordered_json::array();
    for (size_t i = 0; i < report.scaling.size(); ++i) {
      ordered_json row = forecast_json(report.scaling[i]);
      if (report.scaling[i].fits) row["efficiency"] = scaling_efficiency(report.scaling, i);
      rows.push_back(std::move(row));
    }
    json["scaling"] = std::move(rows);
  }
  if (!report.figures) return;
  ordered_json advice = ordered_json::object();
  ordered_json shardings = ordered_json::array();
  for (const RankForecast& one : report.figures->shardings) {
    shardings.push_back(forecast_json(one));
  }
  advice["shardings"] = std::move(shardings);
  const auto name = [&](const std::optional<size_t>& index) -> ordered_json {
    if (!index) return nullptr;
    return name_of(report.figures->shardings[*index].ranks.sharding);
  };
  advice["least"] = name(report.advice.least);
  advice["least_without_offload"] = name(report.advice.least_without_offload);
  advice["fastest"] = name(report.advice.fastest);
  ordered_json needs = ordered_json::array();
  for (const pipeline::ClusterNeed& need : report.advice.needs) {
    needs.push_back({{"need", name_of(need.need)}, {"reason", need.reason}});
  }
  advice["needs"] = std::move(needs);
  json["cluster_advice"] = std::move(advice);
}

namespace {

/// A row of either table, in bytes.
struct LayoutRow {
  std::string name;
  double weights = 0, gradients = 0, optimizer = 0, transient = 0, sent = 0;

  [[nodiscard]] double total() const { return weights + gradients + optimizer + transient; }
};

LayoutRow classic_row(const pipeline::ClassicModel& model, pipeline::ZeroStage stage,
                      const ClassicRequest& request) {
  const auto memory = classic_memory(model, stage, request.ranks);
  const auto traffic = classic_traffic(model, stage, request.ranks, request.shape.micro_batches);
  return {.name = std::string(name_of(stage)),
          .weights = memory.weight_bytes,
          .gradients = memory.gradient_bytes,
          .optimizer = memory.optimizer_bytes,
          .transient = memory.transient_bytes,
          .sent = traffic.total_bytes()};
}

LayoutRow own_row(Sharding sharding, const ClassicRequest& request) {
  pipeline::Placement placement =
      pipeline::Placement::all_on(Tier::kDevice, request.llama->units().size());
  placement.moments = request.moments;
  placement.ranks =
      pipeline::RankLayout::of(sharding, request.ranks, request.shard_group, request.reduce_dtype);
  const pipeline::Plan plan =
      build_plan(*request.llama, *request.operators, request.shape, placement);
  const auto sums = plan.bytes_by_purpose(Tier::kDevice);
  const auto sum = [&](Purpose purpose) {
    return static_cast<double>(sums[static_cast<size_t>(purpose)]);
  };
  const Sent sent = sent_by(plan);
  return {.name = std::string(name_of(sharding)),
          .weights = sum(Purpose::kWeights),
          .gradients = sum(Purpose::kGradients),
          .optimizer = sum(Purpose::kOptimizerState),
          .transient = sum(Purpose::kSlots) + sum(Purpose::kAccumulators),
          .sent = static_cast<double>(sent.gathers + sent.reductions + sent.scalars)};
}

void print_rows(std::string_view what, const std::vector<LayoutRow>& rows) {
  fmt::print("{:<16} {:>9} {:>9} {:>9} {:>9} {:>9} {:>12}\n", what, "weights", "gradients",
             "optimizer", "transient", "total", "sent a step");
  for (const LayoutRow& row : rows) {
    fmt::print("{:<16} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>12.2f}\n", row.name,
               row.weights / 1e9, row.gradients / 1e9, row.optimizer / 1e9, row.transient / 1e9,
               row.total() / 1e9, row.sent / 1e9);
  }
}

ordered_json rows_json(std::string_view what, const std::vector<LayoutRow>& rows) {
  ordered_json json = ordered_json::array();
  for (const LayoutRow& row : rows) {
    json.push_back({{what, row.name},
                    {"weight_bytes", row.weights},
                    {"gradient_bytes", row.gradients},
                    {"optimizer_bytes", row.optimizer},
                    {"transient_bytes", row.transient},
                    {"total_bytes", row.total()},
                    {"sent_bytes", row.sent}});
  }
  return json;
}

}  // namespace

void print_classic(const ClassicRequest& request, bool as_json) {
  const auto units = request.llama->units();
  pipeline::ClassicModel model;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    model.parameters += units[unit].parameter_count;
    const bool is_block = unit > 0 && unit + 1 < units.size();
    if (is_block) model.largest_block = std::max(model.largest_block, units[unit].parameter_count);
  }
  std::vector<LayoutRow> classic, own;
  for (const pipeline::ZeroStage stage : pipeline::kZeroStages) {
    classic.push_back(classic_row(model, stage, request));
  }
  for (const Sharding sharding :
       {Sharding::kNoShard, Sharding::kShardOptimizer, Sharding::kShardGradOp,
        Sharding::kHybridShard, Sharding::kFullShard}) {
    if (sharding == Sharding::kHybridShard && request.shard_group == 0) continue;
    own.push_back(own_row(sharding, request));
  }
  if (as_json) {
    const ordered_json json{
        {"schema", 1},
        {"model", {{"name", request.model_name}, {"parameters", model.parameters}}},
        {"ranks", request.ranks},
        {"micro_batches", request.shape.micro_batches},
        {"classic", rows_json("stage", classic)},
        {"own", rows_json("sharding", own)}};
    fmt::print("{}\n", json.dump(1));
    return;
  }
  fmt::print(
      "{}: {:.2f} B parameters on {} ranks, {} micro-batches a step; GB (10^9) of one rank\n",
      request.model_name, static_cast<double>(model.parameters) / 1e9, request.ranks,
      request.shape.micro_batches);
  fmt::print(
      "\nthe textbook's {} bytes a parameter: bf16 weight 2, gradient 2 with an accumulator of 4, "
      "fp32 master\nand moments 12; micro-batches pass one after the other through all of the "
      "model\n",
      pipeline::kClassicBytes);
  print_rows("stage", classic);
  fmt::print(
      "\nthis program's, with everything on the device: bf16 weight 2, gradient 2, residual 2, "
      "moments 4 + 4\n(fp32); slots and accumulators of a unit are transient; a step sends the "
      "same for any micro-batches\n");
  print_rows("sharding", own);
}

}  // namespace strata::app
