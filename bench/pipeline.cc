#include <fmt/format.h>
#include <fmt/ranges.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "bench/lanes.h"
#include "bench/many_blocks.h"
#include "bench/matmul_peak.h"
#include "bench/random_batch.h"
#include "cpu_adam/adam.h"
#include "gpu/host/host_device.h"
#include "model/llama.h"
#include "model/weights.h"
#include "nvme/throttled_backend.h"
#include "pipeline/calibrate.h"
#include "pipeline/executor.h"
#include "pipeline/simulator.h"
#include "pipeline/trace.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::Lane;
using pipeline::Placement;
using pipeline::Tier;
using pipeline::Timeline;

constexpr int64_t kSequence = 128;
constexpr int64_t kPartElements = int64_t{1} << 19;
// Device and optimizer have a core each, as if they were two processors.
constexpr int kDeviceThreads = 1;
constexpr int kAdamThreads = 1;

/// One way of being bound. Speeds are of the slowed-down links and drive, bytes per second.
struct Regime {
  std::string name;
  Lane bound;
  int64_t sequences;
  Tier home;
  double upload, download;
  double read = 0, write = 0;
};

const std::array kRegimes{
    Regime{.name = "compute",
           .bound = Lane::kCompute,
           .sequences = 8,  // enough for an arena in huge pages, as that of the run beside has
           .home = Tier::kHost,
           .upload = 4e9,
           .download = 4e9},
    Regime{.name = "link",
           .bound = Lane::kUpload,
           .sequences = 1,
           .home = Tier::kHost,
           .upload = 120e6,
           .download = 240e6},
    Regime{.name = "disk",
           .bound = Lane::kReadState,
           .sequences = 1,
           .home = Tier::kNvme,
           .upload = 4e9,
           .download = 4e9,
           .read = 0.6e9,
           .write = 0.6e9},
};

Placement placement_of(const Regime& regime, size_t units) {
  Placement placement = Placement::all_on(regime.home, units, 3);
  placement.part_elements = kPartElements;
  placement.host_slots = 6;
  if (regime.home == Tier::kNvme) {
    for (pipeline::UnitPlacement& unit : placement.units) {
      unit.update = pipeline::Update::kSpeculated;
    }
  }
  return placement;
}

/// A directory of the store, gone with everything in it at the end.
class StoreDirectory {
 public:
  explicit StoreDirectory(const std::filesystem::path& parent) {
    std::string name = (parent / "strata-bench-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw failure(fmt::format("cannot create a directory in {}: {}", parent.string(),
                                std::generic_category().message(errno)));
    }
    path_ = name;
  }
  StoreDirectory(const StoreDirectory&) = delete;
  StoreDirectory& operator=(const StoreDirectory&) = delete;
  ~StoreDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// What the optimizer's threads do, on state that comes from memory and not from caches.
class AdamRun {
 public:
  explicit AdamRun(gpu::Device& device)
      : arena_(kAdamThreads),
        memory_(device.allocate_host_memory(kParts * kPartBytes)),
        constants_(cpu_adam::step_constants({}, 1, 1)) {
    // Zeros, which are written once so that there is memory behind them.
    std::memset(memory_->data(), 0, memory_->size_bytes());
  }

  /// One pass over all of it: bytes per second.
  double run() {
    const std::vector<cpu_adam::Segment> segments{{.count = kPartElements, .decay = true}};
    const auto start = Clock::now();
    for (size_t part = 0; part < kParts; ++part) {
      std::byte* at = memory_->data() + part * kPartBytes;
      const auto take = [&at](size_t size_bytes) {
        std::byte* taken = at;
        at += size_bytes + pipeline::kStateGap;
        return taken;
      };
      constexpr auto kCount = static_cast<size_t>(kPartElements);
      std::byte* gradient = take(2 * kCount);
      std::byte* weight = take(2 * kCount);
      auto* residual = reinterpret_cast<uint16_t*>(take(2 * kCount));
      std::byte* moment1 = take(4 * kCount);
      std::byte* moment2 = take(4 * kCount);
      cpu_adam::update(arena_,
                       {.count = kPartElements,
                        .gradient = gradient,
                        .weight = weight,
                        .residual = residual,
                        .moment1 = moment1,
                        .moment2 = moment2,
                        .weight_out = weight,
                        .residual_out = residual,
                        .moment1_out = moment1,
                        .moment2_out = moment2,
                        .step = 1},
                       segments, constants_);
    }
    constexpr double kBytesPerParameter = 26;
    return kBytesPerParameter * static_cast<double>(kParts * kPartElements) /
           std::chrono::duration<double>(Clock::now() - start).count();
  }

 private:
  static constexpr size_t kParts = 16;
  static constexpr size_t kPartBytes =
      14 * static_cast<size_t>(kPartElements) + 5 * pipeline::kStateGap;
  tbb::task_arena arena_;
  std::unique_ptr<gpu::Arena> memory_;
  cpu_adam::StepConstants constants_;
};

double median(std::vector<double> values) { return summarize("", "", std::move(values)).median; }

/// The speeds that no throttle sets.
struct CoreSpeeds {
  double matmul_flops_per_s = 0;
  double adam_bytes_per_s = 0;
  double together = 1;  // part of each one's speed when both are at work
};

CoreSpeeds measure_cores(gpu::Device& device) {
  MatmulTimer product(device, {"block", 512, 2048, 384, false, true, DType::kBf16});
  AdamRun adam(device);
  constexpr int kRuns = 5;
  std::vector<double> product_alone, adam_alone, product_beside, adam_beside;
  static_cast<void>(adam.run());
  for (int i = 0; i < kRuns; ++i) {
    product_alone.push_back(product.run());
    adam_alone.push_back(adam.run());
  }
  {
    const std::jthread beside([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) adam_beside.push_back(adam.run());
    });
    static_cast<void>(product.run());
    for (int i = 0; i < 3 * kRuns; ++i) product_beside.push_back(product.run());
  }
  const double of_product = median(product_beside) / median(product_alone);
  const double of_adam = median(adam_beside) / median(adam_alone);
  return {.matmul_flops_per_s = median(product_alone),
          .adam_bytes_per_s = median(adam_alone),
          .together = std::min(1.0, (of_product + of_adam) / 2)};
}

/// Seconds that a copy over the slowed-down link takes beyond its bytes: waking up, above all.
double measure_link_latency(gpu::Device& device, const Regime& regime) {
  constexpr size_t kBytes = 64 * kKiB;
  constexpr int kCopies = 32;
  const auto from = device.allocate_host_memory(kBytes);
  const auto to = device.allocate_device_memory(kBytes);
  const auto stream = device.create_stream("bench");
  int64_t stamp_ns = 0;
  std::vector<double> latencies;
  for (int round = 0; round < 5; ++round) {
    const auto start = Clock::now();
    for (int i = 0; i < kCopies; ++i) {
      device.stamp_async(&stamp_ns, *stream);
      device.copy_async(to->data(), from->data(), kBytes, gpu::CopyDirection::kUpload, *stream);
      device.stamp_async(&stamp_ns, *stream);
    }
    device.synchronize(*stream);
    const double copy_s = std::chrono::duration<double>(Clock::now() - start).count() / kCopies;
    latencies.push_back(copy_s - static_cast<double>(kBytes) / regime.upload);
  }
  return std::max(0.0, median(latencies));
}

pipeline::MachineProfile profile_of(const Regime& regime, const CoreSpeeds& cores,
                                    double link_latency_s) {
  pipeline::MachineProfile profile;
  profile.name = "bench pipeline/" + regime.name;
  profile.device = "host";
  profile.measured = true;
  profile.matmul_bf16_flops_per_s = profile.matmul_fp32_flops_per_s = cores.matmul_flops_per_s;
  profile.device_memory_bytes_per_s = cores.adam_bytes_per_s;
  profile.upload_bytes_per_s = regime.upload;
  profile.download_bytes_per_s = regime.download;
  profile.adam_bytes_per_s = cores.adam_bytes_per_s;
  profile.compute_with_adam = cores.together;
  profile.read_bytes_per_s = regime.read;
  profile.write_bytes_per_s = regime.write;
  profile.drives = regime.read > 0 ? 1 : 0;
  profile.link_latency_s = link_latency_s;
  // So that what memory costs is in `together` alone.
  profile.host_memory_bytes_per_s = regime.upload + regime.download + cores.adam_bytes_per_s +
                                    std::max(regime.read, regime.write);
  return profile;
}

/// Steps of one executor on one batch. The first, without an update before it, warms up.
class Steps {
 public:
  Steps(pipeline::Executor& executor, const model::Llama& llama, const RandomBatch& batch)
      : executor_(executor), batch_(batch) {
    model::initialize_weights(1, llama, executor_);
  }

  void run() {
    const auto start = Clock::now();
    const pipeline::HostMicroBatch view = batch_.view();
    const auto step = static_cast<int64_t>(losses.size()) + 1;
    const pipeline::StepResult result =
        executor_.train_step({&view, 1}, 1 / static_cast<float>(batch_.tokens.size()),
                             {.hyper = {.learning_rate = 3e-4, .weight_decay = 0.1},
                              .step = step,
                              // Never reached, but looked at: a replay is not in a timeline.
                              .max_grad_norm = 1e6});
    executor_.commit(std::as_bytes(std::span(&step, 1)));
    const double taken_s = std::chrono::duration<double>(Clock::now() - start).count();
    if (result.clipped || !result.finite) throw failure("a step of the benchmark was clipped");
    losses.push_back(result.loss_sum);
    if (step == 1) return;
    seconds.push_back(taken_s);
    timelines.push_back(executor_.timeline());
  }

  std::vector<double> losses;
  std::vector<double> seconds;  // with the commit; without the first
  std::vector<Timeline> timelines;

 private:
  pipeline::Executor& executor_;
  const RandomBatch& batch_;
};

/// Where a step's time went, in a line.
std::string account(const pipeline::Plan& plan, const Timeline& timeline, double step_s) {
  std::vector<std::string> busy, path;
  for (const Lane lane : pipeline::kAllLanes) {
    const double seconds = timeline.busy_alone_s(plan.train, lane);
    if (seconds > 0) busy.push_back(fmt::format("{} {:.3f}", name_of(lane), seconds));
  }
  const auto steps = pipeline::critical_path(plan.train, timeline);
  const auto of_lane = pipeline::path_seconds(plan.train, steps);
  for (const Lane lane : pipeline::kAllLanes) {
    const double seconds = of_lane[static_cast<size_t>(lane)];
    if (seconds > 0) path.push_back(fmt::format("{} {:.3f}", name_of(lane), seconds));
  }
  double gaps = 0;
  for (const pipeline::PathStep& step : steps) gaps += step.gap_s;
  return fmt::format("step {:.3f} s, graph {:.3f}; busy {}; critical path {}, gaps {:.3f}", step_s,
                     timeline.seconds, fmt::join(busy, ", "), fmt::join(path, ", "), gaps);
}

/// What the bounding lane carried a second, of what it was slowed down to: unlike the lane's busy
/// time this leaves out what a task waits for once it has begun.
Row rate_row(const Regime& regime, const pipeline::Plan& plan,
             const std::vector<double>& step_seconds) {
  double bytes = 0;
  double needed_s = 0;
  for (const pipeline::Task& task : plan.train) {
    const bool counts =
        is_disk_lane(regime.bound) ? is_disk_lane(task.lane) : task.lane == regime.bound;
    if (!counts) continue;
    const auto moved = static_cast<double>(task.moved_bytes);
    bytes += moved;
    needed_s += moved / (task.lane == Lane::kUpload  ? regime.upload
                         : task.lane == Lane::kWrite ? regime.write
                                                     : regime.read);
  }
  std::vector<double> rates;
  for (const double step_s : step_seconds) rates.push_back(bytes / step_s / 1e9);
  Row row = summarize(fmt::format("pipeline/{} rate", regime.name), "GB/s", rates);
  row.of_ceiling = needed_s / median(step_seconds);
  return row;
}

void run_regime(const Regime& regime, const model::Llama& llama, const CoreSpeeds& cores,
                const Options& options, std::vector<Row>& rows) {
  const size_t units = llama.units().size();
  const pipeline::StepShape shape{.micro_batches = 1,
                                  .tokens = regime.sequences * kSequence,
                                  .max_sequences = regime.sequences};
  const RandomBatch batch(regime.sequences, kSequence, llama.vocabulary(), 0);

  // The same steps with everything on the device: the losses, and what compute takes.
  const auto plain = gpu::create_host_device({.threads = kDeviceThreads});
  pipeline::Executor resident(*plain, llama,
                              pipeline::build_plan(llama, plain->operators(), shape,
                                                   Placement::all_on(Tier::kDevice, units)),
                              {.cpu_threads = kAdamThreads});

  const auto slow = gpu::create_host_device({.threads = kDeviceThreads,
                                             .upload_bytes_per_second = regime.upload,
                                             .download_bytes_per_second = regime.download});
  const StoreDirectory directory(options.path);
  pipeline::ExecutorOptions executor_options{.cpu_threads = kAdamThreads};
  if (regime.home == Tier::kNvme) {
    executor_options.nvme = {
        .directories = {{.directory = directory.path(), .block_size_bytes = kMiB, .depth = 4}},
        .backend = nvme::throttled(nvme::open_backend, regime.read, regime.write)};
  }
  pipeline::Executor executor(
      *slow, llama,
      pipeline::build_plan(llama, slow->operators(), shape, placement_of(regime, units)),
      executor_options);
  const pipeline::Plan& plan = executor.plan();

  Steps expected(resident, llama, batch);
  Steps steps(executor, llama, batch);
  // In turns, so that both see the same machine.
  for (int i = 0; i <= options.repetitions; ++i) {
    expected.run();
    steps.run();
  }
  const pipeline::MachineProfile profile =
      profile_of(regime, cores, measure_link_latency(*slow, regime));
  std::vector<double> busy, ratios;
  Timeline predicted;
  for (size_t i = 0; i < steps.seconds.size(); ++i) {
    busy.push_back(steps.timelines[i].busy_s(plan.train, regime.bound) / steps.seconds[i]);
    // Each step is foretold from the one with everything on the device that ran just before it.
    const pipeline::UnitCosts costs =
        pipeline::measure_unit_costs(resident.plan(), expected.timelines[i]);
    predicted = pipeline::predict(plan, plan.train, llama, profile, &costs);
    ratios.push_back(predicted.seconds / steps.seconds[i]);
    options.say(fmt::format("{}: all on the device: {}", regime.name,
                            account(resident.plan(), expected.timelines[i], expected.seconds[i])));
    options.say(fmt::format("{}: measured {}", regime.name,
                            account(plan, steps.timelines[i], steps.seconds[i])));
    options.say(
        fmt::format("{}: foretold {}", regime.name, account(plan, predicted, predicted.seconds)));
  }
  Row step = summarize("pipeline/" + regime.name, "s", steps.seconds);
  step.of_ceiling = median(busy);
  step.wrong = 0;
  for (size_t i = 0; i < steps.losses.size(); ++i) {
    *step.wrong += steps.losses[i] != expected.losses[i];
  }
  rows.push_back(std::move(step));
  if (regime.bound != Lane::kCompute) rows.push_back(rate_row(regime, plan, steps.seconds));
  rows.push_back(summarize("predict/" + regime.name, "ratio", ratios));

  if (!options.traces.empty()) {
    pipeline::write_trace(options.traces / fmt::format("pipeline-{}.json", regime.name), plan,
                          plan.train, llama.units(), steps.timelines.back(), &predicted);
  }
}

}  // namespace

std::vector<Row> run_pipeline(gpu::Device& /*device*/, const Options& options) {
  const model::Llama llama(many_blocks(), DType::kBf16, kSequence);
  const CoreSpeeds cores = measure_cores(*gpu::create_host_device({.threads = kDeviceThreads}));
  options.say(
      fmt::format("one core: products {:.0f} GFLOP/s, optimizer {:.1f} GB/s; beside each "
                  "other {:.2f} of that",
                  cores.matmul_flops_per_s / 1e9, cores.adam_bytes_per_s / 1e9, cores.together));
  std::vector<Row> rows;
  for (const Regime& regime : kRegimes) run_regime(regime, llama, cores, options, rows);
  return rows;
}

}  // namespace strata::bench
