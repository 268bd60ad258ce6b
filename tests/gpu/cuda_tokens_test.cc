// The CUDA kernels of tokens (embedding, cross-entropy) against their definitions, and to the same
// bits in every lane order.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/aborts.h"
#include "gpu/cross_entropy_place.h"
#include "gpu/cross_entropy_places.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda_memory.h"

namespace strata::gpu::cuda {
namespace {

constexpr uint64_t kSeed = 0x70c;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Embedding

struct EmbeddingCase {
  EmbeddingCase(DType dtype, Shape shape, int64_t vocabulary_size, CounterRandom& random)
      : type(dtype),
        rows(shape.rows),
        width(shape.width),
        vocabulary(vocabulary_size),
        weight(Tensor::normal(dtype, vocabulary * width, random)),
        dout(Tensor::normal(dtype, rows * width, random)),
        old_dweight(Tensor::normal(DType::kF32, vocabulary * width, random)) {
    for (int64_t row = 0; row < rows; ++row) {
      // Half of them are one token, as in real text some are frequent.
      const bool frequent = random.next_below(2) == 0;
      tokens.push_back(frequent ? static_cast<int32_t>(vocabulary / 2)
                                : static_cast<int32_t>(random.next_below(index(vocabulary))));
    }
  }
  Tensor forward() const {
    const DeviceMemory tokens_(tokens);
    const DeviceMemory weight_(weight);
    const DeviceMemory out_(dout);
    embedding({.rows = rows,
               .width = width,
               .vocabulary = vocabulary,
               .dtype = type,
               .tokens = tokens_.data<int32_t>(),
               .weight = weight_.data(),
               .out = out_.data()},
              stream.handle());
    stream.synchronize();
    return out_.download(type);
  }
  Tensor backward(bool accumulate) const {
    const DeviceMemory tokens_(tokens);
    const DeviceMemory dout_(dout);
    const DeviceMemory dweight_(old_dweight);
    EmbeddingBackwardArgs args{.rows = rows,
                               .width = width,
                               .vocabulary = vocabulary,
                               .dtype = type,
                               .tokens = tokens_.data<int32_t>(),
                               .dout = dout_.data(),
                               .dweight = dweight_.data<float>(),
                               .accumulate = accumulate};
    const DeviceMemory scratch(embedding_backward_scratch_bytes(args));
    args.scratch = scratch.data();
    embedding_backward(args, stream.handle());
    stream.synchronize();
    return dweight_.download(DType::kF32);
  }
  void check() const {
    const Tensor out = in_every_lane_order([&] { return forward(); });
    Tensor sum = old_dweight;
    Tensor fresh_sum(DType::kF32, vocabulary * width);
    for (int64_t i = 0; i < rows * width; ++i) {
      const int64_t at = tokens[index(i / width)] * width + i % width;
      if (out[i] != weight[at]) FAIL("element " << i);
      sum.set(at, sum[at] + dout[i]);
      fresh_sum.set(at, fresh_sum[at] + dout[i]);
    }
    const bool same = in_every_lane_order([&] { return backward(true); }) == sum;
    REQUIRE(same);
    const bool same_from_zero = in_every_lane_order([&] { return backward(false); }) == fresh_sum;
    REQUIRE(same_from_zero);
  }

  DType type;
  int64_t rows, width, vocabulary;
  Tensor weight, dout, old_dweight;
  std::vector<int32_t> tokens;
  TestStream stream;
};

TEST_CASE("cuda embedding copies rows, and its backward adds them in order", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 6);
    for (const Shape shape : {Shape{0, 8},
                              {1, 1},
                              {9, 17},
                              {8, 16},
                              {40, 64},
                              {33, 65},
                              {17, 1032},
                              {7, 4104},
                              {511, 8},
                              {512, 5},
                              {513, 8}}) {
      const int64_t vocabulary = 1 + static_cast<int64_t>(random.next_below(100));
      INFO(shape.rows << " x " << shape.width << ", vocabulary " << vocabulary);
      EmbeddingCase(dtype, shape, vocabulary, random).check();
    }
  });
}

TEST_CASE("cuda embedding_backward sorts more tokens than a merge takes runs", "[cuda]") {
  if (!have_device()) return;
  CounterRandom random(kSeed, 7);
  // 9 tiles: 8 runs are merged into one, the ninth in the second pass.
  for (const int64_t rows : {4096, 4097, 4700}) {
    INFO(rows << " rows");
    EmbeddingCase(DType::kBf16, {rows, 8}, 700, random).check();
  }
}

// Cross-entropy

/// Where dlogits lies.
enum class Place {
  kNone,      // loss only
  kSeparate,  // in memory of its own
  kOverRow,   // each row at the start of its logits
  kPacked     // rows without gaps, from the start of logits
};
constexpr Place kPlaces[] = {Place::kNone, Place::kSeparate, Place::kOverRow, Place::kPacked};

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

  struct Result {
    double loss = 0;
    Tensor gradients{DType::kF32, 0};  // [rows, vocabulary]
    bool operator==(const Result& other) const {
      return std::bit_cast<uint64_t>(loss) == std::bit_cast<uint64_t>(other.loss) &&
             gradients == other.gradients;
    }
  };
  Result run(Place place) const {
    const DeviceMemory logits_(logits);
    const DeviceMemory targets_(targets);
    const DeviceMemory loss_(std::vector<double>{kOldLoss});
    int64_t dlogits_stride = stride * (type == DType::kBf16 ? 2 : 1);
    if (place == Place::kSeparate) dlogits_stride = vocabulary + 3;
    if (place == Place::kPacked) dlogits_stride = vocabulary;
    const DeviceMemory separate(index(rows * dlogits_stride) * size_of(type));
    const DeviceMemory& dlogits = place == Place::kSeparate ? separate : logits_;
    CrossEntropyArgs args{.rows = rows,
                          .vocabulary = vocabulary,
                          .dtype = type,
                          .logits = logits_.data<float>(),
                          .logits_stride = stride,
                          .targets = targets_.data<int32_t>(),
                          .gradient_scale = kScale,
                          .loss_sum = loss_.data<double>(),
                          .dlogits = place == Place::kNone ? nullptr : dlogits.data(),
                          .dlogits_stride = dlogits_stride};
    const DeviceMemory scratch(cross_entropy_scratch_bytes(args));
    args.scratch = scratch.data();
    cross_entropy(args, stream.handle());
    stream.synchronize();
    if (place == Place::kNone || place == Place::kSeparate) {
      const bool untouched = logits_.download(DType::kF32) == logits;
      REQUIRE(untouched);
    }
    Result result{loss_.download<double>()[0]};
    if (place == Place::kNone) return result;
    const Tensor all = dlogits.download(type);
    result.gradients = Tensor(type, rows * vocabulary);
    for (int64_t i = 0; i < rows * vocabulary; ++i) {
      result.gradients.set(i, all[i / vocabulary * dlogits_stride + i % vocabulary]);
    }
    return result;
  }

  void check(const Result& result) const {
    // exp of a difference that is off by a unit of its size, and is itself by 2; then the sums.
    const double relative = sum_error(vocabulary / 32) + 16 * kUnitF32;
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
      if (result.gradients.count() == 0) continue;
      const auto expected = [&](int64_t at) {
        if (target < 0) return Expected{0, 0};
        const int64_t i = at - row * vocabulary;
        const double scale = static_cast<double>(kScale);
        const double p = std::exp(logit(i) - max) / sum;
        const double distance = p > 0 ? max - logit(i) : 0;
        return Expected{(p - (i == target ? 1 : 0)) * scale,
                        p * scale * (relative + distance * kUnitF32)};
      };
      wrong = std::max(
          wrong, first_wrong(result.gradients, row * vocabulary, (row + 1) * vocabulary, expected));
    }
    REQUIRE(wrong < 0);
    REQUIRE(std::abs(result.loss - exact_loss) <= static_cast<double>(rows) * relative);
  }

  static constexpr float kScale = 0.37F;
  static constexpr double kOldLoss = 11.5;
  DType type;
  int64_t rows, vocabulary, stride;
  Tensor logits;
  std::vector<int32_t> targets;
  TestStream stream;
};

TEST_CASE("cuda cross_entropy gives the loss and its gradient in every place", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 8);
    for (const Shape shape :
         {Shape{1, 1}, {4, 2}, {3, 15}, {6, 16}, {5, 33}, {70, 101}, {3, 2047}, {9, 516}}) {
      for (const int64_t padding : {0, 12}) {
        const CrossEntropyCase c(dtype, shape, padding, random);
        for (const Place place : kPlaces) {
          INFO(shape.rows << " x " << shape.width << " + " << padding << ", place "
                          << static_cast<int>(place));
          c.check(in_every_lane_order([&] { return c.run(place); }));
        }
      }
    }
  });
}

TEST_CASE("cuda cross_entropy takes gradients over logits and apart, and no others", "[cuda]") {
  if (!have_device()) return;
  for (const DlogitsCase& c : kDlogitsCases) {
    INFO(c.what);
    const DlogitsArgs on_host(c);
    CHECK(aborts([&] { static_cast<void>(dlogits_place(on_host.args)); }) != c.allowed);
    // A launcher that accepted a place would launch on host memory: only its refusal can be seen.
    if (!c.allowed) CHECK(aborts([&] { cross_entropy(on_host.args, nullptr); }));
  }
}

TEST_CASE("cuda cross_entropy takes rows longer than a block's stretch", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 9);
    // 1024 threads take 4096 logits one by one or 16384 by fours: two stretches and a remainder.
    for (const Shape shape : {Shape{3, 9001}, Shape{2, 33006}}) {
      INFO(shape.rows << " x " << shape.width);
      const CrossEntropyCase c(dtype, shape, shape.width % 4 == 0 ? 0 : 2, random);
      c.check(in_every_lane_order([&] { return c.run(Place::kOverRow); }));
    }
  });
}

TEST_CASE("cuda cross_entropy takes short rows, and more than it adds at a time", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 13);
    // Rows apart by a multiple of 4 but shorter than 4; more rows than threads add losses.
    for (const Shape shape : {Shape{5, 1}, {5, 2}, {5, 3}, {600, 5}}) {
      INFO(shape.rows << " x " << shape.width);
      const CrossEntropyCase c(dtype, shape, 8 - shape.width, random);
      for (const Place place : kPlaces) {
        c.check(in_every_lane_order([&] { return c.run(place); }));
      }
    }
  });
}

TEST_CASE("cuda cross_entropy adds no rows", "[cuda]") {
  if (!have_device()) return;
  CounterRandom random(kSeed, 10);
  CrossEntropyCase c(DType::kBf16, {0, 9}, 0, random);
  REQUIRE(c.run(Place::kNone).loss == CrossEntropyCase::kOldLoss);
}

TEST_CASE("cuda cross_entropy bears large, equal and masked-out logits", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    CounterRandom random(kSeed, 11);
    CrossEntropyCase c(dtype, {4, 4500}, 0, random);
    c.targets = {0, 4499, 3000, 4000};
    for (int64_t i = 0; i < c.vocabulary; ++i) {
      c.logits.set(i, 1e4F + static_cast<float>(i % 7));          // far from zero
      c.logits.set(c.stride + i, -3);                             // all the same
      c.logits.set(2 * c.stride + i, i < 2500 ? -kInfinity : 1);  // some threads see nothing else
      c.logits.set(3 * c.stride + i, i == 4000 ? 200.0F : -200.0F);  // all but certain
    }
    const auto result = c.run(Place::kOverRow);
    c.check(result);
    REQUIRE(result.gradients[2 * c.vocabulary] == 0);
    REQUIRE(result.gradients[3 * c.vocabulary + 4000] == 0);
  });
}

TEST_CASE("cuda cross_entropy passes on what is not a number", "[cuda]") {
  if (!have_device()) return;
  for_each_type([](DType dtype) {
    for (const float bad : {kNaN, kInfinity}) {
      for (const int64_t at : {int64_t{0}, int64_t{17}, int64_t{2600}, int64_t{4499}}) {
        CounterRandom random(kSeed, 12);
        CrossEntropyCase c(dtype, {2, 4500}, 0, random);
        c.targets = {1, 1};
        c.logits.set(at, bad);
        auto result = c.run(Place::kOverRow);
        REQUIRE(std::isnan(result.loss));
        REQUIRE(std::isnan(result.gradients[at]));
        REQUIRE(std::isfinite(result.gradients[c.vocabulary + at]));
        c.targets = {-1, 1};
        result = c.run(Place::kOverRow);
        REQUIRE(std::isfinite(result.loss));
        REQUIRE(result.gradients[at] == 0);
      }
    }
  });
}

}  // namespace
}  // namespace strata::gpu::cuda
