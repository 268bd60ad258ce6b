#include "pipeline/plan_estimate.h"

#include <algorithm>

namespace strata::pipeline {
namespace {

/// The first, some inner and the last unit of a model.
class Excerpt final : public UnitModel {
 public:
  Excerpt(const UnitModel& model, int inner, int representative)
      : model_(model), representative_(representative) {
    const auto units = model.units();
    units_.push_back(units.front());
    for (int i = 0; i < inner; ++i) units_.push_back(units[static_cast<size_t>(representative)]);
    units_.push_back(units.back());
  }
  std::span<const UnitSpec> units() const noexcept override { return units_; }
  DType dtype() const noexcept override { return model_.dtype(); }
  size_t boundary_bytes(int64_t tokens) const noexcept override {
    return model_.boundary_bytes(tokens);
  }
  size_t constants_bytes() const noexcept override { return model_.constants_bytes(); }
  void write_constants(std::span<std::byte> out) const override { model_.write_constants(out); }
  size_t workspace_bytes(Pass pass, const StepShape& shape,
                         const gpu::Operators& operators) const override {
    return model_.workspace_bytes(pass, shape, operators);
  }
  size_t saved_bytes(int unit, SavedActivations saved, int64_t tokens) const override {
    return model_.saved_bytes(of(unit), saved, tokens);
  }
  double matmul_flops(int unit, Pass pass, int64_t tokens, int64_t sequence_length,
                      SavedActivations saved) const override {
    return model_.matmul_flops(of(unit), pass, tokens, sequence_length, saved);
  }
  double other_bytes(int unit, Pass pass, int64_t tokens, SavedActivations saved) const override {
    return model_.other_bytes(of(unit), pass, tokens, saved);
  }
  void forward(int unit, const UnitCall& call) const override { model_.forward(of(unit), call); }
  void backward(int unit, const UnitCall& call) const override { model_.backward(of(unit), call); }
  void loss(const UnitCall& call) const override { model_.loss(call); }
  void logits(const UnitCall& call, int64_t row, float* out) const override {
    model_.logits(call, row, out);
  }
  int64_t vocabulary() const noexcept override { return model_.vocabulary(); }

 private:
  [[nodiscard]] int of(int unit) const {
    if (unit == 0) return 0;
    if (unit + 1 == static_cast<int>(units_.size())) {
      return static_cast<int>(model_.units().size()) - 1;
    }
    return representative_;
  }

  const UnitModel& model_;
  int representative_;
  std::vector<UnitSpec> units_;
};

using Key = std::vector<int64_t>;

int64_t code_of(const UnitPlacement& unit) {
  int64_t code = 0;
  for (const auto digit :
       {static_cast<int64_t>(unit.weight), static_cast<int64_t>(unit.gradient),
        static_cast<int64_t>(unit.optimizer), static_cast<int64_t>(unit.update),
        static_cast<int64_t>(unit.resident_weight), static_cast<int64_t>(unit.saved)}) {
    code = code * 4 + digit;
  }
  return code;
}

/// What of a unit decides which slots a plan has.
int64_t slots_of(const UnitPlacement& unit, const RankLayout& ranks) {
  const bool gathers = ranks.shard_ranks > 1 && !ranks.keeps_whole_weights();
  int64_t bits = 0;
  for (const bool bit :
       {(unit.weight != Tier::kDevice || gathers) && !unit.resident_weight,
        unit.gradient != Tier::kDevice, unit.optimizer == Tier::kNvme, unit.weight == Tier::kNvme,
        unit.gradient == Tier::kNvme, unit.update == Update::kSpeculated,
        unit.saved == SavedActivations::kAttention, unit.saved == SavedActivations::kAll}) {
    bits = bits * 2 + (bit ? 1 : 0);
  }
  return bits;
}

constexpr size_t kForwardPhase = 0;
constexpr size_t kBackwardPhase = 1;
constexpr size_t kReplayPhase = 2;

}  // namespace

void Estimator::Load::add(const Load& other, int times) {
  for (size_t t = 0; t < bytes.size(); ++t) bytes[t] += times * other.bytes[t];
  for (size_t phase = 0; phase < seconds.size(); ++phase) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      seconds[phase][lane] += times * other.seconds[phase][lane];
    }
  }
}

Estimator::Estimator(const UnitModel& model, const gpu::Operators& operators,
                     const MachineProfile& profile, const StepShape& shape,
                     const UnitCosts* measured)
    : model_(model),
      operators_(operators),
      profile_(profile),
      shape_(shape),
      measured_(measured),
      sharing_(profile.sharing()) {
  const auto units = model.units();
  for (size_t u = 1; u + 1 < units.size(); ++u) {
    if (representative_ == 0 ||
        units[u].parameter_count > units[static_cast<size_t>(representative_)].parameter_count) {
      representative_ = static_cast<int>(u);
    }
  }
}

Estimator::Load Estimator::load_of(const Placement& placement) {
  const Excerpt excerpt(model_, static_cast<int>(placement.units.size()) - 2, representative_);
  const Plan plan = build_plan(excerpt, operators_, shape_, placement);
  Load load;
  for (size_t t = 0; t < kTiers.size(); ++t) {
    load.bytes[t] = static_cast<int64_t>(plan.tier_bytes[t]);
  }
  const auto add = [&](const StepGraph& graph, size_t before, size_t after) {
    const std::vector<double> seconds = task_seconds(plan, graph, excerpt, profile_, measured_);
    size_t last_loss = 0;
    for (size_t i = 0; i < graph.size(); ++i) {
      if (graph[i].kind == TaskKind::kLoss) last_loss = i;
    }
    for (size_t i = 0; i < graph.size(); ++i) {
      load.seconds[i <= last_loss ? before : after][static_cast<size_t>(graph[i].lane)] +=
          seconds[i];
    }
    tasks_built_ += static_cast<int64_t>(graph.size());
  };
  add(plan.train, kForwardPhase, kBackwardPhase);
  add(plan.replay, kReplayPhase, kReplayPhase);
  return load;
}

Estimator::Load Estimator::difference_of_one(Placement policy, const UnitPlacement& unit) {
  // Where there are already more of them than slots in which forward leaves them for backward.
  policy.slots = policy.host_slots = policy.activation_slots = 1;
  const auto load = [&](size_t inner) {
    policy.units.assign(inner + 2, unit);
    policy.units.front() = policy.units.back() = UnitPlacement::all_on(Tier::kDevice);
    return load_of(policy);
  };
  Load difference = load(4);
  difference.add(load(3), -1);
  return difference;
}

const Estimator::Load& Estimator::state_load(const Placement& policy, UnitPlacement unit) {
  unit.saved = SavedActivations::kNone;
  Key key{policy.part_elements, code_of(unit)};
  const auto found = state_.find(key);
  if (found != state_.end()) return found->second;
  Placement on_device = policy;
  on_device.boundaries = on_device.saved_activations = Tier::kDevice;
  return state_.emplace(std::move(key), difference_of_one(on_device, unit)).first->second;
}

const Estimator::Load& Estimator::activation_load(const Placement& policy, SavedActivations saved) {
  Key key{static_cast<int64_t>(policy.boundaries), static_cast<int64_t>(policy.saved_activations),
          static_cast<int64_t>(saved)};
  const auto found = activations_.find(key);
  if (found != activations_.end()) return found->second;
  UnitPlacement unit = UnitPlacement::all_on(Tier::kHost);
  unit.saved = saved;
  Placement whole = policy;
  whole.part_elements = 0;
  Load load = difference_of_one(whole, unit);
  load.add(state_load(whole, unit), -1);
  return activations_.emplace(std::move(key), load).first->second;
}

Estimator::Load Estimator::inner_load(const Placement& policy, const UnitPlacement& unit) {
  Load load = state_load(policy, unit);
  load.add(activation_load(policy, unit.saved), 1);
  return load;
}

const Estimator::Load& Estimator::rest_load(const Placement& placement,
                                            std::span<const UnitPlacement> kinds) {
  std::vector<UnitPlacement> needed;  // for each kind of slot
  int64_t slots = 0;
  for (const UnitPlacement& unit : kinds) {
    if ((slots_of(unit, placement.ranks) | slots) == slots) continue;
    slots |= slots_of(unit, placement.ranks);
    needed.push_back(unit);
  }
  Key key{static_cast<int64_t>(placement.boundaries),
          static_cast<int64_t>(placement.saved_activations),
          placement.part_elements,
          static_cast<int64_t>(placement.slots),
          static_cast<int64_t>(placement.host_slots),
          static_cast<int64_t>(placement.activation_slots),
          code_of(placement.units.front()),
          code_of(placement.units.back()),
          slots};
  const auto found = rest_.find(key);
  if (found != rest_.end()) return found->second;
  Placement few = placement;
  few.units = {placement.units.front()};
  for (const UnitPlacement& unit : needed) few.units.push_back(unit);
  few.units.push_back(placement.units.back());
  Load load = load_of(few);
  for (const UnitPlacement& unit : needed) load.add(inner_load(placement, unit), -1);
  return rest_.emplace(std::move(key), load).first->second;
}

Estimate Estimator::estimate(const Placement& placement) {
  std::vector<UnitPlacement> kinds;
  std::vector<int> counts;
  for (size_t u = 1; u + 1 < placement.units.size(); ++u) {
    const auto found = std::find(kinds.begin(), kinds.end(), placement.units[u]);
    if (found == kinds.end()) {
      kinds.push_back(placement.units[u]);
      counts.push_back(1);
    } else {
      ++counts[static_cast<size_t>(found - kinds.begin())];
    }
  }
  Load load = rest_load(placement, kinds);
  for (size_t k = 0; k < kinds.size(); ++k) load.add(inner_load(placement, kinds[k]), counts[k]);
  return {.bytes = load.bytes, .seconds = seconds(load)};
}

double Estimator::seconds(const Load& load) const {
  const auto of = [&](size_t phase, Lane lane) {
    return load.seconds[phase][static_cast<size_t>(lane)];
  };
  // Slots are few, so what is written holds up what is read next: each phase has its own drives.
  double step_s = 0;
  for (const size_t phase : {kForwardPhase, kBackwardPhase}) {
    step_s += std::max(
        {of(phase, Lane::kUpload), of(phase, Lane::kCompute), of(phase, Lane::kDownload),
         of(phase, Lane::kCollective), of(phase, Lane::kCpu),
         of(phase, Lane::kReadWeight) + of(phase, Lane::kReadState) + of(phase, Lane::kWrite)});
  }
  std::array<double, kLanes> both{};
  double all = 0;
  double memory = 0;
  for (const Lane lane : kAllLanes) {
    const auto l = static_cast<size_t>(lane);
    both[l] = load.seconds[kForwardPhase][l] + load.seconds[kBackwardPhase][l];
    all += both[l];
    memory += both[l] * sharing_.host_memory[l];
  }
  const auto sum = [&](std::initializer_list<Lane> lanes) {
    double seconds = 0;
    for (const Lane lane : lanes) seconds += both[static_cast<size_t>(lane)];
    return seconds;
  };
  step_s =
      std::max({step_s, memory, sum({Lane::kUpload, Lane::kDownload}) / (2 * sharing_.both_links),
                sum({Lane::kCompute, Lane::kCpu}) / (2 * sharing_.compute_with_cpu)});
  const double replay_s =
      std::max(of(kReplayPhase, Lane::kCpu),
               of(kReplayPhase, Lane::kReadState) + of(kReplayPhase, Lane::kWrite));
  // Of equals, the one that leaves more of the machine idle.
  constexpr double kIdle = 1e-3;
  return step_s + kAssumedClippedSteps * replay_s + kIdle * all;
}

}  // namespace strata::pipeline
