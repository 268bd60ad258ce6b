#include "pipeline/classic_layout.h"

#include "catch.h"

namespace strata::pipeline {
namespace {

constexpr double kGB = 1e9;

/// 7e9 parameters in blocks of Llama 2 7B's size: 4 H^2 + 3 H I + 2 H.
constexpr ClassicModel kSevenB{
    .parameters = 7'000'000'000,
    .largest_block = 4 * 4096 * 4096 + 3 * int64_t{4096} * 11008 + 2 * 4096};

}  // namespace

TEST_CASE("7e9 parameters on 32 ranks take what the literature says") {
  const ClassicMemory plain = classic_memory(kSevenB, ZeroStage::kNone, 32);
  CHECK(plain.total_bytes() == 140 * kGB);
  CHECK(plain.optimizer_bytes == 84 * kGB);
  CHECK(plain.gradient_bytes == 42 * kGB);
  CHECK(plain.weight_bytes == 14 * kGB);

  const ClassicMemory one = classic_memory(kSevenB, ZeroStage::kOptimizer, 32);
  CHECK(one.optimizer_bytes == Approx(2.6 * kGB).epsilon(0.02));
  CHECK(one.total_bytes() == 84 * kGB / 32 + 56 * kGB);
  const ClassicMemory two = classic_memory(kSevenB, ZeroStage::kGradients, 32);
  CHECK(two.gradient_bytes == Approx(1.3 * kGB).epsilon(0.02));
  CHECK(two.total_bytes() == 126 * kGB / 32 + 14 * kGB);
  const ClassicMemory three = classic_memory(kSevenB, ZeroStage::kWeights, 32);
  CHECK(three.state_bytes() == Approx(4.4 * kGB).epsilon(0.01));
  CHECK(three.transient_bytes == Approx(0.8 * kGB).epsilon(0.02));
  CHECK(three.total_bytes() == Approx(5 * kGB).epsilon(0.05));
  CHECK(three.state_bytes() == 140 * kGB / 32);
}

TEST_CASE("classic traffic is 2N(D-1)/D a pass, and passes grow with micro-batches") {
  const double pass = 2 * 7e9 * 31 / 32;
  const ClassicTraffic three = classic_traffic(kSevenB, ZeroStage::kWeights, 32, 1);
  CHECK(three.gather_forward_bytes == pass);
  CHECK(three.gather_backward_bytes == pass);
  CHECK(three.reduce_bytes == pass);
  CHECK(three.total_bytes() == 3 * pass);
  CHECK(classic_traffic(kSevenB, ZeroStage::kWeights, 32, 8).total_bytes() == 24 * pass);
  CHECK(classic_traffic(kSevenB, ZeroStage::kGradients, 32, 8).total_bytes() == 9 * pass);
  CHECK(classic_traffic(kSevenB, ZeroStage::kOptimizer, 32, 8).total_bytes() == 2 * pass);
  CHECK(classic_traffic(kSevenB, ZeroStage::kNone, 32, 8).total_bytes() == 2 * pass);
}

TEST_CASE("one rank has all of it at every stage and sends nothing") {
  for (const ZeroStage stage : kZeroStages) {
    CHECK(classic_memory(kSevenB, stage, 1).total_bytes() == 140 * kGB);
    CHECK(classic_traffic(kSevenB, stage, 1, 4).total_bytes() == 0);
  }
}

}  // namespace strata::pipeline
