#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/host/kernels.h"

namespace strata::gpu {
namespace {

constexpr uint64_t kSeed = 20240612;

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
  [[nodiscard]] int64_t size() const {
    return static_cast<int64_t>(bytes_.size() / size_of(dtype_));
  }
  [[nodiscard]] char* data() { return bytes_.data(); }
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
  float input_scale = 1;

  [[nodiscard]] int64_t tokens() const {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) + unused_tokens;
  }
  /// q, k and v of a token lie side by side.
  [[nodiscard]] int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
  [[nodiscard]] int64_t k_offset() const { return heads * head_dim; }
  [[nodiscard]] int64_t v_offset() const { return (heads + kv_heads) * head_dim; }
  [[nodiscard]] float scale() const { return 1.0F / std::sqrt(static_cast<float>(head_dim)); }
};

/// The tensors of a forward and a backward call. Results start as NaNs.
struct Tensors {
  explicit Tensors(const Case& test)
      : qkv(test.tokens() * test.width(), test.dtype),
        dout(test.tokens() * test.heads * test.head_dim, test.dtype),
        out(dout.size(), test.dtype),
        dqkv(qkv.size(), test.dtype),
        log_sum_exp(static_cast<size_t>(test.tokens() * test.heads),
                    std::numeric_limits<float>::quiet_NaN()) {
    qkv.fill_normal(CounterRandom(kSeed, 1));
    dout.fill_normal(CounterRandom(kSeed, 2));
    offsets.push_back(0);
    for (const int32_t length : test.lengths) offsets.push_back(offsets.back() + length);
  }

  void run(const Case& test, int threads) {
    tbb::task_arena arena(threads);
    AttentionArgs args{
        .tokens = test.tokens(),
        .heads = test.heads,
        .kv_heads = test.kv_heads,
        .head_dim = test.head_dim,
        .sequences = static_cast<int64_t>(test.lengths.size()),
        .max_sequence =
            test.lengths.empty() ? 0 : *std::max_element(test.lengths.begin(), test.lengths.end()),
        .dtype = test.dtype,
        .scale = test.scale(),
        .sequence_offsets = offsets.data(),
        .q = qkv.data(),
        .k = qkv.at(test.k_offset()),
        .v = qkv.at(test.v_offset()),
        .qkv_stride = test.width(),
        .out = out.data(),
        .log_sum_exp = log_sum_exp.data()};
    scratch.assign(host::attention_scratch_bytes(args, threads), '\xff');
    args.scratch = scratch.data();
    host::attention(args, arena);

    AttentionBackwardArgs backward{.forward = args,
                                   .dout = dout.data(),
                                   .dq = dqkv.data(),
                                   .dk = dqkv.at(test.k_offset()),
                                   .dv = dqkv.at(test.v_offset()),
                                   .dqkv_stride = test.width()};
    scratch.assign(host::attention_backward_scratch_bytes(backward, threads), '\xff');
    backward.forward.scratch = scratch.data();
    host::attention_backward(backward, arena);
  }

  Values qkv, dout, out, dqkv;
  std::vector<float> log_sum_exp;
  std::vector<int32_t> offsets;
  std::vector<char> scratch;
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
Reference reference(const Case& test, const Tensors& tensors) {
  const int64_t d = test.head_dim;
  Reference result{Expected(tensors.out.size()), Expected(tensors.dqkv.size()),
                   Expected(static_cast<int64_t>(tensors.log_sum_exp.size()))};
  const double u = test.dtype == DType::kBf16 ? 0x1p-8 : 0x1p-24;
  const double scale = test.scale();
  for (size_t s = 0; s + 1 < tensors.offsets.size(); ++s) {
    const int64_t first = tensors.offsets[s];
    const int64_t length = tensors.offsets[s + 1] - first;
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
                tensors.qkv[q(i) + c] * tensors.qkv[k(static_cast<int64_t>(j)) + c];
            p[j] += scale * product;
            magnitude += std::abs(scale * product);
            const double term = tensors.dout[row + c] * tensors.qkv[v(static_cast<int64_t>(j)) + c];
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
            const double term = p[j] * tensors.qkv[v(static_cast<int64_t>(j)) + c];
            value += term;
            magnitude += std::abs(term);
          }
          const double tolerance = 2 * ((u + 2 * e) * magnitude + u * std::abs(value));
          result.out.value[static_cast<size_t>(row + c)] = value;
          result.out.tolerance[static_cast<size_t>(row + c)] = tolerance;
          delta += value * tensors.dout[row + c];
          delta_error += (tolerance + static_cast<double>(d) * 0x1p-24 * std::abs(value)) *
                         std::abs(tensors.dout[row + c]);
        }
        for (size_t j = 0; j < keys; ++j) {
          const double ds = scale * p[j] * (dp[j] - delta);
          const double ds_error =
              (u + 2 * e_backward) * std::abs(ds) +
              scale * p[j] * (static_cast<double>(d) * 0x1p-24 * dp_magnitude[j] + delta_error);
          const auto add = [&](int64_t to, double term, double error) {
            result.dqkv.value[static_cast<size_t>(to)] += term;
            // 2^-24 for each of the sums that follow.
            result.dqkv.tolerance[static_cast<size_t>(to)] +=
                2 * (error + static_cast<double>(length) * 0x1p-24 * std::abs(term));
          };
          for (int64_t c = 0; c < d; ++c) {
            const auto key = static_cast<int64_t>(j);
            const double k_c = tensors.qkv[k(key) + c];
            const double q_c = tensors.qkv[q(i) + c];
            const double dout_c = tensors.dout[row + c];
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

void check(const Case& test, int threads = 2) {
  std::string lengths;
  for (const int32_t length : test.lengths) lengths += std::to_string(length) + ' ';
  INFO("seed " << kSeed << ": " << test.heads << '/' << test.kv_heads << " heads of "
               << test.head_dim << ", " << name_of(test.dtype) << ", lengths " << lengths << "+ "
               << test.unused_tokens);
  Tensors tensors(test);
  tensors.run(test, threads);
  const Reference expected = reference(test, tensors);
  CHECK(wrong_elements(tensors.log_sum_exp, expected.log_sum_exp) == 0);
  CHECK(wrong_elements(tensors.out, expected.out) == 0);
  CHECK(wrong_elements(tensors.dqkv, expected.dqkv) == 0);
}

TEST_CASE("attention agrees with double precision", "[attention]") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const int64_t head_dim = GENERATE(16, 64, 96, 128);
  for (const int64_t group : {1, 4, 8}) {
    check({.heads = 2 * group,
           .kv_heads = 2,
           .head_dim = head_dim,
           .lengths = {70, 1, 0, 33},
           .unused_tokens = 3,
           .dtype = dtype});
  }
}

TEST_CASE("attention agrees with double precision at the edges of its blocks", "[attention]") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  for (const int32_t length : {1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 515}) {
    check({.heads = 1, .head_dim = 16, .lengths = {length}, .dtype = dtype});
    check({.heads = 3, .head_dim = 8, .lengths = {length}, .dtype = dtype});
  }
}

TEST_CASE("attention agrees with double precision on random shapes", "[attention]") {
  CounterRandom random(kSeed, 3);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random.next_below(bound)); };
  for (int i = 0; i < 12; ++i) {
    Case test{.kv_heads = 1 + below(3), .head_dim = 1 + below(40), .unused_tokens = below(4)};
    test.heads = test.kv_heads * (1 + below(7));
    const int64_t sequences = below(5);
    for (int64_t s = 0; s < sequences; ++s) {
      test.lengths.push_back(static_cast<int32_t>(below(2) * below(200)));
    }
    test.dtype = below(3) == 0 ? DType::kF32 : DType::kBf16;
    check(test);
  }
}

TEST_CASE("attention's bits do not depend on the number of threads", "[attention]") {
  // Else no more threads than cores.
  const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 3);
  const Case test{.heads = 8,
                  .kv_heads = 2,
                  .head_dim = 32,
                  .lengths = {150, 3, 290, 1, 64},
                  .unused_tokens = 2};
  Tensors one(test);
  one.run(test, 1);
  for (const int threads : {2, 3}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      Tensors many(test);
      many.run(test, threads);
      CHECK(many.out == one.out);
      CHECK(many.dqkv == one.dqkv);
      CHECK(many.log_sum_exp == one.log_sum_exp);
    }
  }
}

TEST_CASE("a token affects no token before it and no other sequence", "[attention]") {
  const Case test{.heads = 4, .kv_heads = 2, .head_dim = 16, .lengths = {40, 200, 30}};
  Tensors before(test);
  before.run(test, 2);
  const int64_t changed = 40 + GENERATE(0, 1, 63, 64, 127, 128, 199);
  Tensors after(test);
  for (int64_t i = 0; i < test.width(); ++i) {
    after.qkv.set(changed * test.width() + i, 30.0F);
  }
  after.run(test, 2);
  const int64_t width = test.heads * test.head_dim;
  for (int64_t token = 0; token < test.tokens(); ++token) {
    bool differs = false;
    for (int64_t i = token * width; i < (token + 1) * width; ++i) {
      differs = differs || after.out[i] != before.out[i];
    }
    INFO("token " << token << " with token " << changed << " changed");
    if (token < changed || token >= 240) CHECK_FALSE(differs);
    if (token == changed) CHECK(differs);
  }
}

TEST_CASE("attention keeps large scores apart", "[attention]") {
  // Scores of several hundred: exp of them would overflow without the maximum taken off.
  const Case test{.heads = 2, .head_dim = 64, .lengths = {200}, .dtype = DType::kF32};
  Tensors tensors(test);
  for (int64_t i = 0; i < tensors.qkv.size(); ++i) {
    if (i % test.width() < test.v_offset()) {
      tensors.qkv.set(i, static_cast<float>(8 * tensors.qkv[i]));
    }
  }
  tensors.run(test, 2);
  const Reference expected = reference(test, tensors);
  CHECK(wrong_elements(tensors.out, expected.out) == 0);
  CHECK(wrong_elements(tensors.dqkv, expected.dqkv) == 0);
}

TEST_CASE("attention without tokens, sequences or keys", "[attention]") {
  check({.lengths = {}, .unused_tokens = 0});
  check({.lengths = {}, .unused_tokens = 5});
  check({.lengths = {0, 0}, .unused_tokens = 5});
}

}  // namespace
}  // namespace strata::gpu
