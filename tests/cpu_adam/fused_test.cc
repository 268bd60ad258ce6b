// The fused multiply-add of every SIMD target against std::fma. Compiled once for each target, as
// adam.cc is.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/fused_test.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "cpu_adam/fused-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::cpu_adam::HWY_NAMESPACE {

/// sums[i] = a[i] * b[i] + c[i], differences[i] = a[i] * b[i] - c[i]; `count` in whole vectors.
void fuse_arrays(const float* a, const float* b, const float* c, float* sums, float* differences,
                 size_t count) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto x = hn::LoadU(d, a + i);
    const auto y = hn::LoadU(d, b + i);
    const auto z = hn::LoadU(d, c + i);
    hn::StoreU(fused(d, x, y, z), d, sums + i);
    hn::StoreU(fused_minus(d, x, y, z), d, differences + i);
  }
}

}  // namespace strata::cpu_adam::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <bit>
#include <cfloat>
#include <cmath>
#include <vector>

#include "catch.h"
#include "cpu_adam/adam_fixture.h"

namespace strata::cpu_adam {
namespace {

HWY_EXPORT(fuse_arrays);

struct Operands {
  std::vector<float> a, b, c;
  void add(float x, float y, float z) {
    a.push_back(x);
    b.push_back(y);
    c.push_back(z);
  }
};

float with_sign(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

/// x * y is within a hair of half a unit in the last place of z, where a double rounding shows.
void add_near_tie(CounterRandom& random, Operands& operands) {
  const auto i = static_cast<double>(random.next_below(6));
  const auto j = static_cast<double>(random.next_below(6)) - 5;
  const int exponent = static_cast<int>(random.next_below(200)) - 110;
  const int half = static_cast<int>(random.next_below(60)) - 30;
  const auto mantissa = static_cast<double>((1U << 23) + random.next_below(1U << 23));
  const auto z = static_cast<float>(std::ldexp(mantissa, exponent - 23));
  const auto x = static_cast<float>(std::ldexp(1 + i * 0x1p-23, half));
  const auto y = static_cast<float>(std::ldexp(1 + j * 0x1p-23, exponent - 24 - half));
  operands.add(with_sign(x, random.next_below(2) == 0), y, with_sign(z, random.next_below(2) == 0));
}

/// z is -x * y, rounded, or a neighbour of that: what is left are the product's last bits.
void add_cancellation(CounterRandom& random, Operands& operands) {
  const float x = random_scale(random, -60, 60);
  const float y = random_scale(random, -60, 60);
  const auto bits = std::bit_cast<uint32_t>(-(x * y));
  const auto away = static_cast<uint32_t>(random.next_below(5)) - 2;
  operands.add(x, y, std::bit_cast<float>(random.next_below(2) == 0 ? bits : bits + away));
}

/// Product and sum are below the normal numbers, or near them.
void add_subnormal(CounterRandom& random, Operands& operands) {
  const float x = random_scale(random, -90, -60);
  const float y = random_scale(random, -90, -60);
  operands.add(x, y, random_scale(random, -149, -120));
}

/// Factors with few bits, so that ties are exact, at every scale and also below 2^-149.
void add_exact_tie(CounterRandom& random, Operands& operands) {
  const auto small = [&] { return static_cast<double>(random.next_below(64)) - 32; };
  const int exponent = random.next_below(2) == 0 ? -150 : static_cast<int>(random.next_below(60));
  const auto x = static_cast<float>(std::ldexp(small(), exponent / 2));
  const auto y = static_cast<float>(std::ldexp(small(), exponent - exponent / 2));
  const auto z_bits = static_cast<uint32_t>(random.next_below(64));
  const float z = exponent < 0 ? std::bit_cast<float>(z_bits)
                               : static_cast<float>(std::ldexp(0x1p24 + z_bits, exponent + 1));
  operands.add(x, y, with_sign(z, random.next_below(2) == 0));
}

Operands nasty_operands() {
  Operands operands;
  const float special[] = {
      0.0F,      -0.0F,    1.0F,    -1.0F,          FLT_TRUE_MIN,     -FLT_TRUE_MIN,
      FLT_MIN,   -FLT_MIN, FLT_MAX, -FLT_MAX,       0x1.fffffcp-127F, 0x1p103F,
      -0x1p102F, 0x1p63F,  0.1F,    1 + FLT_EPSILON};
  for (const float x : special) {
    for (const float y : special) {
      for (const float z : special) operands.add(x, y, z);
    }
  }
  CounterRandom random(kSeed, 1);
  while (operands.a.size() % 64 != 0 || operands.a.size() < 1'000'000) {
    switch (random.next_below(6)) {
      case 0:
        operands.add(random_of_any_kind(random, 127), random_of_any_kind(random, 127),
                     random_of_any_kind(random, 127));
        break;
      case 1:
        add_cancellation(random, operands);
        break;
      case 2:
        add_subnormal(random, operands);
        break;
      case 3:
        add_exact_tie(random, operands);
        break;
      default:
        add_near_tie(random, operands);
    }
  }
  return operands;
}

TEST_CASE("every SIMD target fuses as std::fma does") {
  const Operands operands = nasty_operands();
  const size_t count = operands.a.size();
  size_t rounded_twice = 0;
  for (size_t i = 0; i < count; ++i) {
    const double a = operands.a[i];
    const double in_double = a * operands.b[i] + operands.c[i];
    rounded_twice +=
        static_cast<float>(in_double) != std::fma(operands.a[i], operands.b[i], operands.c[i]);
  }
  REQUIRE(rounded_twice > 1000);  // else these operands would show nothing

  std::vector<float> sums(count);
  std::vector<float> differences(count);
  for_each_target([&] {
    HWY_DYNAMIC_DISPATCH(fuse_arrays)
    (operands.a.data(), operands.b.data(), operands.c.data(), sums.data(), differences.data(),
     count);
    size_t wrong = 0;
    for (size_t i = 0; i < count; ++i) {
      const float a = operands.a[i];
      const float b = operands.b[i];
      const float c = operands.c[i];
      const auto differ = [](float x, float y) {
        return std::bit_cast<uint32_t>(x) != std::bit_cast<uint32_t>(y);
      };
      if (!differ(sums[i], std::fma(a, b, c)) && !differ(differences[i], std::fma(a, b, -c))) {
        continue;
      }
      if (wrong++ == 0) UNSCOPED_INFO("the first wrong one: " << a << " * " << b << " + " << c);
    }
    CHECK(wrong == 0);
  });
}

}  // namespace
}  // namespace strata::cpu_adam

#endif  // HWY_ONCE
