// The host device's operators other than matmul and attention, against their definitions in double.
//
// Tolerances: a result may differ by its one rounding to the type stored, kUnit of which is
// relative, and by the fp32 arithmetic before it, counted as operations times 2^-24 of the terms'
// sizes. A sum of n terms has at least four partial sums on any target (`sum_error`).
#include <hwy/highway.h>
#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "cpu_adam/adam.h"
#include "gpu/aborts.h"
#include "gpu/cross_entropy_place.h"
#include "gpu/cross_entropy_places.h"
#include "gpu/host/kernels.h"

namespace strata::gpu::host {
namespace {

constexpr uint64_t kSeed = 0x0b5e;
constexpr DType kDTypes[] = {DType::kBf16, DType::kF32};
constexpr double kUnitF32 = 0x1p-24;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

double unit_of(DType dtype) { return dtype == DType::kBf16 ? 0x1p-8 : kUnitF32; }
double sum_error(int64_t count) { return (static_cast<double>(count) / 4 + 16) * kUnitF32; }
size_t index(int64_t i) { return static_cast<size_t>(i); }

/// Makes one SIMD target of this machine the only one while it lives.
class OnlyTarget {
 public:
  explicit OnlyTarget(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~OnlyTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;
};

/// Calls body(dtype) for both types on each SIMD target that this build has and this machine runs.
template <class Body>
void for_each_target_and_type(Body body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const OnlyTarget only(target);
    for (const DType dtype : kDTypes) {
      INFO("SIMD target " << hwy::TargetName(target) << ", " << name_of(dtype) << ", seed "
                          << kSeed);
      body(dtype);
    }
  }
}

/// Elements of a type known at run time, in an allocation of exactly their size.
class Tensor {
 public:
  Tensor(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count) * size_of(dtype)) {}

  static Tensor normal(DType dtype, int64_t count, CounterRandom& random, double scale = 1) {
    Tensor tensor(dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      tensor.set(i, static_cast<float>(random.next_normal() * scale));
    }
    return tensor;
  }

  void* data() { return bytes_.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.data()); }
  int64_t count() const { return static_cast<int64_t>(bytes_.size() / size_of(dtype_)); }
  float operator[](int64_t i) const {
    if (dtype_ == DType::kBf16) {
      Bf16 value{};
      std::memcpy(&value, bytes_.data() + i * 2, 2);
      return to_float(value);
    }
    float value = 0;
    std::memcpy(&value, bytes_.data() + i * 4, 4);
    return value;
  }
  double at(int64_t i) const { return static_cast<double>((*this)[i]); }
  void set(int64_t i, float value) {
    if (dtype_ == DType::kBf16) {
      const Bf16 rounded = to_bf16(value);
      std::memcpy(bytes_.data() + i * 2, &rounded, 2);
    } else {
      std::memcpy(bytes_.data() + i * 4, &value, 4);
    }
  }
  friend bool operator==(const Tensor&, const Tensor&) = default;

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

/// What an element must be, and by how much fp32 arithmetic may miss it before the last rounding.
struct Expected {
  double value, error;
};

/// The first element that is not as `expected(i)` says, or -1.
template <class Expect>
int64_t first_wrong(const Tensor& tensor, DType dtype, int64_t begin, int64_t end,
                    Expect expected) {
  for (int64_t i = begin; i < end; ++i) {
    const Expected e = expected(i);
    const double bound = (std::abs(e.value) + e.error) * unit_of(dtype) + e.error + 1e-37;
    if (!(std::abs(tensor.at(i) - e.value) <= bound)) {
      UNSCOPED_INFO("element " << i << " is " << tensor.at(i) << ", not " << e.value << " within "
                               << bound);
      return i;
    }
  }
  return -1;
}

template <class Expect>
int64_t first_wrong(const Tensor& tensor, DType dtype, Expect expected) {
  return first_wrong(tensor, dtype, 0, tensor.count(), expected);
}

tbb::task_arena& arena_of(int threads) {
  static tbb::global_control enough(tbb::global_control::max_allowed_parallelism, 3);
  static tbb::task_arena arenas[] = {tbb::task_arena(1), tbb::task_arena(2), tbb::task_arena(3)};
  return arenas[threads - 1];
}

/// Scratch of exactly the size asked for, with remains of earlier use.
std::vector<std::byte> scratch_of(size_t size_bytes) {
  return std::vector<std::byte>(size_bytes, std::byte{0xff});
}

struct Shape {
  int64_t rows, width;
};
/// Around vector lengths and with several chunks.
constexpr Shape kShapes[] = {{0, 5},  {1, 1},  {3, 2},   {2, 15},   {5, 16},    {4, 17},   {2, 31},
                             {3, 64}, {7, 65}, {1, 257}, {130, 40}, {300, 260}, {2, 33000}};

// RMSNorm

struct NormCase {
  NormCase(DType dtype, Shape shape, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        width(shape.width),
        x(Tensor::normal(dtype, rows * width, random, 3)),
        weight(Tensor::normal(dtype, width, random)),
        y(dtype, rows * width),
        rstd(DType::kF32, rows),
        dy(Tensor::normal(dtype, rows * width, random)),
        residual(Tensor::normal(dtype, rows * width, random)),
        dx(dtype, rows * width),
        dweight(Tensor::normal(DType::kF32, width, random)) {}

  void forward(int threads = 2) {
    rms_norm({.rows = rows,
              .width = width,
              .dtype = type,
              .epsilon = 1e-5F,
              .x = x.data(),
              .weight = weight.data(),
              .y = y.data(),
              .rstd = rstd.floats()},
             arena_of(threads));
  }

  enum class Residual { kNone, kSeparate, kInPlace };
  void backward(Residual with, bool accumulate, int threads = 2) {
    RmsNormBackwardArgs args{.rows = rows,
                             .width = width,
                             .dtype = type,
                             .x = x.data(),
                             .weight = weight.data(),
                             .rstd = rstd.floats(),
                             .dy = dy.data(),
                             .dx = dx.data(),
                             .dweight = dweight.floats(),
                             .accumulate = accumulate};
    if (with == Residual::kSeparate) args.residual_gradient = residual.data();
    if (with == Residual::kInPlace) {
      dx = residual;
      args.dx = dx.data();
      args.residual_gradient = dx.data();
    }
    auto scratch = scratch_of(rms_norm_backward_scratch_bytes(args));
    args.scratch = scratch.data();
    rms_norm_backward(args, arena_of(threads));
  }

  double exact_rstd(int64_t row) const {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x.at(row * width + i) * x.at(row * width + i);
    return 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(1e-5F));
  }

  void check_forward() const {
    const double error = sum_error(width);
    REQUIRE(first_wrong(rstd, DType::kF32, [&](int64_t row) {
              const double exact = exact_rstd(row);
              return Expected{exact, exact * error};
            }) < 0);
    std::vector<double> exact;
    for (int64_t row = 0; row < rows; ++row) exact.push_back(exact_rstd(row));
    REQUIRE(first_wrong(y, type, [&](int64_t i) {
              const double value = x.at(i) * exact[index(i / width)] * weight.at(i % width);
              return Expected{value, std::abs(value) * error};
            }) < 0);
  }

  DType type;
  int64_t rows, width;
  Tensor x, weight, y, rstd, dy, residual, dx, dweight;
};

TEST_CASE("rms_norm is x * rstd * weight", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 1);
    for (const Shape shape : kShapes) {
      NormCase c(dtype, shape, random);
      INFO(shape.rows << " x " << shape.width);
      c.forward();
      c.check_forward();
    }
  });
}

/// Runs residual_rms_norm and demands the bits of add, then rms_norm. Returns the latter.
NormCase check_residual_norm(const NormCase& initial, const Tensor& a, const Tensor& b,
                             int threads) {
  NormCase separate = initial;
  Tensor first = a;
  Tensor second = b;
  add({.count = a.count(),
       .dtype = initial.type,
       .a = first.data(),
       .b = second.data(),
       .out = separate.x.data()},
      arena_of(threads));
  separate.forward(threads);
  enum class Sum { kSeparate, kOverA, kOverB };
  for (const Sum place : {Sum::kSeparate, Sum::kOverA, Sum::kOverB}) {
    INFO("sum " << static_cast<int>(place));
    NormCase fused = initial;
    first = a;
    second = b;
    Tensor* sum = &fused.x;
    if (place == Sum::kOverA) sum = &first;
    if (place == Sum::kOverB) sum = &second;
    residual_rms_norm({.rows = fused.rows,
                       .width = fused.width,
                       .dtype = fused.type,
                       .epsilon = 1e-5F,
                       .a = first.data(),
                       .b = second.data(),
                       .sum = sum->data(),
                       .weight = fused.weight.data(),
                       .y = fused.y.data(),
                       .rstd = fused.rstd.floats()},
                      arena_of(threads));
    const bool same = *sum == separate.x && fused.y == separate.y && fused.rstd == separate.rstd;
    REQUIRE(same);
    const bool inputs_kept =
        (place == Sum::kOverA || first == a) && (place == Sum::kOverB || second == b);
    REQUIRE(inputs_kept);
  }
  return separate;
}

TEST_CASE("residual_rms_norm is add, then rms_norm, to the bit", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 22);
    std::vector<Shape> shapes(std::begin(kShapes), std::end(kShapes));
    for (const int64_t edge : {8, 16, 32, 64, 256}) {
      shapes.push_back({1 + static_cast<int64_t>(random.next_below(5)),
                        edge - 2 + static_cast<int64_t>(random.next_below(5))});
    }
    int threads = 0;
    for (const Shape shape : shapes) {
      const NormCase initial(dtype, shape, random);
      const Tensor a = Tensor::normal(dtype, shape.rows * shape.width, random, 3);
      const Tensor b = Tensor::normal(dtype, shape.rows * shape.width, random);
      INFO(shape.rows << " x " << shape.width);
      const NormCase result = check_residual_norm(initial, a, b, 1 + ++threads % 3);
      REQUIRE(first_wrong(result.x, dtype, [&](int64_t i) {
                return Expected{a.at(i) + b.at(i), std::abs(a.at(i) + b.at(i)) * kUnitF32};
              }) < 0);
      result.check_forward();
    }
  });
}

TEST_CASE("residual_rms_norm passes on infinities and NaNs of its row", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 23);
    const NormCase initial(dtype, {4, 50}, random);
    Tensor a = Tensor::normal(dtype, 200, random);
    Tensor b = Tensor::normal(dtype, 200, random);
    a.set(7, kNaN);
    b.set(50 + 49, kInfinity);
    a.set(100, kInfinity);
    b.set(100, -kInfinity);
    const NormCase result = check_residual_norm(initial, a, b, 2);
    REQUIRE(std::isnan(result.rstd[0]));
    REQUIRE(result.rstd[1] == 0);
    REQUIRE(std::isnan(result.y[50 + 49]));
    REQUIRE(std::isnan(result.rstd[2]));
    REQUIRE(std::isfinite(result.rstd[3]));
  });
}

TEST_CASE("rms_norm of zeros is zero", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 2);
    NormCase c(dtype, {2, 20}, random);
    c.x = Tensor(dtype, 40);
    c.forward();
    REQUIRE(first_wrong(c.y, dtype, [](int64_t) { return Expected{0, 0}; }) < 0);
    REQUIRE(c.rstd[0] == Approx(1 / std::sqrt(1e-5)));
  });
}

TEST_CASE("rms_norm_backward is the derivative", "[operators]") {
  using Residual = NormCase::Residual;
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 3);
    for (const Shape shape : kShapes) {
      for (const auto with : {Residual::kNone, Residual::kSeparate, Residual::kInPlace}) {
        const bool accumulate = with != Residual::kSeparate;
        NormCase c(dtype, shape, random);
        INFO(shape.rows << " x " << shape.width << ", residual " << static_cast<int>(with));
        c.forward();
        const Tensor old_dweight = c.dweight;
        c.backward(with, accumulate);

        std::vector<Expected> dx(index(c.rows * c.width));
        std::vector<Expected> dweight(index(c.width));
        for (int64_t i = 0; i < c.width; ++i) {
          const double old = accumulate ? old_dweight.at(i) : 0;
          dweight[index(i)] = {old, std::abs(old) * kUnitF32};
        }
        for (int64_t row = 0; row < c.rows; ++row) {
          const double rstd = c.exact_rstd(row);
          double mean = 0;
          double size = 0;
          for (int64_t i = 0; i < c.width; ++i) {
            const int64_t at = row * c.width + i;
            const double product = c.dy.at(at) * c.weight.at(i) * c.x.at(at) * rstd;
            mean += product / static_cast<double>(c.width);
            size += std::abs(product) / static_cast<double>(c.width);
          }
          for (int64_t i = 0; i < c.width; ++i) {
            const int64_t at = row * c.width + i;
            const double g = c.dy.at(at) * c.weight.at(i);
            const double normal = c.x.at(at) * rstd;
            const double residual = with == Residual::kNone ? 0 : c.residual.at(at);
            dx[index(at)] = {
                rstd * (g - normal * mean) + residual,
                2 * rstd * (std::abs(g) + std::abs(normal) * size) * sum_error(c.width) +
                    std::abs(residual) * kUnitF32};
            // Rows are added one by one within a block; blocks are fewer than 64.
            const double term = c.dy.at(at) * normal;
            dweight[index(i)].value += term;
            dweight[index(i)].error +=
                std::abs(term) * (static_cast<double>(c.rows) * kUnitF32 + sum_error(c.width));
          }
        }
        REQUIRE(first_wrong(c.dx, dtype, [&](int64_t i) { return dx[index(i)]; }) < 0);
        REQUIRE(first_wrong(c.dweight, DType::kF32, [&](int64_t i) { return dweight[index(i)]; }) <
                0);
      }
    }
  });
}

TEST_CASE("rms_norm gives the same bits for any thread count", "[operators]") {
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 4);
    const NormCase initial(dtype, {1000, 300}, random);
    NormCase first = initial;
    first.forward(1);
    first.backward(NormCase::Residual::kSeparate, true, 1);
    for (const int threads : {2, 3}) {
      NormCase again = initial;
      again.forward(threads);
      again.backward(NormCase::Residual::kSeparate, true, threads);
      REQUIRE(again.y == first.y);
      REQUIRE(again.rstd == first.rstd);
      REQUIRE(again.dx == first.dx);
      REQUIRE(again.dweight == first.dweight);
    }
  }
}

// Rotary embedding

struct RotaryCase {
  RotaryCase(DType dtype, int64_t row_count, int64_t head_count, int64_t dim, int64_t padding,
             CounterRandom& random)
      : type(dtype),
        rows(row_count),
        heads(head_count),
        head_dim(dim),
        stride(heads * dim + padding),
        x(Tensor::normal(dtype, rows * stride, random)),
        cos_sin(DType::kF32, kPositions * dim) {
    for (int64_t row = 0; row < rows; ++row) {
      positions.push_back(static_cast<int32_t>(random.next_below(kPositions)));
    }
    for (int64_t position = 0; position < kPositions; ++position) {
      for (int64_t i = 0; i < dim / 2; ++i) {
        cos_sin.set(position * dim + i, static_cast<float>(std::cos(angle(position, i))));
        cos_sin.set(position * dim + dim / 2 + i, static_cast<float>(std::sin(angle(position, i))));
      }
    }
  }
  double angle(int64_t position, int64_t pair) const {
    return static_cast<double>(position) *
           std::pow(10000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
  }
  void rotate(bool inverse, int threads = 2) {
    rotary({.rows = rows,
            .heads = heads,
            .head_dim = head_dim,
            .dtype = type,
            .x = x.data(),
            .x_stride = stride,
            .positions = positions.data(),
            .cos_sin = cos_sin.floats(),
            .inverse = inverse},
           arena_of(threads));
  }

  static constexpr int64_t kPositions = 50;
  DType type;
  int64_t rows, heads, head_dim, stride;
  Tensor x, cos_sin;
  std::vector<int32_t> positions;
};

TEST_CASE("rotary turns pairs by their angle and back", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 5);
    for (const int64_t rows : {0, 1, 5, 70}) {
      for (const int64_t head_dim : {2, 6, 30, 32, 34, 64, 128}) {
        const int64_t heads = 1 + static_cast<int64_t>(random.next_below(9));
        RotaryCase c(dtype, rows, heads, head_dim, rows % 3 * 8, random);
        INFO(rows << " rows, " << heads << " heads of " << head_dim);
        const Tensor original = c.x;
        c.rotate(false);
        const auto size_of_pair = [&](int64_t at) {
          const int64_t i = at % c.stride % c.head_dim;
          const int64_t other = i < c.head_dim / 2 ? at + c.head_dim / 2 : at - c.head_dim / 2;
          return std::abs(original.at(at)) + std::abs(original.at(other));
        };
        REQUIRE(first_wrong(c.x, dtype, [&](int64_t at) {
                  const int64_t column = at % c.stride;
                  if (column >= c.heads * c.head_dim) return Expected{original.at(at), 0};
                  const int64_t i = column % c.head_dim;
                  const int64_t half = c.head_dim / 2;
                  const double theta = c.angle(c.positions[index(at / c.stride)], i % half);
                  const double value = i < half ? original.at(at) * std::cos(theta) -
                                                      original.at(at + half) * std::sin(theta)
                                                : original.at(at) * std::cos(theta) +
                                                      original.at(at - half) * std::sin(theta);
                  return Expected{value, size_of_pair(at) * 3 * kUnitF32};
                }) < 0);
        c.rotate(true);
        // The rotated pair was rounded once, which turning back passes on.
        REQUIRE(first_wrong(c.x, dtype, [&](int64_t at) {
                  if (at % c.stride >= c.heads * c.head_dim) return Expected{original.at(at), 0};
                  return Expected{original.at(at),
                                  size_of_pair(at) * (2 * unit_of(dtype) + 8 * kUnitF32)};
                }) < 0);
      }
    }
  });
}

TEST_CASE("rotary gives the same bits for any thread count", "[operators]") {
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 6);
    const RotaryCase initial(dtype, 500, 6, 62, 4, random);
    RotaryCase first = initial;
    first.rotate(false, 1);
    for (const int threads : {2, 3}) {
      RotaryCase again = initial;
      again.rotate(false, threads);
      REQUIRE(again.x == first.x);
    }
  }
}

// SwiGLU

struct SwigluCase {
  SwigluCase(DType dtype, Shape shape, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        width(shape.width),
        gate_up(Tensor::normal(dtype, rows * width * 2, random, 4)),
        out(dtype, rows * width),
        dout(Tensor::normal(dtype, rows * width, random)),
        d_gate_up(dtype, rows * width * 2) {}
  void forward(int threads = 2) {
    swiglu(
        {.rows = rows, .width = width, .dtype = type, .gate_up = gate_up.data(), .out = out.data()},
        arena_of(threads));
  }
  void backward(bool in_place, int threads = 2) {
    if (in_place) d_gate_up = gate_up;
    swiglu_backward({.rows = rows,
                     .width = width,
                     .dtype = type,
                     .gate_up = in_place ? d_gate_up.data() : gate_up.data(),
                     .dout = dout.data(),
                     .d_gate_up = d_gate_up.data()},
                    arena_of(threads));
  }
  double gate(int64_t i) const { return gate_up.at(i / width * 2 * width + i % width); }
  double up(int64_t i) const { return gate_up.at((i / width * 2 + 1) * width + i % width); }

  DType type;
  int64_t rows, width;
  Tensor gate_up, out, dout, d_gate_up;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

TEST_CASE("swiglu is silu(gate) * up", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 7);
    for (const Shape shape : kShapes) {
      SwigluCase c(dtype, shape, random);
      INFO(shape.rows << " x " << shape.width);
      c.forward();
      REQUIRE(first_wrong(c.out, dtype, [&](int64_t i) {
                const double value = c.gate(i) * sigmoid(c.gate(i)) * c.up(i);
                return Expected{value, std::abs(value) * 8 * kUnitF32};
              }) < 0);
    }
  });
}

TEST_CASE("swiglu is accurate over the whole range of gates", "[operators]") {
  // With up = 1 in fp32 this is silu itself: exp (2 units), 1 + exp, 1 / that, the product.
  for_each_target_and_type([](DType dtype) {
    constexpr int64_t kWidth = 40001;
    CounterRandom random(kSeed, 8);
    SwigluCase c(dtype, {1, kWidth}, random);
    for (int64_t i = 0; i < kWidth; ++i) {
      c.gate_up.set(i, static_cast<float>(-87 + 175.0 * static_cast<double>(i) / kWidth));
      c.gate_up.set(kWidth + i, 1);
    }
    c.forward();
    REQUIRE(first_wrong(c.out, dtype, [&](int64_t i) {
              const double value = c.gate(i) * sigmoid(c.gate(i));
              return Expected{value, std::abs(value) * 6 * kUnitF32};
            }) < 0);
    c.gate_up.set(0, 300);
    c.gate_up.set(1, -300);
    c.gate_up.set(2, kNaN);
    c.gate_up.set(3, kInfinity);
    c.forward();
    REQUIRE(c.out[0] == c.gate_up[0]);
    REQUIRE(c.out[1] == 0);
    REQUIRE(std::isnan(c.out[2]));
    REQUIRE(c.out[3] == kInfinity);
  });
}

TEST_CASE("swiglu_backward is the derivative, also in place", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 9);
    for (const Shape shape : kShapes) {
      for (const bool in_place : {false, true}) {
        SwigluCase c(dtype, shape, random);
        INFO(shape.rows << " x " << shape.width << ", in place " << in_place);
        c.backward(in_place);
        REQUIRE(first_wrong(c.d_gate_up, dtype, [&](int64_t at) {
                  const int64_t column = at % (2 * c.width);
                  const int64_t i = at / (2 * c.width) * c.width + column % c.width;
                  const double g = c.gate(i);
                  const double s = sigmoid(g);
                  const double dy = c.dout.at(i);
                  if (column >= c.width) {
                    const double value = dy * g * s;
                    return Expected{value, std::abs(value) * 8 * kUnitF32};
                  }
                  // 1 - s is off by a unit of 1 at most.
                  const double terms = s * (1 + std::abs(g) * (1 - s + 1));
                  return Expected{dy * c.up(i) * s * (1 + g * (1 - s)),
                                  std::abs(dy * c.up(i)) * terms * 8 * kUnitF32};
                }) < 0);
      }
    }
  });
}

TEST_CASE("swiglu gives the same bits for any thread count", "[operators]") {
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 10);
    const SwigluCase initial(dtype, {400, 301}, random);
    SwigluCase first = initial;
    first.forward(1);
    first.backward(true, 1);
    for (const int threads : {2, 3}) {
      SwigluCase again = initial;
      again.forward(threads);
      again.backward(false, threads);
      REQUIRE(again.out == first.out);
      REQUIRE(again.d_gate_up == first.d_gate_up);
    }
  }
}

// Embedding

TEST_CASE("embedding copies rows, and its backward adds them in order", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 11);
    for (const Shape shape : {Shape{0, 8}, {1, 1}, {9, 17}, {40, 63}, {33, 65}, {300, 400}}) {
      const auto [rows, width] = shape;
      const int64_t vocabulary = 1 + static_cast<int64_t>(random.next_below(100));
      INFO(rows << " x " << width << ", vocabulary " << vocabulary);
      std::vector<int32_t> tokens;
      for (int64_t row = 0; row < rows; ++row) {
        tokens.push_back(static_cast<int32_t>(random.next_below(index(vocabulary))));
      }
      Tensor weight = Tensor::normal(dtype, vocabulary * width, random);
      Tensor out(dtype, rows * width);
      embedding({.rows = rows,
                 .width = width,
                 .vocabulary = vocabulary,
                 .dtype = dtype,
                 .tokens = tokens.data(),
                 .weight = weight.data(),
                 .out = out.data()},
                arena_of(2));
      Tensor dout = Tensor::normal(dtype, rows * width, random);
      const Tensor old = Tensor::normal(DType::kF32, vocabulary * width, random);
      Tensor sum = old;
      Tensor fresh_sum(DType::kF32, vocabulary * width);
      for (int64_t i = 0; i < rows * width; ++i) {
        const int64_t at = tokens[index(i / width)] * width + i % width;
        if (out[i] != weight[at]) FAIL("element " << i);
        sum.set(at, sum[at] + dout[i]);
        fresh_sum.set(at, fresh_sum[at] + dout[i]);
      }
      for (const int threads : {1, 2, 3}) {
        for (const bool accumulate : {true, false}) {
          Tensor dweight = old;
          embedding_backward({.rows = rows,
                              .width = width,
                              .vocabulary = vocabulary,
                              .dtype = dtype,
                              .tokens = tokens.data(),
                              .dout = dout.data(),
                              .dweight = dweight.floats(),
                              .accumulate = accumulate},
                             arena_of(threads));
          REQUIRE(dweight == (accumulate ? sum : fresh_sum));
        }
      }
    }
  });
}

// Cross-entropy

/// Where dlogits lies.
enum class Place {
  kNone,      // loss only
  kSeparate,  // in memory of its own
  kOverRow,   // each row at the start of its logits
  kPacked     // rows without gaps, from the start of logits
};

struct CrossEntropyCase {
  CrossEntropyCase(DType dtype, Shape shape, int64_t padding, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        vocabulary(shape.width),
        stride(shape.width + padding),
        logits(Tensor::normal(DType::kF32, rows * stride, random, 4)) {
    for (int64_t row = 0; row < rows; ++row) {
      const bool masked = random.next_below(4) == 0;
      targets.push_back(masked ? -100 : static_cast<int32_t>(random.next_below(index(vocabulary))));
    }
  }

  /// Leaves the gradients in `gradients`, [rows, vocabulary].
  void run(Place place, int threads = 2) {
    Tensor memory = logits;
    Tensor separate(type, rows * (vocabulary + 3));
    const int64_t logits_per_row = stride * (type == DType::kBf16 ? 2 : 1);
    int64_t dlogits_stride = logits_per_row;
    if (place == Place::kSeparate) dlogits_stride = vocabulary + 3;
    if (place == Place::kPacked) dlogits_stride = vocabulary;
    CrossEntropyArgs args{.rows = rows,
                          .vocabulary = vocabulary,
                          .dtype = type,
                          .logits = memory.floats(),
                          .logits_stride = stride,
                          .targets = targets.data(),
                          .gradient_scale = kScale,
                          .loss_sum = &loss,
                          .dlogits = place == Place::kNone       ? nullptr
                                     : place == Place::kSeparate ? separate.data()
                                                                 : memory.data(),
                          .dlogits_stride = dlogits_stride};
    auto scratch = scratch_of(cross_entropy_scratch_bytes(args));
    args.scratch = scratch.data();
    loss = kOldLoss;
    cross_entropy(args, arena_of(threads));
    if (place == Place::kNone || place == Place::kSeparate) REQUIRE(memory == logits);
    gradients = Tensor(type, rows * vocabulary);
    if (place == Place::kNone) return;
    const auto* from = static_cast<const std::byte*>(args.dlogits);
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(
          static_cast<std::byte*>(gradients.data()) + index(row * vocabulary) * size_of(type),
          from + index(row * dlogits_stride) * size_of(type), index(vocabulary) * size_of(type));
    }
  }

  void check(Place place) {
    // exp of a difference that is off by a unit of its size; blocks of at most 2048 are summed.
    const double relative = sum_error(std::min<int64_t>(vocabulary, 2048)) + 8 * kUnitF32;
    double exact_loss = kOldLoss;
    int64_t wrong = -1;
    for (int64_t row = 0; row < rows; ++row) {
      double max = -std::numeric_limits<double>::infinity();
      double sum = 0;
      const auto logit = [&](int64_t i) { return logits.at(row * stride + i); };
      for (int64_t i = 0; i < vocabulary; ++i) max = std::max(max, logit(i));
      for (int64_t i = 0; i < vocabulary; ++i) sum += std::exp(logit(i) - max);
      const int64_t target = targets[index(row)];
      if (target >= 0) exact_loss += std::log(sum) + max - logit(target);
      if (place == Place::kNone) continue;
      wrong = std::max(
          wrong,
          first_wrong(gradients, type, row * vocabulary, (row + 1) * vocabulary, [&](int64_t at) {
            if (target < 0) return Expected{0, 0};
            const int64_t i = at - row * vocabulary;
            const double scale = static_cast<double>(kScale);
            const double p = std::exp(logit(i) - max) / sum;
            const double distance = p > 0 ? max - logit(i) : 0;
            return Expected{(p - (i == target ? 1 : 0)) * scale,
                            p * scale * (relative + distance * kUnitF32)};
          }));
    }
    REQUIRE(wrong < 0);
    REQUIRE(std::abs(loss - exact_loss) <= static_cast<double>(rows) * relative);
  }

  static constexpr float kScale = 0.37F;
  static constexpr double kOldLoss = 11.5;
  DType type;
  int64_t rows, vocabulary, stride;
  Tensor logits;
  std::vector<int32_t> targets;
  double loss = 0;
  Tensor gradients{DType::kF32, 0};
};

constexpr Place kPlaces[] = {Place::kNone, Place::kSeparate, Place::kOverRow, Place::kPacked};

TEST_CASE("cross_entropy gives the loss and its gradient in every place", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 12);
    for (const Shape shape : {Shape{0, 9},
                              {1, 1},
                              {4, 2},
                              {3, 15},
                              {6, 16},
                              {5, 33},
                              {70, 1001},
                              {3, 2047},
                              {3, 2049},
                              {4, 5003}}) {
      for (const int64_t padding : {0, 12}) {
        CrossEntropyCase c(dtype, shape, padding, random);
        for (const Place place : kPlaces) {
          INFO(shape.rows << " x " << shape.width << " + " << padding << ", place "
                          << static_cast<int>(place));
          c.run(place);
          c.check(place);
        }
      }
    }
  });
}

TEST_CASE("cross_entropy takes gradients over logits and apart, and no others", "[operators]") {
  for (const DlogitsCase& c : kDlogitsCases) {
    INFO(c.what);
    CHECK(aborts([&] { cross_entropy(DlogitsArgs(c).args, arena_of(1)); }) != c.allowed);
  }
  CHECK(dlogits_place(DlogitsArgs(kDlogitsCases[0]).args) == DlogitsPlace::kOverRows);
  CHECK(dlogits_place(DlogitsArgs(kDlogitsCases[1]).args) == DlogitsPlace::kPacked);
}

TEST_CASE("cross_entropy bears large, equal and masked-out logits", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 13);
    CrossEntropyCase c(dtype, {4, 4500}, 0, random);
    c.targets = {0, 4499, 3000, 2};
    for (int64_t i = 0; i < c.vocabulary; ++i) {
      c.logits.set(i, 1e4F + static_cast<float>(i % 7));          // far from zero
      c.logits.set(c.stride + i, -3);                             // all the same
      c.logits.set(2 * c.stride + i, i < 2500 ? -kInfinity : 1);  // the first block masked out
      c.logits.set(3 * c.stride + i, i == 2 ? 200.0F : -200.0F);  // all but certain
    }
    c.run(Place::kOverRow);
    c.check(Place::kOverRow);
    REQUIRE(c.gradients[2 * c.vocabulary] == 0);
    REQUIRE(c.gradients[3 * c.vocabulary + 2] == 0);
  });
}

TEST_CASE("cross_entropy passes on what is not a number", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    for (const float bad : {kNaN, kInfinity}) {
      for (const int64_t at : {int64_t{0}, int64_t{17}, int64_t{2600}, int64_t{4499}}) {
        CounterRandom random(kSeed, 14);
        CrossEntropyCase c(dtype, {2, 4500}, 0, random);
        c.targets = {1, 1};
        c.logits.set(at, bad);
        c.run(Place::kOverRow);
        REQUIRE(std::isnan(c.loss));
        REQUIRE(std::isnan(c.gradients[at]));
        REQUIRE(std::isfinite(c.gradients[c.vocabulary + at]));
        c.targets = {-1, 1};
        c.run(Place::kOverRow);
        REQUIRE(std::isfinite(c.loss));
        REQUIRE(c.gradients[at] == 0);
      }
    }
  });
}

TEST_CASE("cross_entropy in fp32 is accurate for a large vocabulary", "[operators]") {
  CounterRandom random(kSeed, 15);
  CrossEntropyCase c(DType::kF32, {3, 32000}, 0, random);
  c.targets = {5, 31999, 16000};
  c.run(Place::kOverRow);
  double difference = 0;
  double size = 0;
  for (int64_t row = 0; row < c.rows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < c.vocabulary; ++i) sum += std::exp(c.logits.at(row * c.stride + i));
    for (int64_t i = 0; i < c.vocabulary; ++i) {
      const double p = std::exp(c.logits.at(row * c.stride + i)) / sum;
      const double exact = (p - (i == c.targets[index(row)] ? 1 : 0)) *
                           static_cast<double>(CrossEntropyCase::kScale);
      difference += std::pow(c.gradients.at(row * c.vocabulary + i) - exact, 2);
      size += exact * exact;
    }
  }
  REQUIRE(std::sqrt(difference / size) < 1e-6);
}

TEST_CASE("cross_entropy gives the same bits for any thread count and place", "[operators]") {
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 16);
    CrossEntropyCase c(dtype, {90, 3001}, 7, random);
    c.run(Place::kSeparate, 1);
    const double loss = c.loss;
    const Tensor gradients = c.gradients;
    for (const int threads : {1, 2, 3}) {
      for (const Place place : kPlaces) {
        c.run(place, threads);
        REQUIRE(std::bit_cast<uint64_t>(c.loss) == std::bit_cast<uint64_t>(loss));
        if (place != Place::kNone) REQUIRE(c.gradients == gradients);
      }
    }
  }
}

// Element by element

/// Around vector lengths, chunks and the parts of the sum of squares.
constexpr int64_t kCounts[] = {0,  1,  3,   15,   16,    17,    31,    32,
                               33, 63, 100, 1000, 32767, 32768, 32769, 100003};

TEST_CASE("add is the sum rounded once, also in place", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    CounterRandom random(kSeed, 17);
    for (const int64_t count : kCounts) {
      Tensor a = Tensor::normal(dtype, count, random);
      Tensor b = Tensor::normal(dtype, count, random);
      Tensor expected(dtype, count);
      for (int64_t i = 0; i < count; ++i) expected.set(i, a[i] + b[i]);
      Tensor out(dtype, count);
      const auto run = [&](void* to) {
        add({.count = count, .dtype = dtype, .a = a.data(), .b = b.data(), .out = to}, arena_of(2));
      };
      run(out.data());
      REQUIRE(out == expected);
      const Tensor old_a = a;
      run(a.data());
      REQUIRE(a == expected);
      a = old_a;
      run(b.data());
      REQUIRE(b == expected);
    }
  });
}

/// Random bit patterns, and those where rounding to bf16 changes its ways.
Tensor all_sorts_of_floats(int64_t count, CounterRandom& random) {
  constexpr uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x00008000, 0x00008001,
                                   0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7f7fff,
                                   0x7f7f8000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001,
                                   0xff80ffff, 0x7fc00000, 0x7fffffff, 0xffffffff};
  Tensor tensor(DType::kF32, count);
  for (int64_t i = 0; i < count; ++i) {
    const auto special = random.next_below(2) == 0;
    tensor.set(i, std::bit_cast<float>(special ? kSpecial[random.next_below(std::size(kSpecial))]
                                               : static_cast<uint32_t>(random.next_u64())));
  }
  return tensor;
}

TEST_CASE("cast converts every bit pattern as to_bf16 and to_float do", "[operators]") {
  for_each_target_and_type([](DType out_dtype) {
    CounterRandom random(kSeed, 18);
    for (const int64_t count : kCounts) {
      for (const DType in_dtype : kDTypes) {
        Tensor in = all_sorts_of_floats(count, random);
        if (in_dtype == DType::kBf16) {
          const Tensor wide = in;
          in = Tensor(DType::kBf16, count);
          for (int64_t i = 0; i < count; ++i) in.set(i, wide[i]);
        }
        Tensor expected(out_dtype, count);
        for (int64_t i = 0; i < count; ++i) expected.set(i, in[i]);
        Tensor out(out_dtype, count);
        strata::gpu::host::cast({.count = count,
                                 .in_dtype = in_dtype,
                                 .out_dtype = out_dtype,
                                 .in = in.data(),
                                 .out = out.data()},
                                arena_of(2));
        REQUIRE(out == expected);
      }
    }
  });
}

double run_finish_gradient(Tensor& accumulated, DType dtype, Tensor& gradient, int threads) {
  double sum_of_squares = -1;
  FinishGradientArgs args{.count = accumulated.count(),
                          .gradient_dtype = dtype,
                          .accumulated = accumulated.floats(),
                          .gradient = gradient.data(),
                          .sum_of_squares = &sum_of_squares};
  auto scratch = scratch_of(finish_gradient_scratch_bytes(args));
  args.scratch = scratch.data();
  finish_gradient(args, arena_of(threads));
  return sum_of_squares;
}

TEST_CASE("finish_gradient rounds and sums squares to the same bits everywhere", "[operators]") {
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 19);
    for (const int64_t count : kCounts) {
      INFO(count << " of " << name_of(dtype));
      Tensor accumulated = Tensor::normal(DType::kF32, count, random);
      Tensor expected(dtype, count);
      double exact = 0;
      for (int64_t i = 0; i < count; ++i) {
        expected.set(i, accumulated[i]);
        exact += expected.at(i) * expected.at(i);
      }
      const double sum = cpu_adam::sum_of_squares(arena_of(1), expected.data(), dtype, count);
      REQUIRE(sum == Approx(exact).epsilon(1e-12));
      for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        INFO("SIMD target " << hwy::TargetName(target));
        const OnlyTarget only(target);
        for (const int threads : {1, 2, 3}) {
          Tensor gradient(dtype, count);
          const double got = run_finish_gradient(accumulated, dtype, gradient, threads);
          REQUIRE(gradient == expected);
          REQUIRE(std::bit_cast<uint64_t>(got) == std::bit_cast<uint64_t>(sum));
        }
      }
    }
  }
}

TEST_CASE("finish_gradient shows infinities, NaNs and values beyond bf16", "[operators]") {
  for_each_target_and_type([](DType dtype) {
    for (const int64_t at : {int64_t{0}, int64_t{31}, int64_t{40000}, int64_t{70000}}) {
      Tensor accumulated(DType::kF32, 70001);
      Tensor gradient(dtype, 70001);
      accumulated.set(at, kNaN);
      REQUIRE(std::isnan(run_finish_gradient(accumulated, dtype, gradient, 2)));
      accumulated.set(at, -kInfinity);
      REQUIRE(run_finish_gradient(accumulated, dtype, gradient, 2) ==
              std::numeric_limits<double>::infinity());
      // The largest float rounds to infinity in bf16; its square is finite in double.
      accumulated.set(at, std::numeric_limits<float>::max());
      REQUIRE(std::isinf(run_finish_gradient(accumulated, dtype, gradient, 2)) ==
              (dtype == DType::kBf16));
    }
  });
}

}  // namespace
}  // namespace strata::gpu::host
