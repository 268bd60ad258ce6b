#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/host/kernels.h"

namespace strata::gpu {
namespace {

constexpr uint64_t kSeed = 20240611;

/// A matrix of either type. The gaps between its rows hold NaNs, so that whoever reads them shows.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t columns, int64_t gap, DType dtype)
      : dtype_(dtype),
        rows_(rows),
        columns_(columns),
        stride_(columns + gap),
        bytes_(static_cast<size_t>(rows * stride_) * size_of(dtype)) {
    for (int64_t i = 0; i < rows * stride_; ++i) set(i, std::numeric_limits<float>::quiet_NaN());
  }

  void fill_normal(CounterRandom& random) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = 0; column < columns_; ++column) {
        set(row * stride_ + column, static_cast<float>(random.next_normal()));
      }
    }
  }

  [[nodiscard]] double at(int64_t row, int64_t column) const { return get(row * stride_ + column); }
  [[nodiscard]] bool gaps_are_intact() const {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = columns_; i < stride_; ++i) {
        if (!std::isnan(get(row * stride_ + i))) return false;
      }
    }
    return true;
  }
  [[nodiscard]] int64_t stride() const { return stride_; }
  [[nodiscard]] void* data() { return bytes_.data(); }
  [[nodiscard]] const std::vector<char>& bytes() const { return bytes_; }

 private:
  void set(int64_t i, float value) {
    const Bf16 rounded = to_bf16(value);
    const size_t size = size_of(dtype_);
    std::memcpy(bytes_.data() + static_cast<size_t>(i) * size,
                dtype_ == DType::kF32 ? static_cast<const void*>(&value) : &rounded, size);
  }
  [[nodiscard]] float get(int64_t i) const {
    const char* from = bytes_.data() + static_cast<size_t>(i) * size_of(dtype_);
    float value = 0;
    Bf16 rounded{};
    if (dtype_ == DType::kF32) {
      std::memcpy(&value, from, sizeof value);
      return value;
    }
    std::memcpy(&rounded, from, sizeof rounded);
    return to_float(rounded);
  }

  DType dtype_;
  int64_t rows_, columns_, stride_;
  std::vector<char> bytes_;
};

struct Case {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kBf16;
  DType c_dtype = DType::kBf16;
  bool transpose_a = false, transpose_b = false, accumulate = false;
  int64_t a_gap = 0, b_gap = 0, c_gap = 0;
};

struct Operands {
  explicit Operands(const Case& test)
      : a(test.transpose_a ? test.k : test.m, test.transpose_a ? test.m : test.k, test.a_gap,
          test.dtype),
        b(test.transpose_b ? test.n : test.k, test.transpose_b ? test.k : test.n, test.b_gap,
          test.dtype),
        c(test.m, test.n, test.c_gap, test.c_dtype) {
    CounterRandom random(kSeed, static_cast<uint64_t>(test.m * 131 + test.n * 17 + test.k));
    a.fill_normal(random);
    b.fill_normal(random);
    // Without accumulation C starts as NaNs, none of which may stay.
    if (test.accumulate) c.fill_normal(random);
  }

  Matrix a, b, c;
};

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

/// Of `sampled` elements (or all, where there are fewer), how many are further from the double
/// product than rounding explains. A sum of k + 1 terms in fp32, in any order, is off by at most
/// (k + 1) * 2^-24 times the sum of the terms' magnitudes (products of two bf16 are exact in fp32;
/// those of two fp32 add one rounding each), and rounding it to bf16 by 2^-8 of the value.
int wrong_elements(const Case& test, const Operands& operands, const Matrix& old_c,
                   int64_t sampled = 4000) {
  CounterRandom random(kSeed, 1);
  const int64_t all = test.m * test.n;
  int wrong = 0;
  for (int64_t i = 0; i < std::min(all, sampled); ++i) {
    const int64_t element =
        all <= sampled ? i : static_cast<int64_t>(random.next_below(static_cast<uint64_t>(all)));
    const int64_t row = element / test.n;
    const int64_t column = element % test.n;
    double sum = test.accumulate ? old_c.at(row, column) : 0;
    double magnitude = std::abs(sum);
    for (int64_t t = 0; t < test.k; ++t) {
      const double product =
          (test.transpose_a ? operands.a.at(t, row) : operands.a.at(row, t)) *
          (test.transpose_b ? operands.b.at(column, t) : operands.b.at(t, column));
      sum += product;
      magnitude += std::abs(product);
    }
    double tolerance = static_cast<double>(test.k + 2) * 0x1p-24 * magnitude;
    if (test.c_dtype == DType::kBf16) tolerance += 0x1p-8 * (std::abs(sum) + tolerance);
    // Negated, for a NaN to be wrong.
    if (!(std::abs(operands.c.at(row, column) - sum) <= tolerance)) ++wrong;
  }
  return wrong;
}

void check(const Case& test, int threads = 2) {
  INFO("seed " << kSeed << ": " << test.m << " x " << test.n << " x " << test.k << ", "
               << name_of(test.dtype) << " to " << name_of(test.c_dtype) << ", transpose "
               << test.transpose_a << test.transpose_b << ", accumulate " << test.accumulate
               << ", gaps " << test.a_gap << ' ' << test.b_gap << ' ' << test.c_gap);
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
