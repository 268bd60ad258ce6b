// Matrices of a test of matrix products, and the product in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <vector>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/random.h"

namespace strata::gpu::matmul_reference {

inline constexpr uint64_t kSeed = 20240611;

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

inline std::ostream& operator<<(std::ostream& out, const Case& test) {
  return out << "seed " << kSeed << ": " << test.m << " x " << test.n << " x " << test.k << ", "
             << name_of(test.dtype) << " to " << name_of(test.c_dtype) << ", transpose "
             << test.transpose_a << test.transpose_b << ", accumulate " << test.accumulate
             << ", gaps " << test.a_gap << ' ' << test.b_gap << ' ' << test.c_gap;
}

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

/// Of `sampled` elements (or all, where there are fewer), how many are further from the double
/// product than rounding explains. A sum of k + 1 terms in fp32, in any order, is off by at most
/// (k + 1) * 2^-24 times the sum of the terms' magnitudes (products of two bf16 are exact in fp32;
/// those of two fp32 add one rounding each), and rounding it to bf16 by 2^-8 of the value. Where
/// sums are cut off instead of rounded, as in tensor cores, `rounding` is 2^-23.
inline int wrong_elements(const Case& test, const Operands& operands, const Matrix& old_c,
                          int64_t sampled = 4000, double rounding = 0x1p-24) {
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
    double tolerance = static_cast<double>(test.k + 2) * rounding * magnitude;
    if (test.c_dtype == DType::kBf16) tolerance += 0x1p-8 * (std::abs(sum) + tolerance);
    // Negated, for a NaN to be wrong.
    if (!(std::abs(operands.c.at(row, column) - sum) <= tolerance)) ++wrong;
  }
  return wrong;
}

}  // namespace strata::gpu::matmul_reference
