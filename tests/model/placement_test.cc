// Where state lives never changes what is learned.

#include "catch.h"
#include "gpu/host/host_device.h"
#include "model/small_run.h"
#include "trials.h"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::Tier;
using pipeline::UnitPlacement;

constexpr int kSteps = trials(20, 13);

Trajectory train(const LlamaConfig& config, const Placement& placement, int threads,
                 const gpu::HostDeviceOptions& links = {}) {
  gpu::HostDeviceOptions options = links;
  options.threads = threads;
  return train_small(*gpu::create_host_device(options), config, placement, kSteps, threads);
}

}  // namespace

TEST_CASE("placements, slots and threads give the same bits, step by step") {
  const bool tied = GENERATE(false, true);
  const LlamaConfig config = small_config(tied);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const Trajectory resident = train(config, Placement::all_on(Tier::kDevice, units), 2);
  REQUIRE(resident.losses.back() < resident.losses.front());
  REQUIRE(resident.clipped > 0);
  REQUIRE(resident.clipped < kSteps);

  for (const int slots : {1, 2, 3}) {
    INFO("tied " << tied << ", slots " << slots);
    CHECK(train(config, Placement::all_on(Tier::kHost, units, slots), 2) == resident);
  }
  Placement mixed = Placement::all_on(Tier::kHost, units, 2);
  mixed.units[0] = mixed.units[3] = mixed.units[units - 1] = UnitPlacement::all_on(Tier::kDevice);
  CHECK(train(config, mixed, 1) == resident);
  // A slow link changes when things happen, not what.
  CHECK(train(config, Placement::all_on(Tier::kHost, units, 1), 3,
              {.upload_bytes_per_second = 40e6, .download_bytes_per_second = 20e6}) == resident);
}

TEST_CASE("moments that round stochastically give the same bits wherever they are, and others") {
  const LlamaConfig config = small_config(false);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const Trajectory exact = train(config, Placement::all_on(Tier::kHost, units, 2), 2);
  for (const cpu_adam::MomentFormat format :
       {cpu_adam::MomentFormat::kBf16, cpu_adam::MomentFormat::kInt8}) {
    INFO("moments " << cpu_adam::name_of(format));
    Placement placement = Placement::all_on(Tier::kDevice, units, 2);
    placement.moments = format;
    const Trajectory resident = train(config, placement, 2);
    CHECK_FALSE(resident == exact);
    CHECK(resident.losses.back() == Approx(exact.losses.back()).epsilon(0.02));
    placement.units.assign(units, UnitPlacement::all_on(Tier::kHost));
    CHECK(train(config, placement, 3) == resident);
    placement.units[0] = placement.units[2] = UnitPlacement::all_on(Tier::kDevice);
    CHECK(train(config, placement, 1) == resident);
  }
}

}  // namespace strata::model
