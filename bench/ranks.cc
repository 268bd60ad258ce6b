// Two ranks, each a thread with a core of its own, and a connection between them that is slowed
// down: what the collective lane costs a step where compute bounds it, and what it carries where it
// bounds the step itself.

#include <fmt/format.h>

#include <array>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bench/lanes.h"
#include "bench/many_blocks.h"
#include "bench/random_batch.h"
#include "comm/thread_communicator.h"
#include "comm/throttled.h"
#include "gpu/host/host_device.h"
#include "model/llama.h"
#include "model/weights.h"
#include "pipeline/executor.h"
#include "pipeline/trace.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;
using pipeline::Lane;
using pipeline::Placement;
using pipeline::Tier;

constexpr int kRanks = 2;
constexpr int64_t kSequence = 128;

struct Regime {
  std::string name;
  Lane bound;
  double slow_down;  // seconds of the collective lane's bytes, as a part of compute's seconds
};
const std::array kRegimes{
    Regime{.name = "compute", .bound = Lane::kCompute, .slow_down = 0.5},
    Regime{.name = "collective", .bound = Lane::kCollective, .slow_down = 2.5},
};

/// What one rank saw.
struct Steps {
  std::vector<double> losses;
  std::vector<double> seconds;  // without the first
  std::vector<pipeline::Timeline> timelines;
};

class Run {
 public:
  Run(const model::Llama& llama, int64_t sequences) : llama_(llama) {
    shape_ = {.micro_batches = 1, .tokens = sequences * kSequence, .max_sequences = sequences};
    placement_ = Placement::all_on(Tier::kDevice, llama.units().size(), 3);
    placement_.ranks = pipeline::RankLayout::of(pipeline::Sharding::kFullShard, kRanks);
  }

  [[nodiscard]] pipeline::Plan plan() const {
    const auto device = gpu::create_host_device({.threads = 1});
    return pipeline::build_plan(llama_, device->operators(), shape_, placement_);
  }

  /// Each rank takes its own part of the same batches; the first rank's view of it. 0: as fast as
  /// memory.
  [[nodiscard]] Steps run(double bytes_per_s, int steps) const {
    std::vector<comm::RankGroups> groups =
        comm::create_thread_rank_groups(kRanks, placement_.ranks.shard_ranks);
    if (bytes_per_s > 0) {
      for (comm::RankGroups& each : groups) {
        each.shard = comm::throttled(std::move(each.shard), bytes_per_s);
      }
    }
    Steps seen;
    std::mutex mutex;
    std::exception_ptr error;
    {
      std::vector<std::jthread> threads;
      for (int rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&, rank] {
          const comm::RankGroups& mine = groups[static_cast<size_t>(rank)];
          try {
            Steps of_rank = run_rank(rank, mine, steps);
            if (rank == 0) seen = std::move(of_rank);
          } catch (...) {
            mine.abort();
            const std::lock_guard lock(mutex);
            if (!error) error = std::current_exception();
          }
        });
      }
    }
    if (error) std::rethrow_exception(error);
    return seen;
  }

 private:
  [[nodiscard]] Steps run_rank(int rank, const comm::RankGroups& groups, int steps) const {
    const auto device = gpu::create_host_device({.threads = 1});
    pipeline::Executor executor(
        *device, llama_, pipeline::build_plan(llama_, device->operators(), shape_, placement_),
        {.cpu_threads = 1, .ranks = &groups});
    model::initialize_weights(1, llama_, executor);
    const RandomBatch batch(shape_.max_sequences, kSequence, llama_.vocabulary(),
                            static_cast<uint64_t>(rank));
    const pipeline::HostMicroBatch view = batch.view();
    Steps seen;
    for (int step = 1; step <= steps; ++step) {
      const auto start = Clock::now();
      const pipeline::StepResult result = executor.train_step(
          {&view, 1}, 1 / static_cast<float>(kRanks * shape_.tokens),
          {.hyper = {.learning_rate = 3e-4, .weight_decay = 0.1}, .step = step});
      seen.losses.push_back(result.loss_sum);
      if (step == 1) continue;
      seen.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
      seen.timelines.push_back(executor.timeline());
    }
    return seen;
  }

  const model::Llama& llama_;
  pipeline::StepShape shape_;
  Placement placement_;
};

double median(std::vector<double> values) { return summarize("", "", std::move(values)).median; }

}  // namespace

std::vector<Row> run_ranks(gpu::Device& /*device*/, const Options& options) {
  if (std::thread::hardware_concurrency() < kRanks) {
    throw failure("bench ranks needs two cores, one for each rank");
  }
  const model::Llama llama(many_blocks(), DType::kBf16, kSequence);
  const Run run(llama, 8);
  const pipeline::Plan plan = run.plan();
  double bytes = 0;
  for (const pipeline::Task& task : plan.train) {
    if (task.lane == Lane::kCollective) bytes += static_cast<double>(task.moved_bytes);
  }
  const int steps = options.repetitions + 1;
  std::vector<Row> rows;
  for (const Regime& regime : kRegimes) {
    // As fast as memory: the losses, and what compute takes.
    const Steps expected = run.run(0, steps);
    std::vector<double> compute;
    for (const pipeline::Timeline& timeline : expected.timelines) {
      compute.push_back(timeline.busy_s(plan.train, Lane::kCompute));
    }
    const double speed = bytes / (median(compute) * regime.slow_down);
    const Steps slow = run.run(speed, steps);
    std::vector<double> of_step;
    for (size_t i = 0; i < slow.seconds.size(); ++i) {
      const double busy = regime.bound == Lane::kCompute
                              ? slow.timelines[i].busy_s(plan.train, Lane::kCompute)
                              : bytes / speed;
      of_step.push_back(busy / slow.seconds[i]);
      options.say(fmt::format(
          "{}: step {:.3f} s; compute {:.3f}, collective {:.3f} of which {:.3f} for its bytes; as "
          "fast as memory: step {:.3f} s",
          regime.name, slow.seconds[i], slow.timelines[i].busy_s(plan.train, Lane::kCompute),
          slow.timelines[i].busy_s(plan.train, Lane::kCollective), bytes / speed,
          expected.seconds[i]));
    }
    Row row = summarize("ranks/" + regime.name, "s", slow.seconds);
    row.of_ceiling = median(of_step);
    row.wrong = 0;
    for (size_t i = 0; i < slow.losses.size(); ++i) {
      *row.wrong += slow.losses[i] != expected.losses[i];
    }
    rows.push_back(std::move(row));
    if (!options.traces.empty()) {
      pipeline::write_trace(options.traces / fmt::format("ranks-{}.json", regime.name), plan,
                            plan.train, llama.units(), slow.timelines.back(), nullptr);
    }
  }
  return rows;
}

}  // namespace strata::bench
