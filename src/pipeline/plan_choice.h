// What the planner searches: a placement as a few numbers, and the steps from one to others.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "pipeline/planner.h"

namespace strata::pipeline {

/// The numbers. Inner units are those between the first and the last.
enum class Coordinate : uint8_t {
  kSlots,
  kHostSlots,
  kActivationSlots,
  kPart,        // index of ChoiceSpace::part_elements
  kBoundaries,  // a Tier
  kSavedTier,   // a Tier
  kFirst,       // index of end_placements()
  kLast,        // likewise
  kOrder,       // an Order
  // From here on, of inner units:
  kDevice,  // so many rest on the device
  kHost,    // so many in host memory; the others have their optimizer's state on NVMe
  // so many of all inner units' number are speculated, of those on NVMe that part:
  kSpeculated,
  kWeightHost,
  kGradientHost,
  kResident,  // likewise of those not on the device, or of all where ranks gather them
  kSavedAll,
  kSavedAttention,
};
inline constexpr size_t kCoordinates = 17;
inline constexpr size_t kFirstCount = static_cast<size_t>(Coordinate::kDevice);

/// In which order of layers the inner units that are not on the device have their homes. Layers
/// come early in forward and late in backward.
enum class Order : uint8_t {
  kSpread,           // evenly
  kHostFirst,        // host, deferred on NVMe, speculated
  kSpeculatedFirst,  // speculated, host, deferred on NVMe
  kHostLast,         // deferred on NVMe, speculated, host
};

struct Choice {
  std::array<int, kCoordinates> values{};

  [[nodiscard]] int operator[](Coordinate c) const { return values[static_cast<size_t>(c)]; }
  [[nodiscard]] int& operator[](Coordinate c) { return values[static_cast<size_t>(c)]; }
  friend auto operator<=>(const Choice&, const Choice&) = default;
};

/// Placements of the first and of the last unit.
[[nodiscard]] const std::vector<UnitPlacement>& end_placements();

/// The choices that a request leaves.
class ChoiceSpace {
 public:
  ChoiceSpace(const UnitModel& model, const PlanRequest& request);

  [[nodiscard]] int inner() const noexcept { return inner_; }
  /// Everything that can be there on one tier, with the least memory besides; nothing where the
  /// request excludes it.
  [[nodiscard]] std::vector<Choice> seeds() const;
  [[nodiscard]] Placement placement(const Choice& choice) const;
  /// Calls `visit` with each choice a step away, for which numbers of units change by `scale`.
  void neighbours(const Choice& choice, int scale,
                  const std::function<void(const Choice&)>& visit) const;

 private:
  struct Range {
    std::vector<int> values;  // of a coordinate that is no number of units
    int least = 0, most = 0;  // of one that is
  };
  /// Units whose weight may stay on the device from forward to backward, of which so many rest
  /// there.
  [[nodiscard]] int brought(int device) const { return gathers_ ? inner_ : inner_ - device; }
  [[nodiscard]] bool is_count(size_t coordinate) const { return coordinate >= kFirstCount; }
  /// Within the ranges; what has no effect is 0, so that equal placements are equal choices.
  [[nodiscard]] Choice normal(Choice choice) const;

  PlanRequest request_;
  int inner_;
  bool nvme_;     // for anything
  bool gathers_;  // ranks gather weights for each pass
  // Homes of the optimizer's state that may be chosen.
  bool device_allowed_ = false, host_allowed_ = false, nvme_allowed_ = false;
  std::vector<int64_t> part_elements_;
  std::array<Range, kCoordinates> ranges_;
};

}  // namespace strata::pipeline
