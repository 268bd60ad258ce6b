// Runs the graphs of a plan: owns the arenas, the store on NVMe, the lanes and the state in them.
//
// One thread at a time may call an Executor; it is the dispatcher. Device lanes are streams ordered
// by events; the cpu lane and the disk lanes have a thread each, and the latter keep several
// requests under way. Calls block until their graph has ended. Nothing is allocated in a step. The
// first error of any lane ends the graph, cancels what has not begun, and is thrown; the state in
// memory is then undefined and the executor only good for destruction, and what is on NVMe stays at
// the last commit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/rank_groups.h"
#include "cpu_adam/adam.h"
#include "gpu/device.h"
#include "pipeline/nvme_tier.h"
#include "pipeline/plan.h"
#include "pipeline/sharding.h"
#include "pipeline/state_access.h"
#include "pipeline/timeline.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// One micro-batch in ordinary memory; see MicroBatch. Spans have exactly the plan's `tokens`.
struct HostMicroBatch {
  std::span<const int32_t> token_ids;
  std::span<const int32_t> targets;
  std::span<const int32_t> positions;
  std::span<const int32_t> sequence_offsets;  // at most the plan's max_sequences + 1
};

/// What the optimizer is to make of a step's gradient.
struct OptimizerRule {
  cpu_adam::Hyperparameters hyper;
  int64_t step = 1;          // counts from 1; steps that changed nothing do not count
  double max_grad_norm = 0;  // 0: no clipping
  uint64_t seed = 0;         // of stochastic rounding; not used by exact moments
};

struct StepResult {
  double loss_sum = 0;       // over unmasked tokens of all ranks
  double gradient_norm = 0;  // of the gradient scaled by loss_scale, before clipping
  bool finite = true;        // false: the step changes nothing
  bool clipped = false;
  bool replayed = false;  // speculated updates had to be made again
};

/// What an executor is at, for those who watch it.
struct Activity {
  std::string task;   // "backward of block 3"; empty between graphs
  int64_t ended = 0;  // tasks of this graph
  /// All that is under way is between ranks: it may be others that take so long.
  bool waits_for_ranks = false;
};

struct ExecutorOptions {
  int cpu_threads = 0;  // of the optimizer on the cpu lane; 0: one for each core
  NvmeOptions nvme{};   // needed where the plan homes anything on NVMe
  /// Needed where the plan is for several ranks; outlives the executor.
  const comm::RankGroups* ranks = nullptr;
};

class Executor final : public StateAccess {
 public:
  /// Allocates the arenas and makes or opens the store. `model` and `device` must outlive the
  /// executor. State begins as zeros, or as the store's last commit.
  Executor(gpu::Device& device, const UnitModel& model, Plan plan, ExecutorOptions options = {});
  ~Executor() override;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  [[nodiscard]] const Plan& plan() const noexcept;

  /// With several ranks all of them make the same calls, but for read_state and write_state, which
  /// are of this rank's shard, and get the same results. `micro_batches` are this rank's own.
  ///
  /// A whole optimizer step: the deferred updates of the step before, forward and backward of all
  /// micro-batches, and by the gradient's norm the coefficient min(1, max_grad_norm / (norm +
  /// 1e-6)), as torch.nn.utils.clip_grad_norm_ has it. Deferred updates by this gradient run ahead
  /// of the next forward pass, or in finish_update(); speculated ones hold from the next commit(),
  /// which every other call makes where it was left out.
  StepResult train_step(std::span<const HostMicroBatch> micro_batches, float loss_scale,
                        const OptimizerRule& rule);
  /// Runs the pending deferred updates now, if there are any. Needed before state is read.
  void finish_update() override;
  /// Makes what is on NVMe durable as of now, with `metadata` to say what it is. Everything that a
  /// run needs to go on is there if is_durable(plan().placement). Nothing without a store.
  void commit(std::span<const std::byte> metadata);
  /// That was given to the last commit of the store; empty without one.
  [[nodiscard]] std::span<const std::byte> metadata() const;
  /// The records on NVMe, or null where the plan has none.
  [[nodiscard]] const NvmeTier* nvme() const noexcept;

  /// Sum of the losses of unmasked tokens of all ranks; runs the pending updates before.
  double evaluate(std::span<const HostMicroBatch> micro_batches);
  /// Logits [vocabulary] of one row of one micro-batch; runs the pending updates before.
  void logits(const HostMicroBatch& micro_batch, int64_t row, std::span<float> out);

  // See StateAccess: of this rank's shard. Reading and writing run the pending updates before.
  [[nodiscard]] ElementRange shard(int unit) const override;
  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out) override;
  void write_state(int unit, StateKind kind, size_t offset_bytes,
                   std::span<const std::byte> data) override;
  [[nodiscard]] size_t state_size_bytes(int unit, StateKind kind) const override;
  [[nodiscard]] cpu_adam::MomentFormat moments() const noexcept override {
    return plan().placement.moments;
  }

  /// What runs now. From any thread, at any time.
  [[nodiscard]] Activity activity() const;

  /// When the tasks of the last train_step's graph ran (replays are not part of it).
  [[nodiscard]] const Timeline& timeline() const noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata::pipeline
