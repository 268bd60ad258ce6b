// Split and join in vectors: parameters that a step does not move keep their bits.
#include <array>
#include <bit>
#include <cmath>
#include <vector>

#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/split_master_fixture.h"

namespace strata::cpu_adam {
namespace {

TEST_CASE("split masters of every kind survive a step that does not move them") {
  // Each upper half, with lower halves around where the rounding turns.
  constexpr std::array<uint16_t, 10> kLower{0,      1,      0x7ffe, 0x7fff, 0x8000,
                                            0x8001, 0xfffe, 0xffff, 0x1234, 0xabcd};
  std::vector<uint32_t> patterns;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint16_t lower : kLower) patterns.push_back(upper << 16 | lower);
  }
  for (const MomentFormat format : kMomentFormats) {
    for (const DType gradient_dtype : {DType::kBf16, DType::kF32}) {
      CAPTURE(name_of(format), name_of(gradient_dtype));
      StillParameters parameters(patterns.size(), gradient_dtype, format);
      for_each_target([&] { REQUIRE(parameters.count_wrong(patterns) == 0); });
    }
  }
}

}  // namespace
}  // namespace strata::cpu_adam
