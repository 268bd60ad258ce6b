#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/host/kernels.h"
#include "gpu/matmul_reference.h"

namespace strata::gpu {
namespace {

using namespace matmul_reference;

void multiply(const Case& test, Operands& operands, int threads) {
  tbb::task_arena arena(threads);
  MatmulArgs args{.m = test.m,
                  .n = test.n,
                  .k = test.k,
                  .dtype = test.dtype,
                  .c_dtype = test.c_dtype,
                  .transpose_a = test.transpose_a,
                  .transpose_b = test.transpose_b,
                  .accumulate = test.accumulate,
                  .a = operands.a.data(),
                  .b = operands.b.data(),
                  .c = operands.c.data(),
                  .a_stride = operands.a.stride(),
                  .b_stride = operands.b.stride(),
                  .c_stride = operands.c.stride()};
  std::vector<char> scratch(host::matmul_scratch_bytes(args));
  args.scratch = scratch.data();
  host::matmul(args, arena);
}

void check(const Case& test, int threads = 2) {
  INFO(test);
  Operands operands(test);
  const Matrix old_c = operands.c;
  multiply(test, operands, threads);
  CHECK(wrong_elements(test, operands, old_c) == 0);
  CHECK(operands.c.gaps_are_intact());
}

TEST_CASE("matmul agrees with double precision in every form", "[matmul]") {
  struct Types {
    DType dtype, c_dtype;
  };
  for (const auto [dtype, c_dtype] :
       {Types{DType::kBf16, DType::kBf16}, Types{DType::kBf16, DType::kF32},
        Types{DType::kF32, DType::kF32}}) {
    for (int form = 0; form < 8; ++form) {
      Case test{.m = 37,
                .n = 257,
                .k = 65,
                .dtype = dtype,
                .c_dtype = c_dtype,
                .transpose_a = (form & 1) != 0,
                .transpose_b = (form & 2) != 0,
                .accumulate = (form & 4) != 0};
      check(test);
      test.a_gap = 3;
      test.b_gap = 8;
      test.c_gap = 1;
      check(test);
    }
  }
}

TEST_CASE("matmul agrees with double precision at the edges of its tiles", "[matmul]") {
  const bool transpose_a = GENERATE(false, true);
  const int64_t gap = GENERATE(0, 5);
  for (const int64_t m : {1, 127, 128, 129, 511, 513, 1025}) {
    check({.m = m, .n = 33, .k = 31, .transpose_a = transpose_a, .c_gap = gap});
  }
  for (const int64_t n : {1, 63, 64, 65, 1023, 1025, 2049}) {
    check(
        {.m = 40, .n = n, .k = 31, .transpose_a = transpose_a, .transpose_b = true, .c_gap = gap});
  }
  check({.m = 1, .n = 1, .k = 1, .transpose_a = transpose_a, .c_gap = gap});
}

TEST_CASE("matmul agrees with double precision on random shapes", "[matmul]") {
  CounterRandom random(kSeed, 2);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random.next_below(bound)); };
  for (int i = 0; i < 40; ++i) {
    const DType dtype = below(4) == 0 ? DType::kF32 : DType::kBf16;
    check({.m = 1 + below(700),
           .n = 1 + below(700),
           .k = 1 + below(300),
           .dtype = dtype,
           .c_dtype = below(2) == 0 ? dtype : DType::kF32,
           .transpose_a = below(2) == 0,
           .transpose_b = below(2) == 0,
           .accumulate = below(2) == 0,
           .a_gap = below(2) * below(40),
           .b_gap = below(2) * below(40),
           .c_gap = below(2) * below(40)});
  }
}

TEST_CASE("a matmul without terms leaves C or zeroes it", "[matmul]") {
  for (const bool accumulate : {false, true}) {
    check({.m = 5, .n = 7, .k = 0, .accumulate = accumulate, .c_gap = 2});
    check({.m = 0, .n = 7, .k = 3, .accumulate = accumulate});
    check({.m = 5, .n = 0, .k = 3, .accumulate = accumulate});
  }
}

TEST_CASE("a matmul accumulated in bf16 is rounded once", "[matmul]") {
  // Neighbours of 256 are 2 apart: 256 + (1 + 2^-8) rounds up. The product rounded on its own would
  // be 1 (2^-7 apart, the tie to even), and 257, a tie again, would go down.
  Case test{.m = 3, .n = 5, .k = 2, .accumulate = true};
  Operands operands(test);
  const auto set = [](Matrix& matrix, float even, float odd, bool by_row) {
    auto* values = static_cast<Bf16*>(matrix.data());
    for (size_t i = 0; i < matrix.bytes().size() / sizeof(Bf16); ++i) {
      const auto stride = static_cast<size_t>(matrix.stride());
      values[i] = to_bf16((by_row ? i / stride : i % stride) % 2 == 0 ? even : odd);
    }
  };
  set(operands.a, 1.0F, 0x1p-8F, false);  // each row: 1, 2^-8
  set(operands.b, 1.0F, 1.0F, true);
  set(operands.c, 256.0F, 256.0F, true);
  multiply(test, operands, 1);
  for (int64_t row = 0; row < test.m; ++row) {
    for (int64_t column = 0; column < test.n; ++column) {
      CHECK(operands.c.at(row, column) == 258.0);
    }
  }
}

TEST_CASE("a matmul's bits do not depend on the number of threads", "[matmul]") {
  // Else no more threads than cores.
  const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 3);
  for (const Case& test :
       {Case{.m = 1111, .n = 192, .k = 300, .transpose_b = true},
        Case{.m = 300, .n = 700, .k = 257, .c_dtype = DType::kF32, .transpose_b = true},
        Case{.m = 384,
        .n = 640,
        .k = 515,
        .c_dtype = DType::kF32,
        .transpose_a = true,
        .accumulate = true},
        Case{.m = 515,
        .n = 130,
        .k = 77,
        .dtype = DType::kF32,
        .c_dtype = DType::kF32,
        .accumulate = true,
        .c_gap = 3}}) {
    Operands one(test);
    multiply(test, one, 1);
    for (const int threads : {2, 3}) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        Operands many(test);
        multiply(test, many, threads);
        CHECK(std::memcmp(one.c.bytes().data(), many.c.bytes().data(), one.c.bytes().size()) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace strata::gpu
