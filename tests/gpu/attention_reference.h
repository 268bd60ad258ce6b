// Attention in double precision, what its results may differ by, and the tensors of a test of it.
// For the devices' tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/random.h"
#include "catch.h"

namespace strata::gpu::attention_reference {

inline constexpr uint64_t kSeed = 20240612;

/// Elements of either type; reads as double.
class Values {
 public:
  Values() = default;
  Values(int64_t count, DType dtype, float initial = std::numeric_limits<float>::quiet_NaN())
      : dtype_(dtype), bytes_(static_cast<size_t>(count) * size_of(dtype)) {
    for (int64_t i = 0; i < count; ++i) set(i, initial);
  }
  void fill_normal(CounterRandom random) {
    for (int64_t i = 0; i < size(); ++i) set(i, static_cast<float>(random.next_normal()));
  }
  void set(int64_t i, float value) {
    const Bf16 rounded = to_bf16(value);
    const size_t size = size_of(dtype_);
    std::memcpy(bytes_.data() + static_cast<size_t>(i) * size,
                dtype_ == DType::kF32 ? static_cast<const void*>(&value) : &rounded, size);
  }
  [[nodiscard]] double operator[](int64_t i) const {
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
  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(bytes_.size() / size_of(dtype_));
  }
  [[nodiscard]] char* data() { return bytes_.data(); }
  [[nodiscard]] const char* data() const { return bytes_.data(); }
  [[nodiscard]] size_t size_bytes() const { return bytes_.size(); }
  [[nodiscard]] char* at(int64_t i) {
    return bytes_.data() + static_cast<size_t>(i) * size_of(dtype_);
  }
  friend bool operator==(const Values&, const Values&) = default;

 private:
  DType dtype_ = DType::kF32;
  std::vector<char> bytes_;
};

struct Case {
  int64_t heads = 1, kv_heads = 1, head_dim = 16;
  std::vector<int32_t> lengths{};
  int64_t unused_tokens = 0;
  DType dtype = DType::kBf16;
  bool negative_scale = false;

  [[nodiscard]] int64_t tokens() const {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) + unused_tokens;
  }
  /// q, k and v of a token lie side by side.
  [[nodiscard]] int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  [[nodiscard]] int64_t k_offset() const { return heads * head_dim; }
  [[nodiscard]] int64_t v_offset() const { return (heads + kv_heads) * head_dim; }
  [[nodiscard]] int64_t max_sequence() const {
    return lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  }
  [[nodiscard]] float scale() const {
    return (negative_scale ? -1.0F : 1.0F) / std::sqrt(static_cast<float>(head_dim));
  }
};

/// The tensors that go into a forward and a backward call.
struct Inputs {
  explicit Inputs(const Case& test)
      : qkv(test.tokens() * test.width(), test.dtype),
        dout(test.tokens() * test.heads * test.head_dim, test.dtype) {
    qkv.fill_normal(CounterRandom(kSeed, 1));
    dout.fill_normal(CounterRandom(kSeed, 2));
    offsets.push_back(0);
    for (const int32_t length : test.lengths) offsets.push_back(offsets.back() + length);
  }

  Values qkv, dout;
  std::vector<int32_t> offsets;
};

/// What comes out of them; starts as NaNs.
struct Results {
  explicit Results(const Case& test)
      : out(test.tokens() * test.heads * test.head_dim, test.dtype),
        dqkv(test.tokens() * test.width(), test.dtype),
        log_sum_exp(static_cast<size_t>(test.tokens() * test.heads),
                    std::numeric_limits<float>::quiet_NaN()) {}
  friend bool operator==(const Results&, const Results&) = default;

  Values out, dqkv;
  std::vector<float> log_sum_exp;
};

/// A result in double precision, and how far a right one may be from it.
struct Expected {
  explicit Expected(int64_t count)
      : value(static_cast<size_t>(count)), tolerance(static_cast<size_t>(count)) {}
  std::vector<double> value, tolerance;
};

struct Reference {
  Expected out, dqkv, log_sum_exp;
};

/// With u the rounding of a matrix product's inputs (2^-8 in bf16, 2^-24 in fp32), terms t_i of a
/// sum that were rounded to it give an error of at most u * sum |t_i|, and the result's own
/// rounding u * |result|. Sums in fp32 and exp add e, relative to the sum of magnitudes: 2^-24 for
/// each term of the scores (an absolute error of a score is a relative one of its probability), and
/// for each key. Errors of first order, doubled for those of higher order.
inline Reference reference(const Case& test, const Inputs& inputs) {
  const int64_t d = test.head_dim;
  Reference result{Expected(inputs.dout.size()), Expected(inputs.qkv.size()),
                   Expected(test.tokens() * test.heads)};
  const double u = test.dtype == DType::kBf16 ? 0x1p-8 : 0x1p-24;
  const double scale = test.scale();
  for (size_t s = 0; s + 1 < inputs.offsets.size(); ++s) {
    const int64_t first = inputs.offsets[s];
    const int64_t length = inputs.offsets[s + 1] - first;
    for (int64_t head = 0; head < test.heads; ++head) {
      const int64_t kv_head = head / (test.heads / test.kv_heads);
      const auto q = [&](int64_t i) { return (first + i) * test.width() + head * d; };
      const auto k = [&](int64_t i) {
        return (first + i) * test.width() + test.k_offset() + kv_head * d;
      };
      const auto v = [&](int64_t i) { return k(i) - test.k_offset() + test.v_offset(); };
      for (int64_t i = 0; i < length; ++i) {
        const auto keys = static_cast<size_t>(i + 1);
        const int64_t row = ((first + i) * test.heads + head) * d;
        std::vector<double> p(keys);
        std::vector<double> p_error(keys);
        std::vector<double> dp(keys);
        std::vector<double> dp_magnitude(keys);
        double max = -std::numeric_limits<double>::infinity();
        double score_error = 0;
        for (size_t j = 0; j < keys; ++j) {
          double magnitude = 0;
          for (int64_t c = 0; c < d; ++c) {
            const double product =
                inputs.qkv[q(i) + c] * inputs.qkv[k(static_cast<int64_t>(j)) + c];
            p[j] += scale * product;
            magnitude += std::abs(scale * product);
            const double term = inputs.dout[row + c] * inputs.qkv[v(static_cast<int64_t>(j)) + c];
            dp[j] += term;
            dp_magnitude[j] += std::abs(term);
          }
          max = std::max(max, p[j]);
          score_error = std::max(score_error, static_cast<double>(d + 8) * 0x1p-24 * magnitude);
        }
        double sum = 0;
        for (double& score : p) sum += score = std::exp(score - max);
        for (double& probability : p) probability /= sum;
        const double e = score_error + (static_cast<double>(keys) + 16) * 0x1p-24;
        const auto lse = static_cast<size_t>(head * test.tokens() + first + i);
        result.log_sum_exp.value[lse] = max + std::log(sum);
        result.log_sum_exp.tolerance[lse] =
            2 * (e + 0x1p-24 * std::abs(result.log_sum_exp.value[lse]));

        const double e_backward = e + 0x1p-24 * std::abs(result.log_sum_exp.value[lse]);
        double delta = 0;
        double delta_error = 0;
        for (int64_t c = 0; c < d; ++c) {
          double value = 0;
          double magnitude = 0;
          for (size_t j = 0; j < keys; ++j) {
            const double term = p[j] * inputs.qkv[v(static_cast<int64_t>(j)) + c];
            value += term;
            magnitude += std::abs(term);
          }
          const double tolerance = 2 * ((u + 2 * e) * magnitude + u * std::abs(value));
          result.out.value[static_cast<size_t>(row + c)] = value;
          result.out.tolerance[static_cast<size_t>(row + c)] = tolerance;
          delta += value * inputs.dout[row + c];
          delta_error += (tolerance + static_cast<double>(d) * 0x1p-24 * std::abs(value)) *
                         std::abs(inputs.dout[row + c]);
        }
        for (size_t j = 0; j < keys; ++j) {
          const double ds = scale * p[j] * (dp[j] - delta);
          const double ds_error =
              (u + 2 * e_backward) * std::abs(ds) +
              std::abs(scale) * p[j] *
                  (static_cast<double>(d) * 0x1p-24 * dp_magnitude[j] + delta_error);
          const auto add = [&](int64_t to, double term, double error) {
            result.dqkv.value[static_cast<size_t>(to)] += term;
            // 2^-24 for each of the sums that follow.
            result.dqkv.tolerance[static_cast<size_t>(to)] +=
                2 * (error + static_cast<double>(length) * 0x1p-24 * std::abs(term));
          };
          for (int64_t c = 0; c < d; ++c) {
            const auto key = static_cast<int64_t>(j);
            const double k_c = inputs.qkv[k(key) + c];
            const double q_c = inputs.qkv[q(i) + c];
            const double dout_c = inputs.dout[row + c];
            add(q(i) + c, ds * k_c, ds_error * std::abs(k_c));
            add(k(key) + c, ds * q_c, ds_error * std::abs(q_c));
            add(v(key) + c, p[j] * dout_c, (u + 2 * e_backward) * p[j] * std::abs(dout_c));
          }
        }
      }
    }
  }
  for (size_t i = 0; i < result.dqkv.value.size(); ++i) {
    result.dqkv.tolerance[i] += u * std::abs(result.dqkv.value[i]);
  }
  return result;
}

template <class Result>
int wrong_elements(const Result& result, const Expected& expected) {
  int wrong = 0;
  for (size_t i = 0; i < expected.value.size(); ++i) {
    const auto got = static_cast<double>(result[static_cast<
        typename std::conditional_t<std::is_same_v<Result, Values>, int64_t, size_t>>(i)]);
    // Probabilities below 2^-126 become 0. Negated, for a NaN to be wrong.
    if (!(std::abs(got - expected.value[i]) <= expected.tolerance[i] + 0x1p-110)) ++wrong;
  }
  return wrong;
}

inline void check(const Case& test, const Inputs& inputs, const Results& results) {
  std::string lengths;
  for (const int32_t length : test.lengths) lengths += std::to_string(length) + ' ';
  INFO("seed " << kSeed << ": " << test.heads << '/' << test.kv_heads << " heads of "
               << test.head_dim << ", " << name_of(test.dtype) << ", lengths " << lengths << "+ "
               << test.unused_tokens);
  const Reference expected = reference(test, inputs);
  CHECK(wrong_elements(results.log_sum_exp, expected.log_sum_exp) == 0);
  CHECK(wrong_elements(results.out, expected.out) == 0);
  CHECK(wrong_elements(results.dqkv, expected.dqkv) == 0);
}

}  // namespace strata::gpu::attention_reference
