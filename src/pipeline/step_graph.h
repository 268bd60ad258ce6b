// The step graph: all tasks of an optimizer step on their lanes, and the buffers that each reads
// and writes. One builder makes it from a model, a shape and a placement; the ledger adds up its
// buffers and the executor runs its tasks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/unit_model.h"

namespace strata::pipeline {

enum class Tier : uint8_t { kDevice, kHost };
inline constexpr std::array kTiers{Tier::kDevice, Tier::kHost};
[[nodiscard]] std::string_view name_of(Tier tier) noexcept;

enum class StateKind : uint8_t { kWeight, kResidual, kMoment1, kMoment2, kGradient };
inline constexpr size_t kStateKinds = 5;
[[nodiscard]] std::string_view name_of(StateKind kind) noexcept;

/// Bytes of one parameter's state of `kind` at rest, with weights of `dtype`: the split master with
/// kBf16 (2 + 2 + 4 + 4, and 2 for the gradient), an fp32 master in the reference mode.
[[nodiscard]] size_t state_bytes(StateKind kind, DType dtype) noexcept;

/// Where state rests between uses, and how many slots it passes through.
struct Placement {
  std::vector<Tier> unit_home;  // of all state kinds of each unit
  int slots = 2;                // weights in, and gradients out, of host-homed units
  bool training = true;         // false: weights alone, for evaluation and generation

  [[nodiscard]] static Placement all_on(Tier tier, size_t units, int slots = 2);
};

enum class Lane : uint8_t { kUpload, kCompute, kDownload, kCpu };
inline constexpr size_t kLanes = 4;
[[nodiscard]] std::string_view name_of(Lane lane) noexcept;

enum class TaskKind : uint8_t {
  kUploadBatch,
  kUploadWeight,
  kClearScalars,
  kForward,
  kBackward,
  kLoss,
  kFinishGradient,
  kDownloadGradient,
  kDownloadScalars,
  kAdam,
};
[[nodiscard]] std::string_view name_of(TaskKind kind) noexcept;

enum class Purpose : uint8_t {
  kWeights,
  kOptimizerState,
  kGradients,
  kSlots,
  kAccumulators,
  kBoundaries,
  kWorkspace,
  kBatches,
  kConstants,
};
inline constexpr size_t kPurposes = 9;
[[nodiscard]] std::string_view name_of(Purpose purpose) noexcept;

using BufferId = int32_t;
using TaskId = int32_t;
inline constexpr BufferId kNoBuffer = -1;

struct Buffer {
  std::string name;
  Tier tier = Tier::kDevice;
  Purpose purpose = Purpose::kWorkspace;
  size_t size_bytes = 0;
  size_t offset_bytes = 0;  // in its tier's arena, given by the ledger
};

/// One piece of work on one lane. Which of the named buffers a kind uses is told beside each.
struct Task {
  TaskKind kind = TaskKind::kForward;
  Lane lane = Lane::kCompute;
  int unit = -1;
  int micro_batch = -1;
  BufferId weight = kNoBuffer;         // home or slot that compute reads; destination of uploads
  BufferId shared_weight = kNoBuffer;  //
  BufferId accumulator = kNoBuffer;    // fp32 gradient
  BufferId shared_accumulator = kNoBuffer;
  BufferId gradient = kNoBuffer;  // finished gradient: on the device, source of downloads
  bool accumulate = false;
  bool accumulate_shared = false;
  bool with_backward = false;  // of kLoss
  std::vector<BufferId> reads{};
  std::vector<BufferId> writes{};
  /// Tasks of other lanes that must have ended before, at most the last one of each lane: the lanes
  /// themselves work in order.
  std::vector<TaskId> after{};
};

/// Tasks in the order in which each lane takes them.
using StepGraph = std::vector<Task>;

/// Where everything lies that the graphs name.
struct Buffers {
  std::vector<Buffer> all;
  std::vector<std::array<BufferId, kStateKinds>> home;  // [unit][kind]
  std::vector<BufferId> batch, staged_batch;            // [micro-batch], device and host
  std::vector<std::vector<BufferId>> boundary;          // [unit][micro-batch], after the unit
  std::vector<BufferId> boundary_gradient;              // [micro-batch]
  BufferId workspace = kNoBuffer, constants = kNoBuffer;
  BufferId logits = kNoBuffer;   // [vocabulary] fp32, where there is no training
  BufferId staging = kNoBuffer;  // host: through which device-homed state is read and written
  BufferId scalars = kNoBuffer,
           host_scalars = kNoBuffer;  // doubles: loss_sum, then one norm a unit
};

struct Plan {
  StepShape shape;
  Placement placement;
  Buffers buffers;
  std::array<size_t, kTiers.size()> arena_bytes{};
  StepGraph train;     // the pending update, forward, backward, the finished gradients
  StepGraph update;    // the pending update alone
  StepGraph evaluate;  // forward and loss

  [[nodiscard]] size_t bytes(Tier tier) const noexcept {
    return arena_bytes[static_cast<size_t>(tier)];
  }
  /// Bytes of one tier by purpose, padding of each buffer included.
  [[nodiscard]] std::array<size_t, kPurposes> bytes_by_purpose(Tier tier) const;
};

/// State of device-homed units is read and written in pieces of this size.
inline constexpr size_t kStagingBytes = size_t{1} << 20;

/// Every buffer begins at a multiple of this many bytes in its arena.
inline constexpr size_t kBufferAlignment = 64;

/// Layer-major step: each unit's weight comes once, meets every micro-batch, and goes. Update tasks
/// are deferred: the graph begins with the update by the gradients of the step before, unit 0
/// first, so that it runs in the shadow of the forward pass once the gradient norm is known.
[[nodiscard]] Plan build_plan(const UnitModel& model, const gpu::Operators& operators,
                              const StepShape& shape, const Placement& placement);

/// The fastest placement within `device_bytes`: as many units as fit have their state on the device
/// (first and last units first), the rest in host memory. Throws an Error of kind kDoesNotFit that
/// names what is needed where even the smallest does not fit.
[[nodiscard]] Plan choose_plan(const UnitModel& model, const gpu::Operators& operators,
                               const StepShape& shape, int slots, bool training,
                               size_t device_bytes, size_t host_bytes);

/// The first two tasks of a graph that touch one buffer, one of them writing, with no order between
/// them; empty if there are none. Independent of how the builder derives `after`.
[[nodiscard]] std::string find_race(const StepGraph& graph, const Buffers& buffers);

}  // namespace strata::pipeline
