#include "pipeline/planner.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>

#include "base/error.h"
#include "catch.h"
#include "gpu/host/host_device.h"

namespace strata::pipeline {
namespace {

/// A model that only has sizes and costs, those of transformer blocks of a width.
class Layers final : public UnitModel {
 public:
  Layers(int blocks, int64_t width, int64_t vocabulary) : width_(width), vocabulary_(vocabulary) {
    units_.push_back({.name = "embedding",
                      .parameter_count = vocabulary * width,
                      .backward_reads_weight = false});
    for (int i = 0; i < blocks; ++i) {
      units_.push_back({.name = "block", .parameter_count = 12 * width * width});
    }
    units_.push_back({.name = "head", .parameter_count = vocabulary * width});
  }
  std::span<const UnitSpec> units() const noexcept override { return units_; }
  DType dtype() const noexcept override { return DType::kBf16; }
  size_t boundary_bytes(int64_t tokens) const noexcept override { return bytes(tokens * width_); }
  size_t constants_bytes() const noexcept override { return 4096; }
  void write_constants(std::span<std::byte>) const override {}
  size_t workspace_bytes(Pass, const StepShape& shape, const gpu::Operators&) const override {
    return 12 * bytes(shape.tokens * width_);
  }
  size_t saved_bytes(int unit, SavedActivations saved, int64_t tokens) const override {
    if (unit == 0 || unit + 1 == static_cast<int>(units_.size())) return 0;
    return bytes(tokens * width_) * (saved == SavedActivations::kAll         ? 16
                                     : saved == SavedActivations::kAttention ? 6
                                                                             : 0);
  }
  double matmul_flops(int unit, Pass pass, int64_t tokens, int64_t,
                      SavedActivations saved) const override {
    if (unit == 0) return 0;
    const double spared = saved == SavedActivations::kAll         ? 0.9
                          : saved == SavedActivations::kAttention ? 0.4
                                                                  : 0;
    const double passes = pass == Pass::kForward || pass == Pass::kLoss ? 1
                          : pass == Pass::kBackward                     ? 3 - spared
                                                                        : 3;
    return 2.0 * passes * static_cast<double>(tokens) *
           static_cast<double>(units_[static_cast<size_t>(unit)].parameter_count);
  }
  double other_bytes(int, Pass, int64_t tokens, SavedActivations) const override {
    return 20.0 * static_cast<double>(tokens * width_);
  }
  void forward(int, const UnitCall&) const override {}
  void backward(int, const UnitCall&) const override {}
  void loss(const UnitCall&) const override {}
  void logits(const UnitCall&, int64_t, float*) const override {}
  int64_t vocabulary() const noexcept override { return vocabulary_; }

 private:
  static size_t bytes(int64_t elements) { return static_cast<size_t>(elements) * 2; }

  int64_t width_, vocabulary_;
  std::vector<UnitSpec> units_;
};

const gpu::Operators& operators() {
  static const auto kDevice = gpu::create_host_device({.threads = 1, .memory_bytes = kMiB});
  return kDevice->operators();
}

const MachineProfile& machine() {
  static const MachineProfile kMachine = find_profile("rtx4090-server");
  return kMachine;
}

/// Small enough for a test, large enough that bytes outweigh latencies: 16 blocks of 12.6 M.
const Layers& layers() {
  static const Layers kLayers(16, 1024, 8192);
  return kLayers;
}

constexpr StepShape kShape{.micro_batches = 2, .tokens = 4096, .max_sequences = 4};

Plan plan_of(const Placement& placement, const StepShape& shape = kShape) {
  return build_plan(layers(), operators(), shape, placement);
}

Placement speculated() {
  Placement placement = Placement::all_on(Tier::kNvme, layers().units().size());
  for (UnitPlacement& unit : placement.units) unit.update = Update::kSpeculated;
  return placement;
}

PlanRequest request(size_t device, size_t host, size_t nvme) {
  PlanRequest r{.shape = kShape, .sequence_length = 1024};
  r.budget = {.device_bytes = device, .host_bytes = host, .nvme_bytes = nvme};
  return r;
}

Foretold choose(const PlanRequest& r, const UnitModel& model = layers()) {
  return choose_plan(model, operators(), machine(), r);
}

/// Budgets from everything on the device to nearly everything on NVMe.
std::vector<Budget> budgets() {
  const size_t all = plan_of(Placement::all_on(Tier::kDevice, 18)).bytes(Tier::kDevice);
  const size_t activations = plan_of(Placement::all_on(Tier::kHost, 18)).bytes(Tier::kDevice);
  const size_t host = plan_of(Placement::all_on(Tier::kHost, 18)).bytes(Tier::kHost);
  return {{all, kGiB, 0},
          {activations, host, 0},
          {(all + activations) / 2, host, 0},
          {activations, host / 2, 16 * kGiB},
          {(all + activations) / 2, host / 4, 16 * kGiB},
          {activations / 2 + 100 * kMiB, host / 3, 16 * kGiB}};
}

bool is_within(const Plan& plan, const Budget& budget) {
  return std::all_of(kTiers.begin(), kTiers.end(),
                     [&](Tier tier) { return plan.bytes(tier) <= budget.bytes(tier); });
}

TEST_CASE("a chosen plan keeps to its budget and is the one that its placement builds",
          "[planner]") {
  for (const Budget& budget : budgets()) {
    CAPTURE(budget.device_bytes, budget.host_bytes, budget.nvme_bytes);
    PlanRequest r = request(0, 0, 0);
    r.budget = budget;
    const Foretold chosen = choose(r);
    CHECK(is_within(chosen.plan, budget));
    const Plan again = plan_of(chosen.plan.placement);
    CHECK(again.tier_bytes == chosen.plan.tier_bytes);
    const Timeline timeline = predict(again, again.train, layers(), machine());
    CHECK(timeline.seconds == chosen.timeline.seconds);
    CHECK(chosen.seconds.size() == again.train.size());
    const double replay_s = predict(again, again.replay, layers(), machine()).seconds;
    CHECK(chosen.step_s == timeline.seconds + kAssumedClippedSteps * replay_s);
    CHECK(find_race(again.train, again.buffers.all) == "");
  }
}

TEST_CASE("a chosen plan is as fast as any with everything on one tier", "[planner][full]") {
  Placement nvme = Placement::all_on(Tier::kNvme, 18);
  Placement mixed = nvme;
  for (UnitPlacement& unit : mixed.units) unit.weight = unit.gradient = Tier::kHost;
  std::vector<Placement> baselines{Placement::all_on(Tier::kDevice, 18),
                                   Placement::all_on(Tier::kHost, 18), nvme, mixed, speculated()};
  int compared = 0;
  for (const Budget& budget : budgets()) {
    PlanRequest r = request(0, 0, 0);
    r.budget = budget;
    const Foretold chosen = choose(r);
    for (const Placement& baseline : baselines) {
      Plan plan = plan_of(baseline);
      if (!is_within(plan, budget)) continue;
      const Foretold simple = foretell(std::move(plan), layers(), machine());
      CAPTURE(budget.device_bytes, budget.host_bytes, describe(baseline.units[1]));
      CHECK(chosen.step_s <= simple.step_s * (1 + 1e-3));
      ++compared;
    }
  }
  CHECK(compared >= 8);
}

TEST_CASE("homes follow the speeds of the lanes", "[planner]") {
  const PlanRequest r = request(64 * kGiB, 64 * kGiB, 64 * kGiB);
  // The device updates its state at the cost of its own time.
  MachineProfile slow_link = machine();
  slow_link.upload_bytes_per_s /= 100;
  slow_link.download_bytes_per_s /= 100;
  const Placement on_device = choose_plan(layers(), operators(), slow_link, r).plan.placement;
  MachineProfile slow_device = machine();
  slow_device.device_memory_bytes_per_s /= 100;
  const Placement on_host = choose_plan(layers(), operators(), slow_device, r).plan.placement;
  for (size_t u = 0; u < on_device.units.size(); ++u) {
    CHECK(on_device.units[u].optimizer == Tier::kDevice);
    CHECK(on_host.units[u].optimizer == Tier::kHost);
    const bool inner = u > 0 && u + 1 < on_device.units.size();
    if (inner) CHECK(on_device.units[u].saved == SavedActivations::kAll);  // there is room
  }
}

TEST_CASE("more memory never makes the prediction worse", "[planner][full]") {
  const Budget least = budgets().back();
  const auto seconds = [](const Budget& budget) {
    PlanRequest r = request(0, 0, 0);
    r.budget = budget;
    return choose(r).step_s;
  };
  for (const Tier tier : {Tier::kDevice, Tier::kHost}) {
    Budget budget = least;
    double before = seconds(budget);
    for (int i = 0; i < 5; ++i) {
      (tier == Tier::kDevice ? budget.device_bytes : budget.host_bytes) += least.host_bytes / 2;
      const double now = seconds(budget);
      CAPTURE(name_of(tier), budget.device_bytes, budget.host_bytes);
      CHECK(now <= before * 1.01);
      before = now;
    }
  }
}

TEST_CASE("the same request has the same answer", "[planner][full]") {
  PlanRequest r = request(0, 0, 0);
  r.budget = budgets()[4];
  const Foretold first = choose(r);
  const Foretold again = choose(r);
  CHECK(first.plan.placement.units == again.plan.placement.units);
  CHECK(first.plan.placement.part_elements == again.plan.placement.part_elements);
  CHECK(first.plan.tier_bytes == again.plan.tier_bytes);
  CHECK(first.step_s == again.step_s);
}

TEST_CASE("what is fixed stays as it is", "[planner]") {
  PlanRequest r = request(8 * kGiB, 8 * kGiB, 16 * kGiB);
  r.fixed = {.slots = 3,
             .host_slots = 4,
             .part_elements = 4 * cpu_adam::kChunkElements,
             .boundaries = Tier::kHost,
             .saved = SavedActivations::kAttention,
             .saved_activations = Tier::kNvme,
             .offload = Tier::kHost};
  const Placement fixed = choose(r).plan.placement;
  CHECK(fixed.slots == 3);
  CHECK(fixed.host_slots == 4);
  CHECK(fixed.part_elements == 4 * cpu_adam::kChunkElements);
  CHECK(fixed.boundaries == Tier::kHost);
  CHECK(fixed.saved_activations == Tier::kNvme);
  for (size_t u = 0; u < fixed.units.size(); ++u) {
    CHECK(fixed.units[u].optimizer == Tier::kHost);
    const bool inner = u > 0 && u + 1 < fixed.units.size();
    if (inner) CHECK(fixed.units[u].saved == SavedActivations::kAttention);
  }
  for (const Tier tier : kTiers) {
    r.fixed = {.offload = tier};
    for (const UnitPlacement& unit : choose(r).plan.placement.units) CHECK(unit.optimizer == tier);
  }
  r.fixed = {};
  r.state_on_device = false;
  for (const UnitPlacement& unit : choose(r).plan.placement.units) {
    CHECK(unit.optimizer != Tier::kDevice);
  }
}

TEST_CASE("a durable plan has all that changes on NVMe in two slots", "[planner]") {
  PlanRequest r = request(2 * kGiB, 2 * kGiB, 16 * kGiB);
  r.durable = true;
  const Foretold chosen = choose(r);
  CHECK(is_durable(chosen.plan.placement));
  CHECK(chosen.replay_s > 0);
  CHECK(chosen.step_s > chosen.timeline.seconds);
  r.clipping = false;
  CHECK(choose(r).replay_s == 0);
  r.fixed.offload = Tier::kHost;
  CHECK_THROWS_AS(choose(r), Error);
  r.fixed = {};
  r.budget.nvme_bytes = 0;
  CHECK_THROWS_AS(choose(r), Error);
}

TEST_CASE("what fits nowhere is refused with numbers that would do", "[planner]") {
  const size_t host = plan_of(Placement::all_on(Tier::kHost, 18)).bytes(Tier::kHost);
  PlanRequest r = request(300 * kMiB, host / 8, 0);
  std::string message;
  try {
    static_cast<void>(choose(r));
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDoesNotFit);
    message = error.what();
  }
  CAPTURE(message);
  const auto bytes_before = [&](const std::string& what) {
    // "... (123 bytes) of host memory"
    const std::string advice = message.substr(message.find("what would fit"));
    const size_t end = advice.find(" bytes) of " + what);
    REQUIRE(end != std::string::npos);
    return static_cast<size_t>(std::stoull(advice.substr(advice.rfind('(', end) + 1)));
  };
  // What it says would fit does, and a tenth less does not.
  const size_t host_bytes = bytes_before("host memory");
  PlanRequest more = r;
  more.budget.host_bytes = host_bytes;
  CHECK(is_within(choose(more).plan, more.budget));
  more.budget.host_bytes = host_bytes - host_bytes / 10;
  CHECK_THROWS_AS(choose(more), Error);
  more = r;
  more.budget.nvme_bytes = bytes_before("NVMe");
  CHECK(is_within(choose(more).plan, more.budget));
}

TEST_CASE("a micro-batch that fits is named", "[planner]") {
  PlanRequest r = request(0, 64 * kGiB, 0);
  r.shape = {.micro_batches = 1, .tokens = 64 * 1024, .max_sequences = 64};
  const StepShape smaller{.micro_batches = 1, .tokens = 16 * 1024, .max_sequences = 16};
  Placement placement = Placement::all_on(Tier::kHost, 18);
  placement.boundaries = Tier::kHost;
  r.budget.device_bytes = plan_of(placement, smaller).bytes(Tier::kDevice);
  CHECK_THROWS_WITH(choose(r), Catch::Matchers::Contains("micro_batch_size 16"));
}

TEST_CASE("NVMe needs drives in the profile", "[planner]") {
  MachineProfile bare = machine();
  bare.drives = 0;
  bare.nvme_bytes = 0;
  bare.read_bytes_per_s = bare.write_bytes_per_s = 0;
  CHECK_THROWS_WITH(choose_plan(layers(), operators(), bare, request(kGiB, kGiB, kGiB)),
                    Catch::Matchers::Contains("has no drives"));
  CHECK_NOTHROW(choose_plan(layers(), operators(), bare, request(2 * kGiB, 8 * kGiB, 0)));
}

TEST_CASE("advice is planned anew, each change alone", "[planner][full]") {
  PlanRequest r = request(0, 0, 0);
  r.budget = budgets()[3];
  const Foretold now = choose(r);
  const std::vector<Advice> all = advise(now, layers(), operators(), machine(), r);
  REQUIRE(all.size() == 4);
  for (const Advice& advice : all) {
    CAPTURE(advice.change);
    CHECK(advice.gain == advice.tokens_per_s - tokens_per_s(now));
    CHECK(advice.tokens_per_s > tokens_per_s(now) * 0.99);
  }
  PlanRequest more = r;
  more.budget.host_bytes *= 2;
  CHECK(all[0].tokens_per_s == tokens_per_s(choose(more)));
  CHECK(all[0].change.find("host memory") != std::string::npos);
  CHECK(all[1].change == "5 instead of 4 drives");
}

TEST_CASE("models of two and three units", "[planner]") {
  for (const int blocks : {0, 1}) {
    const Layers model(blocks, 256, 1024);
    CHECK(choose(request(kGiB, kGiB, 0), model).plan.placement.units.size() ==
          static_cast<size_t>(blocks) + 2);
    const PlanRequest r = request(120 * kMiB, kGiB, kGiB);
    const Foretold chosen = choose(r, model);
    CHECK(chosen.step_s > 0);
    const std::vector<Advice> all = advise(chosen, model, operators(), machine(), r);
    CHECK_FALSE(all.empty());
    for (const Advice& advice : all) CHECK(advice.tokens_per_s > tokens_per_s(chosen) * 0.99);
  }
}

TEST_CASE("planning 80 layers", "[planner][full]") {
  const Layers model(80, 8192, 32000);
  PlanRequest r = request(23 * kGiB, 240 * kGiB, size_t{4} << 40);
  r.shape = {.micro_batches = 8, .tokens = 8192, .max_sequences = 4};
  const auto begin = std::chrono::steady_clock::now();
  const Foretold chosen = choose(r, model);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  CHECK(is_within(chosen.plan, r.budget));
  WARN("80 layers planned in " << seconds << " s, with " << chosen.simulations << " simulations");
}

}  // namespace
}  // namespace strata::pipeline
