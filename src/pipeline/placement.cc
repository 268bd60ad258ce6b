#include "pipeline/placement.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace strata::pipeline {

std::string_view name_of(Tier tier) noexcept {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kNvme:
      return "nvme";
  }
  return "?";
}

std::string_view name_of(StateKind kind) noexcept {
  switch (kind) {
    case StateKind::kWeight:
      return "weight";
    case StateKind::kResidual:
      return "residual";
    case StateKind::kMoment1:
      return "moment1";
    case StateKind::kMoment2:
      return "moment2";
    case StateKind::kGradient:
      return "gradient";
  }
  return "?";
}

std::string_view name_of(Update update) noexcept {
  return update == Update::kDeferred ? "deferred" : "speculated";
}

size_t state_bytes(StateKind kind, int64_t count, DType dtype,
                   cpu_adam::MomentFormat moments) noexcept {
  const auto n = static_cast<size_t>(count);
  switch (kind) {
    case StateKind::kWeight:
    case StateKind::kGradient:
      return n * size_of(dtype);
    case StateKind::kResidual:
      return dtype == DType::kBf16 ? n * 2 : 0;
    case StateKind::kMoment1:
    case StateKind::kMoment2:
      return cpu_adam::moment_bytes(moments, count);
  }
  return 0;
}

UnitPlacement UnitPlacement::all_on(Tier tier) {
  return {.weight = tier, .gradient = tier, .optimizer = tier};
}

Placement Placement::all_on(Tier tier, size_t units, int slots) {
  return {.units = std::vector<UnitPlacement>(units, UnitPlacement::all_on(tier)), .slots = slots};
}

bool is_durable(const Placement& placement) noexcept {
  return placement.training &&
         std::all_of(placement.units.begin(), placement.units.end(), [](const UnitPlacement& unit) {
           return unit.weight == Tier::kNvme && unit.optimizer == Tier::kNvme &&
                  unit.update == Update::kSpeculated;
         });
}

void check(const Placement& placement, size_t units) {
  STRATA_CHECK(placement.units.size() == units, "a placement for each unit");
  const auto refuse = [](size_t unit, std::string_view what) {
    throw usage_error(fmt::format("placement of unit {}: {}", unit, what));
  };
  for (size_t i = 0; i < units; ++i) {
    const UnitPlacement& unit = placement.units[i];
    if (unit.optimizer != Tier::kNvme &&
        (unit.weight != unit.optimizer || unit.gradient != unit.optimizer)) {
      refuse(i, "with the optimizer's state on device or host, weight and gradient rest there too");
    }
    if (unit.optimizer == Tier::kNvme &&
        (unit.weight == Tier::kDevice || unit.gradient == Tier::kDevice)) {
      refuse(i, "with the optimizer's state on nvme, weight and gradient rest on host or nvme");
    }
    if (unit.update == Update::kSpeculated && unit.optimizer != Tier::kNvme) {
      refuse(i, "only state on nvme keeps the second copy that a speculated update needs");
    }
    if (unit.resident_weight && unit.weight == Tier::kDevice && placement.ranks.shard_ranks == 1) {
      refuse(i, "a weight that rests on the device needs no resident copy");
    }
  }
  if (!placement.training && placement.ranks.ranks > 1) {
    throw usage_error("evaluating without training is for one rank");
  }
  if (placement.slots < 1 || placement.host_slots < 1 || placement.activation_slots < 1) {
    throw usage_error("a placement has at least one slot of each kind");
  }
  if (placement.part_elements < 0 || placement.part_elements % cpu_adam::kChunkElements != 0) {
    throw usage_error(fmt::format("part_elements is {}; it must be a multiple of {}",
                                  placement.part_elements, cpu_adam::kChunkElements));
  }
}

std::string describe(const UnitPlacement& unit) {
  std::string text;
  if (unit.optimizer != Tier::kNvme) {
    text = name_of(unit.optimizer);
  } else {
    text = fmt::format("optimizer nvme ({}), weight {}, gradient {}", name_of(unit.update),
                       name_of(unit.weight), name_of(unit.gradient));
  }
  if (unit.resident_weight) text += ", resident weight";
  if (unit.saved != SavedActivations::kNone) {
    text += fmt::format(", keeps {}", name_of(unit.saved));
  }
  return text;
}

}  // namespace strata::pipeline
