// Runs the graphs of a plan: owns the arenas, the lanes and the state in them.
//
// One thread at a time may call an Executor; it is the dispatcher. Device lanes are streams ordered
// by events, the cpu lane is a thread of the executor's own. Calls block until their graph has
// ended. Nothing is allocated in a step. The first error of any lane ends the graph, cancels what
// has not begun, and is thrown; the state is then undefined and the executor only good for
// destruction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu_adam/adam.h"
#include "gpu/device.h"
#include "pipeline/step_graph.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// One micro-batch in ordinary memory; see MicroBatch. Spans have exactly the plan's `tokens`.
struct HostMicroBatch {
  std::span<const int32_t> token_ids;
  std::span<const int32_t> targets;
  std::span<const int32_t> positions;
  std::span<const int32_t> sequence_offsets;  // at most the plan's max_sequences + 1
};

struct ForwardBackwardResult {
  double loss_sum = 0;  // over unmasked tokens
  double sum_of_squares =
      0;  // of the whole gradient, scaled by loss_scale; not finite if it is not
};

class Executor {
 public:
  /// Allocates the arenas. `model` and `device` must outlive the executor. `cpu_threads` are those
  /// of the optimizer on the cpu lane; 0: one for each core.
  Executor(gpu::Device& device, const UnitModel& model, Plan plan, int cpu_threads);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  [[nodiscard]] const Plan& plan() const noexcept;

  /// Forward and backward of all micro-batches, ahead of which the pending update runs, if any. The
  /// finished gradients stay at home for the next update.
  ForwardBackwardResult forward_backward(std::span<const HostMicroBatch> micro_batches,
                                         float loss_scale);
  /// Makes the optimizer's step by the present gradients pending. It runs ahead of the next forward
  /// pass, or in finish_update().
  void set_pending_update(const cpu_adam::StepConstants& constants);
  /// Runs the pending update now, if there is one. Needed before state is read.
  void finish_update();
  /// Sum of the losses of unmasked tokens; runs the pending update before.
  double evaluate(std::span<const HostMicroBatch> micro_batches);
  /// Logits [vocabulary] of one row of one micro-batch; runs the pending update before.
  void logits(const HostMicroBatch& micro_batch, int64_t row, std::span<float> out);

  /// Copies bytes of one unit's state of one kind from or to its home; runs the pending update
  /// before.
  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out);
  void write_state(int unit, StateKind kind, size_t offset_bytes, std::span<const std::byte> data);
  /// Bytes of one unit's state of one kind; 0 where the placement keeps none.
  [[nodiscard]] size_t state_size_bytes(int unit, StateKind kind) const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata::pipeline
