// The step graph: all tasks of an optimizer step on their lanes, and the buffers that each reads
// and writes. The executor runs it, the simulator plays it, the ledger adds up its buffers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/placement.h"

namespace strata::pipeline {

/// What works in order. kCollective is what ranks send each other. The last three share the drives:
/// weights and activations that compute waits for are read first, then the optimizer's state, and
/// what remains is for writing.
enum class Lane : uint8_t {
  kUpload,
  kCompute,
  kDownload,
  kCollective,
  kCpu,
  kReadWeight,
  kReadState,
  kWrite
};
inline constexpr size_t kLanes = 8;
inline constexpr std::array kAllLanes{Lane::kUpload,     Lane::kCompute, Lane::kDownload,
                                      Lane::kCollective, Lane::kCpu,     Lane::kReadWeight,
                                      Lane::kReadState,  Lane::kWrite};
[[nodiscard]] std::string_view name_of(Lane lane) noexcept;
[[nodiscard]] constexpr bool is_device_lane(Lane lane) noexcept {
  return lane <= Lane::kCollective;
}
[[nodiscard]] constexpr bool is_disk_lane(Lane lane) noexcept { return lane >= Lane::kReadWeight; }

enum class TaskKind : uint8_t {
  kUploadBatch,
  kUploadWeight,  // a part
  kUploadActivation,
  kClearScalars,
  kForward,
  kBackward,
  kLoss,
  kRoundGradient,   // to the type that it is summed over ranks in
  kReduceGradient,  // over ranks; what remains is this rank's shard
  kFinishGradient,
  kDownloadGradient,  // a part
  kDownloadActivation,
  kGatherScalars,  // of all ranks
  kDownloadScalars,
  kGatherWeight,  // of the shard group's ranks, into the place of the whole
  kAdam,          // a part, or a unit on the device
  kReadState,     // a part of the kinds in Task::kinds, into Task::slot
  kWriteState,    // likewise, out of it
  kReadActivation,
  kWriteActivation,
};
inline constexpr size_t kTaskKinds = 20;
[[nodiscard]] std::string_view name_of(TaskKind kind) noexcept;

enum class Purpose : uint8_t {
  kWeights,
  kOptimizerState,
  kGradients,
  kSlots,
  kAccumulators,
  kBoundaries,
  kSavedActivations,
  kWorkspace,
  kBatches,
  kConstants,
};
inline constexpr size_t kPurposes = 10;
[[nodiscard]] std::string_view name_of(Purpose purpose) noexcept;

using BufferId = int32_t;
using TaskId = int32_t;
inline constexpr BufferId kNoBuffer = -1;

inline constexpr size_t kBufferAlignment = 64;
/// Of memory that drives read and write.
inline constexpr size_t kDriveAlignment = 4096;

/// A piece of memory, or (on NVMe) a record of the store.
struct Buffer {
  std::string name;
  Tier tier = Tier::kDevice;
  Purpose purpose = Purpose::kWorkspace;
  size_t size_bytes = 0;
  size_t offset_bytes = 0;  // in its tier's arena, given by the ledger
  int parts = 1;            // that tasks may use without waiting for each other
  size_t alignment_bytes = kBufferAlignment;
  bool two_slots = false;  // on NVMe: what is written does not replace what is committed
};

/// A buffer, or one part of it, that a task reads or writes.
struct Use {
  static constexpr int kWhole = -1;
  BufferId buffer = kNoBuffer;
  int part = kWhole;
  friend bool operator==(const Use&, const Use&) = default;
};

/// Which of the state kinds, as bits.
using KindSet = uint8_t;
[[nodiscard]] constexpr KindSet kind_bit(StateKind kind) noexcept {
  return static_cast<KindSet>(1U << static_cast<unsigned>(kind));
}
[[nodiscard]] constexpr bool contains(KindSet set, StateKind kind) noexcept {
  return (set & kind_bit(kind)) != 0;
}

/// Host memory through which a part passes between NVMe and its use; kNoBuffer for kinds that never
/// do.
using StateSlot = std::array<BufferId, kStateKinds>;

/// One piece of work on one lane.
struct Task {
  TaskKind kind = TaskKind::kForward;
  Lane lane = Lane::kCompute;
  int unit = -1;
  int micro_batch = -1;
  int part = Use::kWhole;
  BufferId weight =
      kNoBuffer;  // on the device: what compute reads; destination of uploads, gathers
  BufferId shared_weight = kNoBuffer;
  BufferId accumulator = kNoBuffer;  // fp32 gradient
  BufferId shared_accumulator = kNoBuffer;
  BufferId gradient = kNoBuffer;  // on the device: the finished gradient; source of downloads
  BufferId input = kNoBuffer;     // on the device: boundary before the unit
  BufferId output = kNoBuffer;    // on the device: boundary after it
  BufferId saved = kNoBuffer;     // on the device: saved activations
  SavedActivations level = SavedActivations::kNone;
  /// Of moves of activations and parts: both ends where they are not a state's home.
  BufferId source = kNoBuffer;
  BufferId destination = kNoBuffer;
  /// Over the lane; of collectives what this rank sends, of kAdam what it reads and writes in
  /// memory.
  size_t moved_bytes = 0;
  KindSet kinds = 0;
  StateSlot slot{kNoBuffer, kNoBuffer, kNoBuffer, kNoBuffer, kNoBuffer};  // used instead of homes
  bool speculated = false;  // of kAdam and kWriteState: what is made is not yet what holds
  bool accumulate = false;
  bool accumulate_shared = false;
  bool with_backward = false;  // of kLoss
  std::vector<Use> reads{};
  std::vector<Use> writes{};
  /// Tasks of other lanes that must have ended before. Lanes begin their tasks in order; those of
  /// the disk may end out of order, and then are named here too.
  std::vector<TaskId> after{};
};

/// Tasks in the order in which each lane takes them.
using StepGraph = std::vector<Task>;

/// Adds tasks to a graph and derives their order from what they read and write: a task runs after
/// the last writer of what it reads, and after the last writer and all readers since of what it
/// writes.
class GraphBuilder {
 public:
  explicit GraphBuilder(const std::vector<Buffer>& buffers);
  void add(Task task);
  [[nodiscard]] StepGraph take() { return std::move(graph_); }

 private:
  struct PartUse {
    TaskId writer = -1;
    std::vector<TaskId> readers;
  };
  StepGraph graph_;
  std::vector<std::vector<PartUse>> uses_;  // [buffer][part]
};

/// The first two tasks of a graph that touch one buffer, one of them writing, with no order between
/// them; empty if there are none. Independent of how the builder derives `after`.
[[nodiscard]] std::string find_race(const StepGraph& graph, const std::vector<Buffer>& buffers);

}  // namespace strata::pipeline
