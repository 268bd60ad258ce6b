// The CUDA kernels of rows (RMSNorm, rotary embedding, SwiGLU) against their definitions in double,
// and to the same bits in every lane order.
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda_memory.h"

namespace strata::gpu::cuda {
namespace {

constexpr uint64_t kSeed = 0xc0da;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// RMSNorm

/// Scalar rows, groups of 8 around warps and blocks, the widest rows kept in registers and wider.
constexpr Shape kNormShapes[] = {{0, 8},    {1, 1},    {3, 7},    {2, 8},    {3, 31},   {2, 257},
                                 {5, 1000}, {5, 1032}, {2, 4096}, {130, 24}, {70, 260}, {2, 8184},
                                 {2, 8192}, {2, 8200}, {1, 8201}, {1, 20008}};

enum class Residual { kNone, kSeparate, kInPlace };

struct NormCase {
  NormCase(DType dtype, Shape shape, int64_t misalignment, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        width(shape.width),
        offset(misalignment),
        x(Tensor::normal(dtype, rows * width, random, 3)),
        weight(Tensor::normal(dtype, width, random)),
        dy(Tensor::normal(dtype, rows * width, random)),
        residual(Tensor::normal(dtype, rows * width, random)),
        old_dweight(Tensor::normal(DType::kF32, width, random)) {}

  struct Forward {
    Tensor y, rstd;
    bool operator==(const Forward&) const = default;
  };
  Forward forward() const {
    const DeviceMemory x_(x, offset);
    const DeviceMemory weight_(weight);
    const DeviceMemory y_(x, offset);
    const DeviceMemory rstd_(index(rows) * sizeof(float));
    rms_norm({.rows = rows,
              .width = width,
              .dtype = type,
              .epsilon = 1e-5F,
              .x = x_.data(),
              .weight = weight_.data(),
              .y = y_.data(),
              .rstd = rstd_.data<float>()},
             stream.handle());
    stream.synchronize();
    return {y_.download(type), rstd_.download(DType::kF32)};
  }

  struct Backward {
    Tensor dx, dweight;
    bool operator==(const Backward&) const = default;
  };
  Backward backward(const Tensor& rstd, Residual with, bool accumulate) const {
    const DeviceMemory x_(x, offset);
    const DeviceMemory weight_(weight);
    const DeviceMemory dy_(dy);
    const DeviceMemory rstd_(rstd);
    const DeviceMemory residual_(residual);
    const DeviceMemory dx_(residual);
    const DeviceMemory dweight_(old_dweight);
    RmsNormBackwardArgs args{.rows = rows,
                             .width = width,
                             .dtype = type,
                             .x = x_.data(),
                             .weight = weight_.data(),
                             .rstd = rstd_.data<float>(),
                             .dy = dy_.data(),
                             .dx = dx_.data(),
                             .dweight = dweight_.data<float>(),
                             .accumulate = accumulate};
    if (with == Residual::kSeparate) args.residual_gradient = residual_.data();
    if (with == Residual::kInPlace) args.residual_gradient = dx_.data();
    const DeviceMemory scratch(rms_norm_backward_scratch_bytes(args));
    args.scratch = scratch.data();
    rms_norm_backward(args, stream.handle());
    stream.synchronize();
    return {dx_.download(type), dweight_.download(DType::kF32)};
  }

  double exact_rstd(int64_t row) const {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x.at(row * width + i) * x.at(row * width + i);
    return 1 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(1e-5F));
  }

  void check(const Forward& result) const {
    const double error = sum_error(width);
    std::vector<double> rstd;
    for (int64_t row = 0; row < rows; ++row) rstd.push_back(exact_rstd(row));
    REQUIRE(first_wrong(result.rstd, [&](int64_t row) {
              return Expected{rstd[index(row)], rstd[index(row)] * error};
            }) < 0);
    REQUIRE(first_wrong(result.y, [&](int64_t i) {
              const double y = x.at(i) * rstd[index(i / width)] * weight.at(i % width);
              return Expected{y, std::abs(y) * error};
            }) < 0);
  }

  void check(const Backward& result, Residual with, bool accumulate) const {
    const double error = sum_error(width);
    std::vector<Expected> dx(index(rows * width));
    std::vector<Expected> dweight(index(width));
    for (int64_t i = 0; i < width; ++i) {
      const double old = accumulate ? old_dweight.at(i) : 0;
      dweight[index(i)] = {old, std::abs(old) * kUnitF32};
    }
    for (int64_t row = 0; row < rows; ++row) {
      const double rstd = exact_rstd(row);
      double mean = 0;
      double size = 0;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = row * width + i;
        const double product = dy.at(at) * weight.at(i) * x.at(at) * rstd;
        mean += product / static_cast<double>(width);
        size += std::abs(product) / static_cast<double>(width);
      }
      for (int64_t i = 0; i < width; ++i) {
        const int64_t at = row * width + i;
        const double g = dy.at(at) * weight.at(i);
        const double normal = x.at(at) * rstd;
        const double added = with == Residual::kNone ? 0 : residual.at(at);
        dx[index(at)] = {rstd * (g - normal * mean) + added,
                         2 * rstd * (std::abs(g) + std::abs(normal) * size) * error +
                             std::abs(added) * kUnitF32};
        const double term = dy.at(at) * normal;
        dweight[index(i)].value += term;
        dweight[index(i)].error += std::abs(term) * (static_cast<double>(rows) * kUnitF32 + error);
      }
    }
    REQUIRE(first_wrong(result.dx, [&](int64_t i) { return dx[index(i)]; }) < 0);
    REQUIRE(first_wrong(result.dweight, [&](int64_t i) { return dweight[index(i)]; }) < 0);
  }

  DType type;
  int64_t rows, width, offset;
  Tensor x, weight, dy, residual, old_dweight;
  TestStream stream;
};

TEST_CASE("cuda rms_norm and its backward are the definition", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 1);
    int number = 0;
    for (const Shape shape : kNormShapes) {
      for (const int64_t misalignment : {0, 1}) {
        if (misalignment == 1 && shape.width > 300) continue;
        INFO(shape.rows << " x " << shape.width << ", misaligned by " << misalignment);
        const NormCase c(dtype, shape, misalignment, random);
        const auto forward = in_every_lane_order([&] { return c.forward(); });
        c.check(forward);
        const auto with = static_cast<Residual>(number % 3);
        const bool accumulate = ++number % 2 == 0;
        INFO("residual " << static_cast<int>(with) << ", accumulate " << accumulate);
        const auto backward =
            in_every_lane_order([&] { return c.backward(forward.rstd, with, accumulate); });
        c.check(backward, with, accumulate);
      }
    }
  });
}

TEST_CASE("cuda rms_norm_backward adds many rows in two stages", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 2);
    // More rows than blocks, the last block's range shorter; by one warp and by several, in groups
    // and one by one.
    for (const Shape shape : {Shape{2100, 16}, {2100, 15}, {1100, 1032}, {1100, 65}}) {
      INFO(shape.rows << " x " << shape.width);
      const NormCase c(dtype, shape, 0, random);
      const auto forward = c.forward();
      const auto backward =
          in_every_lane_order([&] { return c.backward(forward.rstd, Residual::kSeparate, false); });
      c.check(backward, Residual::kSeparate, false);
    }
  });
}

/// residual_rms_norm against add, then rms_norm, and against the definition.
struct ResidualNormCase {
  ResidualNormCase(DType dtype, Shape shape, int64_t misaligned_all, int64_t misaligned_a,
                   CounterRandom& random)
      : norm(dtype, shape, misaligned_all, random),
        a_offset(misaligned_a),
        a(Tensor::normal(dtype, norm.x.count(), random, 3)),
        b(Tensor::normal(dtype, norm.x.count(), random)) {}

  struct Result {
    Tensor sum, y, rstd;
    bool operator==(const Result&) const = default;
  };
  enum class Sum { kSeparate, kOverA, kOverB };
  static constexpr Sum kSums[] = {Sum::kSeparate, Sum::kOverA, Sum::kOverB};

  Result run(bool fused, Sum place) const {
    const int64_t offset = norm.offset;
    const DeviceMemory a_(a, a_offset);
    const DeviceMemory b_(b, offset);
    const DeviceMemory separate(norm.x, offset);
    const DeviceMemory weight_(norm.weight);
    const DeviceMemory y_(norm.x, offset);
    const DeviceMemory rstd_(index(norm.rows) * sizeof(float));
    const DeviceMemory& sum = place == Sum::kSeparate ? separate : place == Sum::kOverA ? a_ : b_;
    const ResidualRmsNormArgs args{.rows = norm.rows,
                                   .width = norm.width,
                                   .dtype = norm.type,
                                   .epsilon = 1e-5F,
                                   .a = a_.data(),
                                   .b = b_.data(),
                                   .sum = sum.data(),
                                   .weight = weight_.data(),
                                   .y = y_.data(),
                                   .rstd = rstd_.data<float>()};
    if (fused) {
      residual_rms_norm(args, norm.stream.handle());
    } else {
      add({.count = a.count(), .dtype = norm.type, .a = args.a, .b = args.b, .out = args.sum},
          norm.stream.handle());
      rms_norm({.rows = args.rows,
                .width = args.width,
                .dtype = args.dtype,
                .epsilon = args.epsilon,
                .x = args.sum,
                .weight = args.weight,
                .y = args.y,
                .rstd = args.rstd},
               norm.stream.handle());
    }
    norm.stream.synchronize();
    const bool inputs_kept = (place == Sum::kOverA || a_.download(norm.type) == a) &&
                             (place == Sum::kOverB || b_.download(norm.type) == b);
    REQUIRE(inputs_kept);
    return {sum.download(norm.type), y_.download(norm.type), rstd_.download(DType::kF32)};
  }

  /// In each place of the sum that allows the same accesses.
  void check() {
    for (const Sum place : kSums) {
      if (place == Sum::kOverA && a_offset != norm.offset) continue;
      INFO("sum " << static_cast<int>(place));
      const Result fused = in_every_lane_order([&] { return run(true, place); });
      const bool same = fused == run(false, place);
      REQUIRE(same);
      REQUIRE(first_wrong(fused.sum, [&](int64_t i) {
                return Expected{a.at(i) + b.at(i), std::abs(a.at(i) + b.at(i)) * kUnitF32};
              }) < 0);
      norm.x = fused.sum;
      norm.check(NormCase::Forward{fused.y, fused.rstd});
    }
  }

  NormCase norm;
  int64_t a_offset;
  Tensor a, b;
};

TEST_CASE("cuda residual_rms_norm is add, then rms_norm, to the bit", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 20);
    std::vector<Shape> shapes(std::begin(kNormShapes), std::end(kNormShapes));
    // Round the widths at which a row takes another group, warp, block or kernel.
    for (const int64_t edge : {8, 256, 1024, 2048, 8192}) {
      for (const int64_t step : {1, 8}) {
        const auto steps = static_cast<int64_t>(random.next_below(3));
        shapes.push_back({1 + static_cast<int64_t>(random.next_below(3)), edge + steps * step});
      }
    }
    for (const Shape shape : shapes) {
      for (const int64_t all : {0, 1}) {
        for (const int64_t a : {0, 1}) {
          if (all + a > 0 && shape.width > 300) continue;
          INFO(shape.rows << " x " << shape.width << ", misaligned by " << all << ", a by " << a);
          ResidualNormCase(dtype, shape, all, a, random).check();
        }
      }
    }
  });
}

TEST_CASE("cuda residual_rms_norm passes on infinities and NaNs of its row", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    for (const int64_t width : {50, 64, 8200}) {
      CounterRandom random(kSeed, 21);
      ResidualNormCase c(dtype, {4, width}, 0, 0, random);
      c.a.set(7, kNaN);
      c.b.set(2 * width - 1, kInfinity);
      c.a.set(2 * width, kInfinity);
      c.b.set(2 * width, -kInfinity);
      for (const auto place : ResidualNormCase::kSums) {
        INFO("width " << width << ", sum " << static_cast<int>(place));
        const auto result = c.run(true, place);
        const bool same = result == c.run(false, place);
        REQUIRE(same);
        REQUIRE(std::isnan(result.rstd[0]));
        REQUIRE(result.rstd[1] == 0);
        REQUIRE(std::isnan(result.y[2 * width - 1]));
        REQUIRE(std::isnan(result.rstd[2]));
        REQUIRE(std::isfinite(result.rstd[3]));
      }
    }
  });
}

// Rotary embedding

TEST_CASE("cuda rotary turns pairs by their angle and back", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    constexpr int64_t kPositions = 50;
    CounterRandom random(kSeed, 3);
    const TestStream stream;
    int number = 0;
    for (const int64_t head_dim : {2, 6, 16, 30, 64, 80, 128, 256}) {
      for (const int64_t rows : {0, 1, 5}) {
        const int64_t heads = 1 + static_cast<int64_t>(random.next_below(11));
        const int64_t stride = heads * head_dim + ++number % 3 * 4;
        const int64_t half = head_dim / 2;
        INFO(rows << " rows of " << stride << ", " << heads << " heads of " << head_dim);
        const Tensor x = Tensor::normal(dtype, rows * stride, random);
        std::vector<int32_t> positions;
        for (int64_t row = 0; row < rows; ++row) {
          positions.push_back(static_cast<int32_t>(random.next_below(kPositions)));
        }
        const auto angle = [&](int64_t position, int64_t pair) {
          return static_cast<double>(position) *
                 std::pow(10000.0,
                          -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim));
        };
        Tensor cos_sin(DType::kF32, kPositions * head_dim);
        for (int64_t position = 0; position < kPositions; ++position) {
          for (int64_t i = 0; i < half; ++i) {
            const double theta = angle(position, i);
            cos_sin.set(position * head_dim + i, static_cast<float>(std::cos(theta)));
            cos_sin.set(position * head_dim + half + i, static_cast<float>(std::sin(theta)));
          }
        }
        const DeviceMemory positions_(positions);
        const DeviceMemory cos_sin_(cos_sin);
        const auto rotate = [&](const Tensor& from, bool inverse) {
          const DeviceMemory x_(from);
          rotary({.rows = rows,
                  .heads = heads,
                  .head_dim = head_dim,
                  .dtype = dtype,
                  .x = x_.data(),
                  .x_stride = stride,
                  .positions = positions_.data<int32_t>(),
                  .cos_sin = cos_sin_.data<float>(),
                  .inverse = inverse},
                 stream.handle());
          stream.synchronize();
          return x_.download(dtype);
        };
        const Tensor turned = in_every_lane_order([&] { return rotate(x, false); });
        const auto in_head = [&](int64_t at) { return at % stride < heads * head_dim; };
        const auto other = [&](int64_t at) {
          return at % stride % head_dim < half ? at + half : at - half;
        };
        REQUIRE(first_wrong(turned, [&](int64_t at) {
                  if (!in_head(at)) return Expected{x.at(at), 0};
                  const int64_t i = at % stride % head_dim;
                  const double theta = angle(positions[index(at / stride)], i % half);
                  const double sign = i < half ? -1 : 1;
                  const double value =
                      x.at(at) * std::cos(theta) + sign * x.at(other(at)) * std::sin(theta);
                  return Expected{value,
                                  (std::abs(x.at(at)) + std::abs(x.at(other(at)))) * 3 * kUnitF32};
                }) < 0);
        // The rotated pair was rounded once, which turning back passes on.
        REQUIRE(first_wrong(rotate(turned, true), [&](int64_t at) {
                  if (!in_head(at)) return Expected{x.at(at), 0};
                  return Expected{x.at(at), (std::abs(x.at(at)) + std::abs(x.at(other(at)))) *
                                                (2 * unit_of(dtype) + 8 * kUnitF32)};
                }) < 0);
      }
    }
  });
}

// SwiGLU

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct SwigluCase {
  SwigluCase(DType dtype, Shape shape, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        width(shape.width),
        gate_up(Tensor::normal(dtype, rows * width * 2, random, 4)),
        dout(Tensor::normal(dtype, rows * width, random)) {}
  Tensor forward() const {
    const DeviceMemory gate_up_(gate_up);
    const DeviceMemory out_(dout);
    swiglu({.rows = rows,
            .width = width,
            .dtype = type,
            .gate_up = gate_up_.data(),
            .out = out_.data()},
           stream.handle());
    stream.synchronize();
    return out_.download(type);
  }
  Tensor backward(bool in_place) const {
    const DeviceMemory gate_up_(gate_up);
    const DeviceMemory dout_(dout);
    const DeviceMemory separate(gate_up.bytes().size());
    const DeviceMemory& d_gate_up = in_place ? gate_up_ : separate;
    swiglu_backward({.rows = rows,
                     .width = width,
                     .dtype = type,
                     .gate_up = gate_up_.data(),
                     .dout = dout_.data(),
                     .d_gate_up = d_gate_up.data()},
                    stream.handle());
    stream.synchronize();
    return d_gate_up.download(type);
  }
  double gate(int64_t i) const { return gate_up.at(i / width * 2 * width + i % width); }
  double up(int64_t i) const { return gate_up.at((i / width * 2 + 1) * width + i % width); }

  DType type;
  int64_t rows, width;
  Tensor gate_up, dout;
  TestStream stream;
};

TEST_CASE("cuda swiglu and its backward are the definition", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 4);
    bool in_place = false;
    for (const Shape shape : {Shape{0, 8},
                              {1, 1},
                              {3, 7},
                              {2, 8},
                              {5, 255},
                              {3, 257},
                              {3, 2040},
                              {2, 2048},
                              {2, 2056},
                              {2, 4104}}) {
      in_place = !in_place;
      INFO(shape.rows << " x " << shape.width << ", in place " << in_place);
      const SwigluCase c(dtype, shape, random);
      const Tensor out = in_every_lane_order([&] { return c.forward(); });
      REQUIRE(first_wrong(out, [&](int64_t i) {
                const double value = c.gate(i) * sigmoid(c.gate(i)) * c.up(i);
                return Expected{value, std::abs(value) * 8 * kUnitF32};
              }) < 0);
      const Tensor d_gate_up = in_every_lane_order([&] { return c.backward(in_place); });
      REQUIRE(first_wrong(d_gate_up, [&](int64_t at) {
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
  });
}

TEST_CASE("cuda swiglu is accurate over the whole range of gates", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    constexpr int64_t kWidth = 8001;
    CounterRandom random(kSeed, 5);
    SwigluCase c(dtype, {1, kWidth}, random);
    for (int64_t i = 0; i < kWidth; ++i) {
      c.gate_up.set(i, static_cast<float>(-87 + 175.0 * static_cast<double>(i) / kWidth));
      c.gate_up.set(kWidth + i, 1);
    }
    REQUIRE(first_wrong(c.forward(), [&](int64_t i) {
              const double value = c.gate(i) * sigmoid(c.gate(i));
              return Expected{value, std::abs(value) * 6 * kUnitF32};
            }) < 0);
    const float gates[] = {300, -300, kNaN, kInfinity};
    for (int64_t i = 0; i < 4; ++i) c.gate_up.set(i, gates[i]);
    const Tensor out = c.forward();
    REQUIRE(out[0] == c.gate_up[0]);
    REQUIRE(out[1] == 0);
    REQUIRE(std::isnan(out[2]));
    REQUIRE(out[3] == kInfinity);
  });
}

}  // namespace
}  // namespace strata::gpu::cuda
