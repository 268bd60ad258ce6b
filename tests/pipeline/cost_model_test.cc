#include "pipeline/cost_model.h"

#include <memory>

#include "base/error.h"
#include "catch.h"
#include "gpu/host/host_device.h"
#include "pipeline/simulator.h"
#include "temporary_directory.h"

namespace strata::pipeline {
namespace {

/// Costs that are easy to tell apart.
class Priced final : public UnitModel {
 public:
  explicit Priced(int blocks) {
    units_.push_back({.name = "first", .parameter_count = 4096, .backward_reads_weight = false});
    for (int i = 0; i < blocks; ++i) units_.push_back({.name = "block", .parameter_count = 12288});
    units_.push_back({.name = "last", .parameter_count = 4096});
  }
  std::span<const UnitSpec> units() const noexcept override { return units_; }
  DType dtype() const noexcept override { return DType::kBf16; }
  size_t boundary_bytes(int64_t tokens) const noexcept override {
    return static_cast<size_t>(tokens) * 32;
  }
  size_t saved_bytes(int unit, SavedActivations saved, int64_t tokens) const override {
    const bool block = unit > 0 && unit + 1 < static_cast<int>(units_.size());
    return block ? static_cast<size_t>(tokens) * 64 * static_cast<size_t>(saved) : 0;
  }
  size_t constants_bytes() const noexcept override { return 100; }
  void write_constants(std::span<std::byte>) const override {}
  size_t workspace_bytes(Pass, const StepShape& shape, const gpu::Operators&) const override {
    return static_cast<size_t>(shape.tokens) * 300;
  }
  double matmul_flops(int unit, Pass pass, int64_t tokens, int64_t sequence_length,
                      SavedActivations saved) const override {
    const double passes = pass == Pass::kForward || pass == Pass::kLoss ? 1 : 3;
    const double spared = pass == Pass::kBackward ? static_cast<int>(saved) : 0;
    return static_cast<double>(tokens) * (1000 * (passes - spared / 4) + 100 * (unit + 1)) +
           static_cast<double>(tokens * sequence_length);
  }
  double other_bytes(int, Pass pass, int64_t tokens, SavedActivations saved) const override {
    return static_cast<double>(tokens) *
           (pass == Pass::kForward ? 50 + 10 * static_cast<int>(saved) : 150);
  }
  void forward(int, const UnitCall&) const override {}
  void backward(int, const UnitCall&) const override {}
  void loss(const UnitCall&) const override {}
  void logits(const UnitCall&, int64_t, float*) const override {}
  int64_t vocabulary() const noexcept override { return 11; }

 private:
  std::vector<UnitSpec> units_;
};

/// Speeds that are easy to tell apart.
MachineProfile machine() {
  MachineProfile profile;
  profile.name = "test";
  profile.matmul_bf16_flops_per_s = 1e6;
  profile.matmul_fp32_flops_per_s = 1e5;
  profile.device_memory_bytes_per_s = 1e4;
  profile.upload_bytes_per_s = 100;
  profile.download_bytes_per_s = 50;
  profile.adam_bytes_per_s = 200;
  profile.host_memory_bytes_per_s = 1000;  // for all of them together
  profile.read_bytes_per_s = 40;
  profile.write_bytes_per_s = 20;
  profile.drives = 1;
  profile.launch_s = 0.25;
  profile.link_latency_s = 0.125;
  return profile;
}

/// A plan of three units without a graph, for tasks made by hand.
Plan plan_of_units(DType dtype = DType::kBf16) {
  Plan plan;
  plan.shape = {.micro_batches = 1, .tokens = 40, .max_sequences = 4};
  plan.dtype = dtype;
  plan.parts = {{.parameter_count = 4096}, {.parameter_count = 12288}, {.parameter_count = 4096}};
  return plan;
}

double seconds_of(const Task& task, const Plan& plan = plan_of_units(),
                  const UnitCosts* measured = nullptr) {
  const std::vector<double> seconds = task_seconds(plan, {task}, Priced(1), machine(), measured);
  REQUIRE(seconds.size() == 1);
  return seconds[0];
}

Task move(TaskKind kind, Lane lane, size_t bytes) {
  Task task;
  task.kind = kind;
  task.lane = lane;
  task.unit = 1;
  task.moved_bytes = bytes;
  return task;
}

Task call(TaskKind kind, int unit, SavedActivations level = SavedActivations::kNone) {
  Task task;
  task.kind = kind;
  task.unit = unit;
  task.level = level;
  return task;
}

}  // namespace

TEST_CASE("what moves takes its bytes over its lane's speed, and links a latency") {
  CHECK(seconds_of(move(TaskKind::kUploadWeight, Lane::kUpload, 300)) == 0.125 + 3);
  CHECK(seconds_of(move(TaskKind::kUploadBatch, Lane::kUpload, 0)) == 0.125);
  CHECK(seconds_of(move(TaskKind::kDownloadGradient, Lane::kDownload, 300)) == 0.125 + 6);
  CHECK(seconds_of(move(TaskKind::kReadState, Lane::kReadWeight, 300)) == 7.5);
  CHECK(seconds_of(move(TaskKind::kReadActivation, Lane::kReadState, 300)) == 7.5);
  CHECK(seconds_of(move(TaskKind::kWriteState, Lane::kWrite, 300)) == 15);
  CHECK(seconds_of(move(TaskKind::kAdam, Lane::kCpu, 300)) == 1.5);
  CHECK(seconds_of(move(TaskKind::kAdam, Lane::kCompute, 5000)) == 0.25 + 0.5);
}

TEST_CASE("compute takes products over their speed, other bytes over the memory's, and a launch") {
  // 40 tokens in documents of 10; unit 1 of 3.
  const double products = 40 * (1000 + 200) + 40 * 10;
  CHECK(seconds_of(call(TaskKind::kForward, 1)) == Approx(0.25 + products / 1e6 + 40 * 50 / 1e4));
  CHECK(seconds_of(call(TaskKind::kForward, 1), plan_of_units(DType::kF32)) ==
        Approx(0.25 + products / 1e5 + 40 * 50 / 1e4));
  CHECK(seconds_of(call(TaskKind::kForward, 1, SavedActivations::kAll)) ==
        Approx(0.25 + products / 1e6 + 40 * 70 / 1e4));
  CHECK(seconds_of(call(TaskKind::kBackward, 1, SavedActivations::kAttention)) ==
        Approx(0.25 + (40 * (2750 + 200) + 400) / 1e6 + 40 * 150 / 1e4));
  Task loss = call(TaskKind::kLoss, 2);
  CHECK(seconds_of(loss) == Approx(0.25 + (40 * (1000 + 300) + 400) / 1e6 + 40 * 150 / 1e4));
  loss.with_backward = true;
  CHECK(seconds_of(loss) == Approx(0.25 + (40 * (3000 + 300) + 400) / 1e6 + 40 * 150 / 1e4));
  CHECK(seconds_of(call(TaskKind::kFinishGradient, 1)) == Approx(0.25 + 12288 * 6 / 1e4));
  CHECK(seconds_of(call(TaskKind::kFinishGradient, 1), plan_of_units(DType::kF32)) ==
        Approx(0.25 + 12288 * 8 / 1e4));
  CHECK(seconds_of(call(TaskKind::kClearScalars, -1)) == 0.25);
}

TEST_CASE("measured figures stand for the class of unit, task and level that was measured") {
  UnitCosts costs(40);
  costs.set(UnitClass::kInner, TaskKind::kForward, SavedActivations::kNone, 3);
  costs.set(UnitClass::kInner, TaskKind::kBackward, SavedActivations::kAll, 8);
  costs.set(UnitClass::kLast, TaskKind::kLoss, SavedActivations::kNone, 5);
  const auto measured = [&](const Task& task) { return seconds_of(task, plan_of_units(), &costs); };
  CHECK(measured(call(TaskKind::kForward, 1)) == 3);
  CHECK(measured(call(TaskKind::kBackward, 1, SavedActivations::kAll)) == 8);
  Task loss = call(TaskKind::kLoss, 2);
  loss.with_backward = true;
  CHECK(measured(loss) == 5);
  // Another class, another task, a loss without backward, and other lanes: as computed.
  for (const Task& task :
       {call(TaskKind::kForward, 0), call(TaskKind::kFinishGradient, 1), call(TaskKind::kLoss, 2),
        call(TaskKind::kClearScalars, -1), move(TaskKind::kUploadWeight, Lane::kUpload, 300)}) {
    CHECK(measured(task) == seconds_of(task));
  }
}

TEST_CASE("a level or size that was not measured is scaled from one that was") {
  UnitCosts costs(40);
  costs.set(UnitClass::kInner, TaskKind::kBackward, SavedActivations::kNone, 8);
  const Task none = call(TaskKind::kBackward, 1);
  const Task all = call(TaskKind::kBackward, 1, SavedActivations::kAll);
  CHECK(seconds_of(all, plan_of_units(), &costs) == Approx(8 * seconds_of(all) / seconds_of(none)));
  Plan longer = plan_of_units();
  longer.shape.tokens = 80;
  longer.shape.max_sequences = 8;
  CHECK(seconds_of(none, longer, &costs) ==
        Approx(8 * seconds_of(none, longer) / seconds_of(none)));
  // The nearer level's figure, once there is one.
  costs.set(UnitClass::kInner, TaskKind::kBackward, SavedActivations::kAttention, 7);
  const Task attention = call(TaskKind::kBackward, 1, SavedActivations::kAttention);
  CHECK(seconds_of(all, plan_of_units(), &costs) ==
        Approx(7 * seconds_of(all) / seconds_of(attention)));
  CHECK(seconds_of(none, plan_of_units(), &costs) == 8);
}

TEST_CASE("classes of units") {
  CHECK(class_of(0, 3) == UnitClass::kFirst);
  CHECK(class_of(1, 3) == UnitClass::kInner);
  CHECK(class_of(2, 3) == UnitClass::kLast);
  CHECK(class_of(0, 2) == UnitClass::kFirst);
  CHECK(class_of(1, 2) == UnitClass::kLast);
  CHECK(class_of(0, 1) == UnitClass::kLast);
}

TEST_CASE("a plan with drives on a machine without is refused by the machine's name") {
  MachineProfile profile = machine();
  profile.drives = 0;
  profile.read_bytes_per_s = profile.write_bytes_per_s = 0;
  const StepGraph graph = {move(TaskKind::kReadState, Lane::kReadWeight, 300)};
  const std::string message =
      message_of([&] { (void)task_seconds(plan_of_units(), graph, Priced(1), profile); });
  CHECK(message.find("'test'") != std::string::npos);
  CHECK(message.find("has none") != std::string::npos);
}

TEST_CASE("collectives take what their groups' links take, and the lane works in order") {
  MachineProfile profile = machine();
  profile.ranks_per_node = 2;
  profile.collective_bytes_per_s = 1000;
  profile.network_bytes_per_s = 100;
  profile.network_latency_s = 0.5;
  const Priced model(4);
  const std::unique_ptr<gpu::Device> device = gpu::create_host_device({.threads = 1});
  const StepShape shape{.micro_batches = 2, .tokens = 40, .max_sequences = 4};
  Placement placement = Placement::all_on(Tier::kDevice, model.units().size());
  for (const Sharding sharding :
       {Sharding::kNoShard, Sharding::kShardGradOp, Sharding::kFullShard, Sharding::kHybridShard}) {
    placement.ranks = RankLayout::of(sharding, 4, 2, DType::kBf16);
    const Plan plan = build_plan(model, device->operators(), shape, placement);
    const std::vector<double> seconds = task_seconds(plan, plan.train, model, profile);
    const Timeline timeline = predict(plan, plan.train, model, profile);
    INFO(name_of(sharding));
    double lane_s = 0;
    double end_s = 0;
    for (size_t t = 0; t < plan.train.size(); ++t) {
      const Task& task = plan.train[t];
      if (task.kind == TaskKind::kRoundGradient) {
        const int64_t count = plan.whole_elements(task.unit);
        CHECK(seconds[t] == Approx(0.25 + static_cast<double>(count) * 6 / 1e4));
      }
      if (task.lane != Lane::kCollective) continue;
      CHECK(timeline.tasks[t].begin_s >= end_s);
      end_s = timeline.tasks[t].end_s;
      lane_s += seconds[t];
      if (task.kind == TaskKind::kReduceGradient && sharding == Sharding::kHybridShard) {
        const auto bytes = static_cast<double>(plan.whole_elements(task.unit)) * 2;
        // Half of it within the node; a half of it, twice, by each of its two ranks between nodes.
        CHECK(seconds[t] == Approx(0.125 + bytes / 2 / 1000 + 0.125 + 2 * 0.5 + bytes / 2 / 100));
      }
      if (task.kind == TaskKind::kGatherWeight && sharding == Sharding::kFullShard) {
        const auto bytes = static_cast<double>(plan.whole_elements(task.unit)) * 2;
        CHECK(seconds[t] == Approx(0.125 + 0.5 + bytes * 3 / 4 / 200));
      }
    }
    CHECK(lane_s > 0);
    CHECK(timeline.busy_s(plan.train, Lane::kCollective) == Approx(lane_s));
    CHECK(timeline.seconds >= lane_s);
  }
  // What the profile does not know is taken to be as fast as upload.
  MachineProfile unknown = machine();
  MachineProfile assumed = unknown;
  assumed.ranks_per_node = 4;
  assumed.collective_bytes_per_s = assumed.upload_bytes_per_s;
  const Plan plan = build_plan(model, device->operators(), shape, placement);
  CHECK(task_seconds(plan, plan.train, model, unknown) ==
        task_seconds(plan, plan.train, model, assumed));
}

TEST_CASE("whole steps are foretold between their busiest lane and the sum of their tasks") {
  const Priced model(5);
  const std::unique_ptr<gpu::Device> device = gpu::create_host_device({.threads = 1});
  const StepShape shape{.micro_batches = 3, .tokens = 40, .max_sequences = 4};
  for (const Tier tier : kTiers) {
    for (const int slots : {1, 2, 3}) {
      const Plan plan = build_plan(model, device->operators(), shape,
                                   Placement::all_on(tier, model.units().size(), slots));
      for (const StepGraph* graph : {&plan.train, &plan.update, &plan.evaluate}) {
        const std::vector<double> seconds = task_seconds(plan, *graph, model, machine());
        const Timeline timeline = predict(plan, *graph, model, machine());
        std::array<double, kLanes> lanes{};
        double drives = 0;
        double sum = 0;
        for (size_t t = 0; t < graph->size(); ++t) {
          lanes[static_cast<size_t>((*graph)[t].lane)] += seconds[t];
          if (is_disk_lane((*graph)[t].lane)) drives += seconds[t];
          sum += seconds[t];
        }
        INFO(name_of(tier) << ", " << slots << " slots");
        for (const double lane : lanes) CHECK(timeline.seconds >= lane * (1 - 1e-12));
        CHECK(timeline.seconds >= drives * (1 - 1e-12));
        CHECK(timeline.seconds <= sum * (1 + 1e-12));
        CHECK(timeline.busy_s(*graph, Lane::kWrite) == Approx(drives).margin(1e-9));
        double path_s = 0;
        for (const PathStep& step : critical_path(*graph, timeline)) {
          CHECK(step.gap_s == 0);
          path_s += step.end_s - step.begin_s;
        }
        CHECK(path_s == Approx(timeline.seconds));
      }
    }
  }
}

}  // namespace strata::pipeline
