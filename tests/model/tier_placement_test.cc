// Homes in three tiers, slots, parts, speculation and saved activations: the same bits.

#include <fmt/format.h>

#include "catch.h"
#include "gpu/host/host_device.h"
#include "model/small_run.h"
#include "temporary_directory.h"
#include "trials.h"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::SavedActivations;
using pipeline::Tier;
using pipeline::UnitPlacement;
using pipeline::Update;

// With 13, too, there are clipped ones and the one with an infinite gradient.
constexpr int kSteps = trials(20, 13);

UnitPlacement on_nvme(Update update, Tier weight, Tier gradient) {
  return {.weight = weight, .gradient = gradient, .optimizer = Tier::kNvme, .update = update};
}

struct Case {
  std::string name;
  Placement placement;
};

Placement uniform(const UnitPlacement& unit, size_t units, int slots, int64_t part_elements = 0) {
  return {.units = std::vector<UnitPlacement>(units, unit),
          .slots = slots,
          .activation_slots = slots,
          .host_slots = slots,
          .part_elements = part_elements};
}

/// All combinations worth having.
std::vector<Case> cases(size_t units) {
  std::vector<Case> all;
  const auto add = [&](std::string name, Placement placement) {
    all.push_back({std::move(name), std::move(placement)});
  };
  const UnitPlacement host = UnitPlacement::all_on(Tier::kHost);
  for (int slots = 1; slots <= 4; ++slots) {
    add(fmt::format("host, {} slots", slots), uniform(host, units, slots));
  }
  add("host in parts", uniform(host, units, 2, 32768));
  for (const Update update : {Update::kDeferred, Update::kSpeculated}) {
    for (const Tier weight : {Tier::kHost, Tier::kNvme}) {
      for (const Tier gradient : {Tier::kHost, Tier::kNvme}) {
        const int slots = 1 + static_cast<int>(all.size()) % 4;
        for (const int64_t part : {0, 32768}) {
          add(fmt::format("nvme {}, weight {}, gradient {}, {} slots, part {}", name_of(update),
                          name_of(weight), name_of(gradient), slots, part),
              uniform(on_nvme(update, weight, gradient), units, slots, part));
        }
      }
    }
  }
  {
    Placement mixed = uniform(host, units, 2, 32768);
    mixed.units[0] = UnitPlacement::all_on(Tier::kDevice);
    mixed.units[1] = on_nvme(Update::kSpeculated, Tier::kHost, Tier::kHost);
    mixed.units[2] = on_nvme(Update::kDeferred, Tier::kNvme, Tier::kHost);
    mixed.units[3].resident_weight = true;
    add("all tiers at once", mixed);
    mixed.boundaries = Tier::kHost;
    for (UnitPlacement& unit : mixed.units) unit.saved = SavedActivations::kAll;
    mixed.units[2].saved = SavedActivations::kAttention;
    add("all tiers at once, boundaries on host, saved on device", mixed);
    mixed.saved_activations = Tier::kHost;
    add("all tiers at once, boundaries and saved on host", mixed);
    mixed.activation_slots = 1;
    mixed.boundaries = mixed.saved_activations = Tier::kNvme;
    add("all tiers at once, boundaries and saved on nvme, one slot", mixed);
  }
  {
    Placement resident =
        uniform(on_nvme(Update::kSpeculated, Tier::kNvme, Tier::kNvme), units, 1, 32768);
    for (UnitPlacement& unit : resident.units) unit.resident_weight = true;
    resident.boundaries = Tier::kNvme;
    add("nvme speculated, resident weights, boundaries on nvme", resident);
  }
  Placement saved = Placement::all_on(Tier::kDevice, units);
  for (UnitPlacement& unit : saved.units) unit.saved = SavedActivations::kAttention;
  add("device, attention saved", saved);
  for (UnitPlacement& unit : saved.units) unit.saved = SavedActivations::kAll;
  saved.saved_activations = Tier::kHost;
  add("device, all saved on host", saved);
  return all;
}

Trajectory train(const LlamaConfig& config, const Placement& placement,
                 const gpu::HostDeviceOptions& links = {}) {
  const TemporaryDirectory directory;
  gpu::HostDeviceOptions options = links;
  options.threads = 2;
  return train_small(*gpu::create_host_device(options), config, placement, kSteps, 2, DType::kBf16,
                     {.directories = {{.directory = directory.path()}}});
}

}  // namespace

TEST_CASE("every placement in three tiers gives the same bits, step by step") {
  const bool tied = GENERATE(false, true);
  const LlamaConfig config = parted_config(tied);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const Trajectory resident = train(config, Placement::all_on(Tier::kDevice, units));
  REQUIRE(resident.losses.back() < resident.losses.front());
  REQUIRE(resident.clipped > 0);
  REQUIRE(resident.clipped < kSteps);
  REQUIRE(std::count(resident.norms.begin(), resident.norms.end(), -1) == 1);
  const std::vector<Case> all = cases(units);
  REQUIRE(all.size() >= 24);
  for (size_t i = 0; i < all.size(); ++i) {
    // ThreadSanitizer is for what runs at the same time, which placements differ in.
#ifdef __SANITIZE_THREAD__
    const size_t every = tied ? 9 : 1;
#else
    const auto every = static_cast<size_t>(trials(tied ? 3 : 1, tied ? 9 : 3));
#endif
    if (i % every != 0) continue;
    const Case& each = all[i];
    INFO(each.name << ", tied " << tied);
    const Trajectory trajectory = train(config, each.placement);
    CHECK(trajectory == resident);
    const auto& homes = each.placement.units;
    const bool speculates = std::any_of(homes.begin(), homes.end(), [](const UnitPlacement& unit) {
      return unit.update == Update::kSpeculated;
    });
    CHECK(trajectory.replayed == (speculates ? resident.clipped : 0));
  }
}

}  // namespace strata::model
