// Where state lives never changes what is learned on a CUDA device either, and what is learned is
// what the host device learns.

#include <cmath>

#include "catch.h"
#include "gpu/cuda_test_device.h"
#include "gpu/host/host_device.h"
#include "model/small_run.h"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::Tier;
using pipeline::UnitPlacement;

constexpr int kSteps = 4;

/// Two blocks, for each is some seconds on the emulator.
LlamaConfig shallow_config(bool tied) {
  LlamaConfig config = small_config(tied);
  config.num_hidden_layers = 2;
  return config;
}

/// Steps differ by less than `tolerance` of the loss. Products are summed in another order, and in
/// bf16 a sum on the edge between two numbers falls to either.
void check_losses(const Trajectory& run, const Trajectory& host, double tolerance) {
  REQUIRE(run.losses.size() == host.losses.size());
  for (size_t step = 0; step < run.losses.size(); ++step) {
    CHECK(std::abs(run.losses[step] - host.losses[step]) <= tolerance * host.losses[step]);
    CHECK(std::abs(run.norms[step] - host.norms[step]) <= 4 * tolerance * host.norms[step]);
  }
}

}  // namespace

TEST_CASE("cuda: placements and slots give the same bits, near those of the host", "[cuda]") {
  const auto device = gpu::open_test_device();
  if (!device) return;
  const bool tied = GENERATE(false, true);
  const LlamaConfig config = shallow_config(tied);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const auto run = [&](const Placement& placement) {
    return train_small(*device, config, placement, kSteps, 2);
  };
  const Trajectory resident = run(Placement::all_on(Tier::kDevice, units));
  REQUIRE(std::isfinite(resident.losses.back()));
  REQUIRE(resident.eval_losses.size() == 1);
  check_losses(resident,
               train_small(*gpu::create_host_device({.threads = 2}), config,
                           Placement::all_on(Tier::kDevice, units), kSteps, 2),
               0x1p-8);
  INFO("tied " << tied);
  CHECK(run(Placement::all_on(Tier::kHost, units, tied ? 3 : 1)) == resident);
  Placement mixed = Placement::all_on(Tier::kHost, units, 2);
  mixed.units[0] = mixed.units[2] = UnitPlacement::all_on(Tier::kDevice);
  CHECK(run(mixed) == resident);
}

TEST_CASE("cuda: the fp32 reference mode agrees with the host's", "[cuda]") {
  const auto device = gpu::open_test_device();
  if (!device) return;
  const LlamaConfig config = shallow_config(false);
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const auto run = [&](gpu::Device& on) {
    return train_small(on, config, Placement::all_on(Tier::kHost, units, 2), 2, 2, DType::kF32);
  };
  check_losses(run(*device), run(*gpu::create_host_device({.threads = 2})), 1e-5);
}

TEST_CASE("cuda: heads of 64 and more, by the fast attention", "[cuda]") {
  const auto device = gpu::open_test_device();
  if (!device) return;
  LlamaConfig config = shallow_config(false);
  config.head_dim = GENERATE(64, 128);
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  const size_t units = static_cast<size_t>(config.num_hidden_layers) + 2;
  const auto run = [&](gpu::Device& on, Tier home) {
    return train_small(on, config, Placement::all_on(home, units, 1), 2, 2);
  };
  const Trajectory resident = run(*device, Tier::kDevice);
  CHECK(run(*device, Tier::kHost) == resident);
  check_losses(resident, run(*gpu::create_host_device({.threads = 2}), Tier::kDevice), 0x1p-8);
}

}  // namespace strata::model
