#include "apps/strata/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/bytes.h"
#include "pipeline/simulator.h"
#include "pipeline/trace.h"
#include "train/progress.h"

namespace strata::app {
namespace {

using nlohmann::ordered_json;
using pipeline::kAllLanes;
using pipeline::kTiers;
using pipeline::Lane;
using pipeline::Pass;
using pipeline::SavedActivations;
using pipeline::UnitPlacement;

/// Figures of a report that both forms print.
struct Figures {
  pipeline::LaneSummary lanes;
  std::array<double, pipeline::kLanes> path_s{};
  Lane bound = Lane::kCompute;
  double tokens = 0, tokens_per_s = 0;
  double model_flops = 0;  // of a step, nothing recomputed
  double done_flops = 0;   // with what is recomputed
  double peak_flops_per_s = 0;
  double written_bytes = 0;  // by the drives, in an average step
};

Figures figures_of(const PlanReport& report) {
  const pipeline::Plan& plan = report.foretold.plan;
  const model::Llama& llama = *report.llama;
  Figures f;
  f.lanes = summarize(plan.train, report.foretold.timeline);
  const auto path = pipeline::critical_path(plan.train, report.foretold.timeline);
  f.path_s = pipeline::path_seconds(plan.train, path);
  f.bound = pipeline::bounding_lane(plan.train, path);
  f.tokens = static_cast<double>(plan.shape.micro_batches * plan.shape.tokens);
  f.tokens_per_s = tokens_per_s(report.foretold);
  const int64_t sequence = plan.shape.tokens / std::max<int64_t>(plan.shape.max_sequences, 1);
  const auto last = static_cast<int>(llama.units().size()) - 1;
  for (int unit = 0; unit <= last; ++unit) {
    const auto flops = [&](Pass pass, SavedActivations saved) {
      return static_cast<double>(plan.shape.micro_batches) *
             llama.matmul_flops(unit, pass, plan.shape.tokens, sequence, saved);
    };
    if (unit == last) {
      const double loss = flops(Pass::kLossAndBackward, SavedActivations::kNone);
      f.model_flops += loss;
      f.done_flops += loss;
      continue;
    }
    const double forward = flops(Pass::kForward, SavedActivations::kNone);
    f.model_flops += forward + flops(Pass::kBackward, SavedActivations::kAll);
    f.done_flops +=
        forward + flops(Pass::kBackward, plan.placement.units[static_cast<size_t>(unit)].saved);
  }
  f.peak_flops_per_s = plan.dtype == DType::kBf16 ? report.profile->matmul_bf16_flops_per_s
                                                  : report.profile->matmul_fp32_flops_per_s;
  f.written_bytes = static_cast<double>(f.lanes.of(Lane::kWrite).moved_bytes);
  for (const pipeline::Task& task : plan.replay) {
    if (task.lane != Lane::kWrite) continue;
    f.written_bytes += pipeline::kAssumedClippedSteps * static_cast<double>(task.moved_bytes);
  }
  return f;
}

double tera(double value) { return value / 1e12; }

int64_t parameters(const model::Llama& llama) {
  int64_t sum = 0;
  for (const pipeline::UnitSpec& unit : llama.units()) sum += unit.parameter_count;
  return sum;
}

/// "0, 3-5, 7", or where that is long how many lie between which.
std::string units_text(const std::vector<size_t>& units) {
  std::string text;
  int runs = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    size_t j = i;
    while (j + 1 < units.size() && units[j + 1] == units[j] + 1) ++j;
    text += fmt::format("{}{}", text.empty() ? "" : ", ", units[i]);
    if (j > i) text += fmt::format("-{}", units[j]);
    i = j;
    ++runs;
  }
  constexpr int kLong = 6;
  return runs <= kLong ? text
                       : fmt::format("{} of {}-{}", units.size(), units.front(), units.back());
}

void print_placement(const pipeline::Plan& plan) {
  const pipeline::Placement& placement = plan.placement;
  std::vector<std::pair<UnitPlacement, std::vector<size_t>>> kinds;
  for (size_t u = 0; u < placement.units.size(); ++u) {
    const auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) {
      return kind.first == placement.units[u];
    });
    if (found == kinds.end()) {
      kinds.push_back({placement.units[u], {u}});
    } else {
      found->second.push_back(u);
    }
  }
  fmt::print("\n{:<22} home of weight, gradient and optimizer's state\n", "units");
  for (const auto& [unit, units] : kinds) {
    fmt::print("{:<22} {}\n", units_text(units), describe(unit));
  }
  fmt::print(
      "boundaries on {}; saved activations on {}; parts of {}; slots: {} for weights, {} for "
      "activations, {} in host memory\n",
      name_of(placement.boundaries), name_of(placement.saved_activations),
      placement.part_elements == 0
          ? "a whole unit"
          : fmt::format("{:.1f} M parameters", static_cast<double>(placement.part_elements) / 1e6),
      placement.slots, placement.activation_slots, placement.host_slots);
}

void print_ledger(const PlanReport& report) {
  const pipeline::Plan& plan = report.foretold.plan;
  fmt::print("\n{:<7} {:>12} {:>12}   what for\n", "tier", "planned", "allowed");
  for (const pipeline::Tier tier : kTiers) {
    const auto sums = plan.bytes_by_purpose(tier);
    std::string purposes;
    for (size_t i = 0; i < sums.size(); ++i) {
      if (sums[i] == 0) continue;
      purposes += fmt::format("{}{} {}", purposes.empty() ? "" : ", ",
                              name_of(static_cast<pipeline::Purpose>(i)), format_bytes(sums[i]));
    }
    fmt::print("{:<7} {:>12} {:>12}   {}\n", name_of(tier), format_bytes(plan.bytes(tier)),
               format_bytes(report.request.budget.bytes(tier)), purposes);
  }
}

void print_lanes(const Figures& f) {
  fmt::print("\n{:<12} {:>9} {:>8} {:>12} {:>14}\n", "lane", "busy", "of step", "bytes a step",
             "critical path");
  for (const Lane lane : kAllLanes) {
    const auto& row = f.lanes.of(lane);
    if (row.tasks == 0) continue;
    fmt::print("{:<12} {:>9} {:>7.1f}% {:>12} {:>14}\n", name_of(lane),
               train::format_seconds(row.busy_s), 100 * row.busy_s / f.lanes.seconds,
               lane == Lane::kCompute ? "-" : format_bytes(row.moved_bytes),
               train::format_seconds(f.path_s[static_cast<size_t>(lane)]));
  }
}

}  // namespace

void print_table(const PlanReport& report) {
  const Figures f = figures_of(report);
  const pipeline::Plan& plan = report.foretold.plan;
  const pipeline::Foretold& foretold = report.foretold;
  const auto all = static_cast<double>(parameters(*report.llama));
  fmt::print("model    {}: {} parameters in {} units\n", report.model_name,
             all < 1e9 ? fmt::format("{:.1f} M", all / 1e6) : fmt::format("{:.2f} B", all / 1e9),
             report.llama->units().size());
  if (!report.model_note.empty()) fmt::print("note     {}\n", report.model_note);
  fmt::print("machine  {}: {}; {}\n", report.profile->name, report.profile->machine,
             report.profile->measured ? "measured" : "from published figures, not measured");
  const auto count = [](int64_t n, std::string_view what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : what.ends_with("ch") ? "es" : "s");
  };
  fmt::print("step     {:.0f} tokens{}: {} of {} of {}\n", f.tokens,
             plan.placement.ranks.ranks > 1 ? " a rank" : "",
             count(plan.shape.micro_batches, "micro-batch"),
             count(plan.shape.max_sequences, "sequence"),
             plan.shape.tokens / std::max<int64_t>(plan.shape.max_sequences, 1));
  print_placement(plan);
  print_ledger(report);
  print_lanes(f);
  fmt::print("\npredicted {} a step, {:.0f} tokens/s{}, bound by {}\n",
             train::format_seconds(foretold.step_s), f.tokens_per_s,
             plan.placement.ranks.ranks > 1 ? " a rank" : "", name_of(f.bound));
  if (foretold.replay_s > 0) {
    fmt::print(
        "          of it {} for the replay of clipped steps, {} in {:.0f}% of the steps "
        "(assumed)\n",
        train::format_seconds(pipeline::kAssumedClippedSteps * foretold.replay_s),
        train::format_seconds(foretold.replay_s), 100 * pipeline::kAssumedClippedSteps);
  }
  fmt::print(
      "          {:.1f} TFLOP/s of the model, {:.1f} with recomputation; MFU {:.1f}% of the "
      "profile's {:.0f} TFLOP/s\n",
      tera(f.model_flops / foretold.step_s), tera(f.done_flops / foretold.step_s),
      100 * f.model_flops / foretold.step_s / f.peak_flops_per_s, tera(f.peak_flops_per_s));
  fmt::print("          drives write {:.3g} TB per 1,000 steps\n", tera(1000 * f.written_bytes));
  if (report.ranks) print_ranks(*report.ranks, foretold, *report.llama);
  // A lesser prediction is the search's doing, not the change's.
  const double least = 0.001 * f.tokens_per_s;
  const auto helps = [&](const pipeline::Advice& advice) { return advice.gain >= least; };
  if (report.advice.empty()) return;
  if (std::none_of(report.advice.begin(), report.advice.end(), helps)) {
    fmt::print("\nnothing that was tried would help: more memory, another drive, more tokens\n");
    return;
  }
  fmt::print("\nwhat would help, each planned anew\n");
  for (const pipeline::Advice& advice : report.advice) {
    if (!helps(advice)) continue;
    fmt::print("{:>+8.0f} tokens/s ({:+.1f}%)  {}\n", advice.gain,
               100 * advice.gain / f.tokens_per_s, advice.change);
  }
}

void print_json(const PlanReport& report) {
  const Figures f = figures_of(report);
  const pipeline::Plan& plan = report.foretold.plan;
  const pipeline::Foretold& foretold = report.foretold;
  const pipeline::Placement& placement = plan.placement;
  ordered_json units = ordered_json::array();
  for (size_t u = 0; u < placement.units.size(); ++u) {
    const UnitPlacement& unit = placement.units[u];
    units.push_back({{"name", report.llama->units()[u].name},
                     {"weight", name_of(unit.weight)},
                     {"gradient", name_of(unit.gradient)},
                     {"optimizer", name_of(unit.optimizer)},
                     {"update", name_of(unit.update)},
                     {"resident_weight", unit.resident_weight},
                     {"saved", name_of(unit.saved)}});
  }
  ordered_json tiers = ordered_json::object();
  for (const pipeline::Tier tier : kTiers) {
    ordered_json purposes = ordered_json::object();
    const auto sums = plan.bytes_by_purpose(tier);
    for (size_t i = 0; i < sums.size(); ++i) {
      purposes[std::string(name_of(static_cast<pipeline::Purpose>(i)))] = sums[i];
    }
    tiers[std::string(name_of(tier))] = {{"planned_bytes", plan.bytes(tier)},
                                         {"allowed_bytes", report.request.budget.bytes(tier)},
                                         {"purposes", purposes}};
  }
  ordered_json lanes = ordered_json::object();
  for (const Lane lane : kAllLanes) {
    const auto& row = f.lanes.of(lane);
    lanes[std::string(name_of(lane))] = {{"tasks", row.tasks},
                                         {"moved_bytes", row.moved_bytes},
                                         {"busy_s", row.busy_s},
                                         {"path_s", f.path_s[static_cast<size_t>(lane)]}};
  }
  ordered_json advice = ordered_json::array();
  for (const pipeline::Advice& one : report.advice) {
    advice.push_back(
        {{"change", one.change}, {"tokens_per_s", one.tokens_per_s}, {"gain", one.gain}});
  }
  ordered_json json{
      {"schema", 1},
      {"model",
       {{"name", report.model_name},
        {"parameters", parameters(*report.llama)},
        {"note", report.model_note}}},
      {"profile",
       {{"name", report.profile->name},
        {"device", report.profile->device},
        {"measured", report.profile->measured}}},
      {"shape",
       {{"micro_batches", plan.shape.micro_batches},
        {"micro_batch_size", plan.shape.max_sequences},
        {"sequence_len", plan.shape.tokens / std::max<int64_t>(plan.shape.max_sequences, 1)}}},
      {"placement",
       {{"slots", placement.slots},
        {"activation_slots", placement.activation_slots},
        {"host_slots", placement.host_slots},
        {"part_elements", placement.part_elements},
        {"boundaries", name_of(placement.boundaries)},
        {"saved_activations", name_of(placement.saved_activations)},
        {"moments", cpu_adam::name_of(placement.moments)},
        {"durable", is_durable(placement)},
        {"units", units}}},
      {"tiers", tiers},
      {"predicted",
       {{"step_s", foretold.step_s},
        {"tokens_per_s", f.tokens_per_s},
        {"unclipped_step_s", foretold.timeline.seconds},
        {"replay_s", foretold.replay_s},
        {"assumed_clipped_steps", pipeline::kAssumedClippedSteps},
        {"model_flops_per_s", f.model_flops / foretold.step_s},
        {"flops_per_s", f.done_flops / foretold.step_s},
        {"mfu", f.model_flops / foretold.step_s / f.peak_flops_per_s},
        {"bounding_lane", name_of(f.bound)},
        {"written_bytes_per_step", f.written_bytes},
        {"lanes", lanes}}},
      {"advice", advice}};
  if (report.ranks) add_ranks(json, *report.ranks, foretold, *report.llama);
  fmt::print("{}\n", json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace strata::app
