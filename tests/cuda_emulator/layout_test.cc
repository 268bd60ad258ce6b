// The emulator's instructions against the tables of the PTX ISA, written down here once more in its
// own terms: groupID = lane >> 2, threadID_in_group = lane % 4, and elements numbered a0, a1, ...
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "cuda_emulator/test_kernels.h"
#include "cuda_emulator/test_support.h"

namespace strata::gpu::cuda::emulator::test {
namespace {

struct Position {
  int row;
  int column;
};

// PTX ISA 9.0, 9.7.14.5.8 "Matrix Fragments for mma.m16n8k16 with floating point type".
Position position_in_a(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_in_group = lane % 4;
  const bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
  return {upper ? group_id : group_id + 8,
          i < 4 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8};
}

Position position_in_b(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_in_group = lane % 4;
  return {i < 2 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8, group_id};
}

Position position_in_c(int lane, int i) {
  const int group_id = lane >> 2;
  const int thread_in_group = lane % 4;
  return {i < 2 ? group_id : group_id + 8, thread_in_group * 2 + (i & 1)};
}

struct Product {
  float a[16][16];
  float b[16][8];
  float c[16][8];
};

Product random_product(uint64_t seed) {
  CounterRandom random(seed, 1);
  Product product;
  for (auto& row : product.a) {
    for (float& x : row) x = to_float(to_bf16(static_cast<float>(random.next_normal())));
  }
  for (auto& row : product.b) {
    for (float& x : row) x = to_float(to_bf16(static_cast<float>(random.next_normal())));
  }
  for (auto& row : product.c) {
    for (float& x : row) x = static_cast<float>(random.next_normal());
  }
  return product;
}

double exact(const Product& product, int row, int column) {
  double sum = product.c[row][column];
  for (int k = 0; k < 16; ++k) sum += double{product.a[row][k]} * product.b[k][column];
  return sum;
}

TEST_CASE("mma.m16n8k16 multiplies matrices laid out by the manual's tables") {
  const FreshDevice device;
  const TestStream stream;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const Product product = random_product(seed);
    std::vector<uint32_t> a(32 * 4);
    std::vector<uint32_t> b(32 * 2);
    std::vector<float> d(32 * 4);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const auto [row, column] = position_in_a(lane, i);
        a[static_cast<size_t>(lane * 4 + i / 2)] |= uint32_t{to_bf16(product.a[row][column]).bits}
                                                    << (i % 2 * 16);
      }
      for (int i = 0; i < 4; ++i) {
        const auto [row, column] = position_in_b(lane, i);
        b[static_cast<size_t>(lane * 2 + i / 2)] |= uint32_t{to_bf16(product.b[row][column]).bits}
                                                    << (i % 2 * 16);
      }
      for (int i = 0; i < 4; ++i) {
        const auto [row, column] = position_in_c(lane, i);
        d[static_cast<size_t>(lane * 4 + i)] = product.c[row][column];
      }
    }
    const DeviceArray<uint32_t> device_a(a);
    const DeviceArray<uint32_t> device_b(b);
    const DeviceArray<float> device_d(d);
    multiply_fragments(device_d.data(), device_a.data(), device_b.data(), stream.get());
    check(stream.synchronize());
    d = device_d.download();
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const auto [row, column] = position_in_c(lane, i);
        CAPTURE(lane, i);
        CHECK(d[static_cast<size_t>(lane * 4 + i)] ==
              Approx(exact(product, row, column)).margin(1e-5));
      }
    }
  }
}

// PTX ISA 9.0, 9.7.14.5.15 "Warp-level matrix load instruction: ldmatrix": threads 8m to 8m + 7
// give the rows of matrix m; "a group of four threads loads an entire row", each two elements; with
// .trans "in column-major format".
TEST_CASE("ldmatrix distributes rows by the manual's table") {
  const FreshDevice device;
  const TestStream stream;
  constexpr int kRows = 40;
  std::vector<uint16_t> shared(kRows * 8);
  for (size_t i = 0; i < shared.size(); ++i) shared[i] = static_cast<uint16_t>(1000 + i);
  std::vector<int> rows(32);  // Scattered, so that addresses count.
  for (int i = 0; i < 32; ++i) rows[static_cast<size_t>(i)] = (i * 7 + 3) % kRows;
  const DeviceArray<uint16_t> device_shared(shared);
  const DeviceArray<int> device_rows(rows);
  for (const int count : {2, 4}) {
    for (const bool transposed : {false, true}) {
      const DeviceArray<uint32_t> out(static_cast<size_t>(32 * count));
      load_fragments(out.data(), device_shared.data(), kRows, device_rows.data(), count, transposed,
                     stream.get());
      check(stream.synchronize());
      const std::vector<uint32_t> result = out.download();
      for (int lane = 0; lane < 32; ++lane) {
        for (int m = 0; m < count; ++m) {
          for (int half = 0; half < 2; ++half) {
            const int along = (lane % 4) * 2 + half;
            const int row = transposed ? along : lane / 4;
            const int column = transposed ? lane / 4 : along;
            const auto address = static_cast<size_t>(rows[static_cast<size_t>(8 * m + row)]);
            const uint32_t pair = result[static_cast<size_t>(lane * count + m)];
            CAPTURE(count, transposed, lane, m, half);
            CHECK((pair >> (16 * half) & 0xffffU) ==
                  shared[address * 8 + static_cast<size_t>(column)]);
          }
        }
      }
    }
  }
}

// How kernels use both: a row-major A by ldmatrix.x4, a row-major B (k by n) by ldmatrix.x2.trans.
TEST_CASE("ldmatrix loads what mma multiplies") {
  const FreshDevice device;
  const TestStream stream;
  const Product product = random_product(7);
  std::vector<uint16_t> shared_a(32 * 8);  // Row 2 r + h: half h of row r.
  std::vector<uint16_t> shared_b(16 * 8);
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      shared_a[static_cast<size_t>(row * 16 + k)] = to_bf16(product.a[row][k]).bits;
    }
    for (int n = 0; n < 8; ++n) {
      shared_b[static_cast<size_t>(row * 8 + n)] = to_bf16(product.b[row][n]).bits;
    }
  }
  std::vector<int> rows_a(32);
  std::vector<int> rows_b(32);
  for (int lane = 0; lane < 32; ++lane) {
    rows_a[static_cast<size_t>(lane)] = lane % 16 * 2 + lane / 16;
    rows_b[static_cast<size_t>(lane)] = lane % 16;
  }
  const DeviceArray<uint16_t> device_a(shared_a);
  const DeviceArray<uint16_t> device_b(shared_b);
  const DeviceArray<int> device_rows_a(rows_a);
  const DeviceArray<int> device_rows_b(rows_b);
  const DeviceArray<uint32_t> fragments_a(32 * 4);
  const DeviceArray<uint32_t> fragments_b(32 * 2);
  const DeviceArray<float> d(std::vector<float>(32 * 4, 0.0F));
  load_fragments(fragments_a.data(), device_a.data(), 32, device_rows_a.data(), 4, false,
                 stream.get());
  load_fragments(fragments_b.data(), device_b.data(), 16, device_rows_b.data(), 2, true,
                 stream.get());
  multiply_fragments(d.data(), fragments_a.data(), fragments_b.data(), stream.get());
  check(stream.synchronize());
  const std::vector<float> result = d.download();
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const auto [row, column] = position_in_c(lane, i);
      const double expected = exact(product, row, column) - product.c[row][column];
      CHECK(result[static_cast<size_t>(lane * 4 + i)] == Approx(expected).margin(1e-5));
    }
  }
}

TEST_CASE("Shuffles and votes move what lanes hold") {
  const FreshDevice device;
  const TestStream stream;
  const DeviceArray<ShuffleResults> out(1);
  for (const int lane : {0, 5, 31, 37}) {
    for (const int mask : {1, 16, 31}) {
      for (const int delta : {0, 1, 17, 31}) {
        for (const unsigned predicates : {0U, 0xffffffffU, 0x80000001U}) {
          shuffles(out.data(), lane, mask, delta, predicates, stream.get());
          check(stream.synchronize());
          const ShuffleResults result = out.download()[0];
          for (int me = 0; me < 32; ++me) {
            CAPTURE(lane, mask, delta, predicates, me);
            CHECK(result.indexed[me] == static_cast<float>(lane % 32) + 0.5F);
            CHECK(result.exclusive_or[me] == 1.0 / ((me ^ mask) + 1));
            CHECK(result.down[me] == uint64_t(me + delta < 32 ? me + delta : me) << 40U);
            CHECK(result.up[me] == -(me - delta >= 0 ? me - delta : me));
            CHECK(result.ballots[me] == predicates);
            CHECK(result.any[me] == (predicates != 0 ? 1U : 0U));
            CHECK(result.all[me] == (predicates == 0xffffffffU ? 1U : 0U));
          }
        }
      }
    }
  }
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// To the last place but one, which is what the C library promises.
bool close(float a, double b) {
  return same(a, static_cast<float>(b)) || std::abs(a - b) <= std::abs(b) * 0x1p-22;
}

TEST_CASE("Scalar instructions round as IEEE 754 and PTX say") {
  const FreshDevice device;
  const TestStream stream;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> x{0.0F,   -0.0F,   1.0F,      -1.0F,     kInfinity, -kInfinity, kNaN,
                       1e-40F, -1e-40F, 0x1.01p0F, 0x1.03p0F, -150.0F,   127.5F,     3e38F};
  std::vector<float> y(x.rbegin(), x.rend());
  CounterRandom random(11, 3);
  for (int i = 0; i < 2000; ++i) {
    x.push_back(static_cast<float>(random.next_normal() * 8));
    y.push_back(static_cast<float>(random.next_normal() * 8));
  }
  const DeviceArray<float> device_x(x);
  const DeviceArray<float> device_y(y);
  const DeviceArray<uint32_t> out(x.size() * kScalarResults);
  scalars(out.data(), device_x.data(), device_y.data(), static_cast<int>(x.size()), stream.get());
  check(stream.synchronize());
  const std::vector<uint32_t> results = out.download();
  const auto flush = [](float v) {
    return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0F, v) : v;
  };
  const auto bf16 = [](float v) -> uint32_t { return std::isnan(v) ? 0x7fff : to_bf16(v).bits; };
  for (size_t i = 0; i < x.size(); ++i) {
    const uint32_t* bits = &results[i * kScalarResults];
    const auto result = [&](int k) { return std::bit_cast<float>(bits[k]); };
    CAPTURE(i, x[i], y[i]);
    const double tiny = flush(x[i]);
    CHECK(close(result(0), flush(static_cast<float>(std::exp2(tiny)))));
    CHECK(close(result(1), std::log2(tiny)));
    CHECK(same(result(2), flush(static_cast<float>(1.0 / tiny))));
    CHECK(bits[3] == (bf16(x[i]) | bf16(y[i]) << 16U));
    CHECK(same(result(4), static_cast<float>(double{x[i]} + y[i])));
    CHECK(same(result(5), static_cast<float>(double{x[i]} - y[i])));
    CHECK(same(result(6), static_cast<float>(double{x[i]} * y[i])));
    CHECK(same(result(7), static_cast<float>(double{x[i]} / y[i])));
    CHECK(same(result(8), static_cast<float>(std::sqrt(double{x[i]}))));
    CHECK(same(result(9), std::fma(x[i], y[i], x[i])));
  }
}

}  // namespace
}  // namespace strata::gpu::cuda::emulator::test
