// Where each kind of state of each unit rests, and how it gets to where it is used: what a plan is
// built from and a planner chooses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "cpu_adam/moments.h"
#include "pipeline/sharding.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

enum class Tier : uint8_t { kDevice, kHost, kNvme };
inline constexpr std::array kTiers{Tier::kDevice, Tier::kHost, Tier::kNvme};
[[nodiscard]] std::string_view name_of(Tier tier) noexcept;

enum class StateKind : uint8_t { kWeight, kResidual, kMoment1, kMoment2, kGradient };
inline constexpr size_t kStateKinds = 5;
[[nodiscard]] std::string_view name_of(StateKind kind) noexcept;

/// Bytes of `count` parameters' state of `kind` at rest, with weights of `dtype`: the split master
/// with kBf16 (2 + 2, and 2 for the gradient), an fp32 master in the reference mode; two moments in
/// their format (4 + 4 with kF32).
[[nodiscard]] size_t state_bytes(StateKind kind, int64_t count, DType dtype,
                                 cpu_adam::MomentFormat moments) noexcept;

/// When a unit's optimizer step runs; both are exact.
enum class Update : uint8_t {
  /// At the head of the next step, when the gradient's norm is known: in the shadow of the forward
  /// pass. In place.
  kDeferred,
  /// As the gradient arrives, as if nothing were to be clipped, beside the old state; if the norm
  /// then asks for clipping, the new state is thrown away and made again from the old. For state
  /// on NVMe, which keeps two slots.
  kSpeculated,
};
[[nodiscard]] std::string_view name_of(Update update) noexcept;

/// The homes of one unit. What goes together:
///   optimizer   weight        gradient      update
///   device      device        device        deferred, on the device
///   host        host          host          deferred, on CPU threads
///   nvme        host or nvme  host or nvme  deferred or speculated, on CPU threads
struct UnitPlacement {
  Tier weight = Tier::kDevice;
  Tier gradient = Tier::kDevice;
  Tier optimizer = Tier::kDevice;  // residual and moments
  Update update = Update::kDeferred;
  /// The device keeps a copy of a weight that is homed elsewhere, or of which it is home to a
  /// shard, from forward to backward, in a buffer of the unit's own: one upload and gather a step
  /// instead of two.
  bool resident_weight = false;
  SavedActivations saved = SavedActivations::kNone;

  [[nodiscard]] static UnitPlacement all_on(Tier tier);
  friend bool operator==(const UnitPlacement&, const UnitPlacement&) = default;
};

struct Placement {
  std::vector<UnitPlacement> units;
  Tier boundaries = Tier::kDevice;         // between a unit's forward and its backward
  Tier saved_activations = Tier::kDevice;  // likewise
  int slots = 2;  // on the device: weights in, and gradients out, of units homed elsewhere
  int activation_slots = 2;  // on the device, where activations are homed elsewhere: how many of
                             // each kind beyond the boundaries that a unit hands to the next
  int host_slots = 2;  // parts of each kind of traffic between NVMe and the device or the optimizer
  /// Units that do not rest on the device move, and are updated, in parts of so many parameters: a
  /// multiple of cpu_adam::kChunkElements; 0: a unit is one part.
  int64_t part_elements = 0;
  RankLayout ranks{};    // what is homed is this rank's shard
  bool training = true;  // false: weights alone, for evaluation and generation
  /// Whether steps may be clipped. Without, gradients of speculated units are not kept.
  bool clipping = true;
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;

  [[nodiscard]] static Placement all_on(Tier tier, size_t units, int slots = 2);
};

/// Whether all that training changes is on NVMe in two slots, so that each step can be committed.
[[nodiscard]] bool is_durable(const Placement& placement) noexcept;

/// Throws a usage error that says what does not go together.
void check(const Placement& placement, size_t units);

/// One line: "host", "optimizer nvme (speculated), weight host, gradient host, resident".
[[nodiscard]] std::string describe(const UnitPlacement& unit);

}  // namespace strata::pipeline
