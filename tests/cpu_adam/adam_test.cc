// The bits of a step do not depend on how it is computed.
#include "cpu_adam/adam.h"

#include <oneapi/tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "catch.h"
#include "cpu_adam/adam_fixture.h"
#include "trials.h"

namespace strata::cpu_adam {
namespace {

/// Calls body(types, format) for every combination.
template <class Body>
void for_each_kind(const Body& body) {
  for (const Types types : kAllTypes) {
    for (const MomentFormat format : kMomentFormats) {
      INFO(name_of(types.weight) << " weights, " << name_of(types.gradient) << " gradients, "
                                 << name_of(format) << " moments");
      body(types, format);
    }
  }
}

/// As update() in an arena of 2, in place or not, for every target: must give `expected`.
void require_all_targets(const Gradient& gradient, const State& initial, const State& expected,
                         std::span<const Segment> segments, const StepConstants& constants) {
  tbb::task_arena arena(2);
  for_each_target([&] {
    State updated = initial;
    update(arena, make_shard(gradient, updated, updated), segments, constants);
    REQUIRE(updated.same_bits(expected));
  });
}

TEST_CASE("every SIMD target gives the bits of the definition, whatever the size") {
  CAPTURE(kSeed);
  const StepConstants constants = some_constants();
  const std::vector<size_t> sizes{0,   1,   3,   4,   5,     7,     8,     9,     15,   16,  17,
                                  31,  32,  33,  63,  64,    65,    127,   128,   129,  255, 256,
                                  257, 511, 512, 513, 32767, 32768, 32769, 33024, 65537};
  for (const size_t count : sizes) {
    CAPTURE(count);
    const Values values = values_of_any_kind(count, 1);
    const auto third = static_cast<int64_t>(count / 3);
    const Segment segments[] = {{third, true}, {static_cast<int64_t>(count) - third, false}};
    for_each_kind([&](Types types, MomentFormat format) {
      State initial(values, types.weight, format);
      const Gradient gradient(values.gradient, types.gradient);
      State expected = initial;
      const Shard shard = make_shard(gradient, expected, expected);
      update_by_the_book(shard, gradient, initial, expected, segments, constants);
      State reference = initial;
      update_reference(make_shard(gradient, reference, reference), segments, constants);
      REQUIRE(reference.same_bits(expected));
      require_all_targets(gradient, initial, expected, segments, constants);
    });
  }
}

TEST_CASE("every SIMD target gives the bits of the definition over many chunks") {
  constexpr size_t kCount = trials(1'000'003, 100'003);
  const Values values = values_of_any_kind(kCount, 2);
  const Segment segments[] = {{kCount / 3 / 256 * 256, true}, {kCount, false}};
  for_each_kind([&](Types types, MomentFormat format) {
    const State initial(values, types.weight, format);
    const Gradient gradient(values.gradient, types.gradient);
    State expected = initial;
    update_reference(make_shard(gradient, expected, expected), segments, some_constants());
    require_all_targets(gradient, initial, expected, segments, some_constants());
  });
}

TEST_CASE("several steps in place keep the bits, from cleared memory on") {
  constexpr size_t kCount = 3000;
  tbb::task_arena arena(2);
  const Values values = values_as_in_training(kCount, 3);
  const Segment segments[] = {{1111, false}, {kCount, true}};
  for_each_kind([&](Types types, MomentFormat format) {
    State initial(values, types.weight, format);
    std::fill_n(initial.moment1.data(), initial.moment1.size(), std::byte{0});
    std::fill_n(initial.moment2.data(), initial.moment2.size(), std::byte{0});
    State expected = initial;
    const auto run = [&](State& state, bool by_reference) {
      for (int64_t step = 1; step <= 8; ++step) {
        Gradient gradient(kCount, types.gradient);
        CounterRandom random(kSeed, static_cast<uint64_t>(100 + step));
        for (size_t i = 0; i < kCount; ++i) {
          gradient.set(i, values.gradient[i] * static_cast<float>(random.next_normal()));
        }
        Shard shard = make_shard(gradient, state, state);
        shard.step = step;
        const auto constants = step_constants({.weight_decay = 0.1}, step, 1);
        if (by_reference) {
          update_reference(shard, segments, constants);
        } else {
          update(arena, shard, segments, constants);
        }
      }
    };
    run(expected, true);
    for_each_target([&] {
      State state = initial;
      run(state, false);
      REQUIRE(state.same_bits(expected));
    });
  });
}

TEST_CASE("the number of threads does not change a bit") {
  const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 8);
  constexpr size_t kCount = 20 * kChunkElements + 77;
  const Values values = values_of_any_kind(kCount, 4);
  const Segment segment{kCount, true};
  for (const MomentFormat format : kMomentFormats) {
    const State initial(values, DType::kBf16, format);
    const Gradient gradient(values.gradient, DType::kBf16);
    State expected = initial;
    update_reference(make_shard(gradient, expected, expected), {&segment, 1}, some_constants());
    for (int threads = 1; threads <= 8; ++threads) {
      CAPTURE(threads, name_of(format));
      tbb::task_arena arena(threads);
      State updated = initial;
      update(arena, make_shard(gradient, updated, updated), {&segment, 1}, some_constants());
      REQUIRE(updated.same_bits(expected));
    }
  }
}

TEST_CASE("arrays may start at any element, and be updated in place or into others") {
  constexpr size_t kCount = 1100;
  tbb::task_arena arena(2);
  const Values values = values_of_any_kind(kCount, 5);
  const Segment segments[] = {{333, true}, {kCount - 333, false}};
  for_each_kind([&](Types types, MomentFormat format) {
    const State initial(values, types.weight, format);
    State expected = initial;
    const Gradient gradient(values.gradient, types.gradient);
    update_reference(make_shard(gradient, expected, expected), segments, some_constants());
    for_each_target([&] {
      for (size_t offset = 0; offset < 16; ++offset) {
        CAPTURE(offset);
        State in(kCount, types.weight, format, offset);
        in.copy_from(initial);
        const Gradient moved(values.gradient, types.gradient, (offset * 11) % 16);

        State out(kCount, types.weight, format, (offset + 5) % 16);
        update(arena, make_shard(moved, in, out), segments, some_constants());
        REQUIRE(out.same_bits(expected));
        REQUIRE(in.same_bits(initial));

        update(arena, make_shard(moved, in, in), segments, some_constants());
        REQUIRE(in.same_bits(expected));
      }
    });
  });
}

TEST_CASE("segments may cut anywhere, through vectors, blocks and chunks") {
  constexpr int64_t kCount = 3 * kChunkElements + 100;
  // As in training, so that the decay is seen in the bits of the parameters.
  const Values values = values_as_in_training(kCount, 6);
  const StepConstants constants = some_constants();
  CounterRandom random(kSeed, 7);
  // Empty segments, one element, one across two chunk borders, and more than the shard has.
  std::vector<Segment> segments{{0, true},
                                {1, true},
                                {7, false},
                                {kChunkElements - 8, true},
                                {0, false},
                                {1, false},
                                {kChunkElements + 5, true}};
  for (int i = 0; i < 60; ++i) {
    segments.push_back({static_cast<int64_t>(random.next_below(1500)), random.next_below(2) == 0});
  }
  for (int i = 0; i < 100; ++i) {
    segments.push_back({static_cast<int64_t>(random.next_below(20)), random.next_below(2) == 0});
  }
  segments.push_back({kCount, true});

  for_each_kind([&](Types types, MomentFormat format) {
    const State initial(values, types.weight, format);
    const Gradient gradient(values.gradient, types.gradient);
    State expected = initial;
    const Shard shard = make_shard(gradient, expected, expected);
    update_by_the_book(shard, gradient, initial, expected, segments, constants);
    State reference = initial;
    update_reference(make_shard(gradient, reference, reference), segments, constants);
    REQUIRE(reference.same_bits(expected));
    require_all_targets(gradient, initial, expected, segments, constants);
  });
}

TEST_CASE("chunks may be updated in any order, and by several threads") {
  constexpr size_t kCount = 7 * kChunkElements + 300;
  const Values values = values_of_any_kind(kCount, 8);
  const Segment segments[] = {{1000, true}, {kChunkElements, false}, {kCount, true}};
  for (const MomentFormat format : kMomentFormats) {
    CAPTURE(name_of(format));
    State initial(values, DType::kBf16, format);
    const Gradient gradient(values.gradient, DType::kBf16);
    State expected = initial;
    const Shard whole = make_shard(gradient, expected, expected);
    REQUIRE(chunk_count(whole) == 8);
    update_reference(whole, segments, some_constants());

    State shuffled = initial;
    const Shard shard = make_shard(gradient, shuffled, shuffled);
    for (const int64_t chunk : {5, 7, 0, 2, 6, 1, 4, 3}) {
      update_chunk(shard, chunk, segments, some_constants());
    }
    REQUIRE(shuffled.same_bits(expected));

    State in = initial;
    State threaded(kCount, DType::kBf16, format);
    const Shard into = make_shard(gradient, in, threaded);
    {
      std::vector<std::jthread> threads;
      for (int64_t first = 0; first < 3; ++first) {
        threads.emplace_back([&, first] {
          for (int64_t chunk = first; chunk < 8; chunk += 3) {
            update_chunk(into, chunk, segments, some_constants());
          }
        });
      }
    }
    REQUIRE(threaded.same_bits(expected));

    State one = initial;
    update_chunk(make_shard(gradient, one, one), 7, segments, some_constants());
    for (size_t i = 0; i < 7 * kChunkElements; ++i) {
      if (one.weight16[i] != initial.weight16[i]) FAIL("element " << i << " is of another chunk");
    }
    const size_t before = moment_bytes(format, 7 * kChunkElements);
    REQUIRE(std::equal(one.moment1.data(), one.moment1.data() + before, initial.moment1.data()));
    REQUIRE(std::equal(one.moment2.data(), one.moment2.data() + before, initial.moment2.data()));
  }
}

TEST_CASE("a shard cut in two at a chunk's border is the whole") {
  constexpr int64_t kCut = 2 * kChunkElements;
  constexpr size_t kCount = kCut + kChunkElements + 300;
  tbb::task_arena arena(2);
  const Values values = values_of_any_kind(kCount, 9);
  const Segment all{kCount, true};
  for_each_kind([&](Types types, MomentFormat format) {
    State expected(values, types.weight, format);
    State state = expected;
    const Gradient gradient(values.gradient, types.gradient);
    update(arena, make_shard(gradient, expected, expected), {&all, 1}, some_constants());

    Shard first = make_shard(gradient, state, state);
    Shard second = first;
    first.count = kCut;
    second.count -= kCut;
    second.first_chunk += kCut / kChunkElements;
    const auto after = [](const void* array, size_t bytes) {
      return static_cast<std::byte*>(const_cast<void*>(array)) + bytes;
    };
    const size_t weight_bytes = kCut * (types.weight == DType::kF32 ? 4 : 2);
    const size_t gradient_bytes = kCut * (types.gradient == DType::kF32 ? 4 : 2);
    const size_t moment = moment_bytes(format, kCut);
    second.gradient = after(second.gradient, gradient_bytes);
    second.weight = second.weight_out = after(second.weight, weight_bytes);
    if (types.weight == DType::kBf16)
      second.residual = second.residual_out = second.residual_out + kCut;
    second.moment1 = second.moment1_out = after(second.moment1, moment);
    second.moment2 = second.moment2_out = after(second.moment2, moment);
    update(arena, second, {&all, 1}, some_constants());
    update(arena, first, {&all, 1}, some_constants());
    REQUIRE(state.same_bits(expected));
  });
}

TEST_CASE("subnormal results are kept") {
  constexpr size_t kCount = 40;
  const Values values{std::vector<float>(kCount, 0x1p-140F), std::vector<float>(kCount, 0x1p-130F),
                      std::vector<float>(kCount, 0x1p-130F), std::vector<float>(kCount, 0x1p-140F)};
  tbb::task_arena arena(1);
  const Segment segment{kCount, false};
  const Gradient gradient(values.gradient, DType::kF32);
  for_each_target([&] {
    State state(values, DType::kF32, MomentFormat::kF32);
    update(arena, make_shard(gradient, state, state), {&segment, 1}, some_constants());
    for (const bool second : {false, true}) {
      for (const float moment : state.decoded(second)) {
        REQUIRE(std::fpclassify(moment) == FP_SUBNORMAL);
      }
    }
  });
}

TEST_CASE("a parameter without gradient, moments and decay stays as it is") {
  constexpr size_t kCount = 1000;
  tbb::task_arena arena(1);
  Values values = values_of_any_kind(kCount, 10);
  const Gradient gradient(kCount, DType::kBf16);
  const Segment segment{kCount, false};
  for (const MomentFormat format : kMomentFormats) {
    CAPTURE(name_of(format));
    State state(kCount, DType::kBf16, format);
    for (size_t i = 0; i < kCount; ++i) state.set_master(i, values.master[i]);
    const State initial = state;
    update(arena, make_shard(gradient, state, state), {&segment, 1}, some_constants());
    CHECK(state.weight16.same_bits(initial.weight16));
    CHECK(state.residual.same_bits(initial.residual));
    CHECK(state.moment1.same_bits(State(kCount, DType::kBf16, format).moment1) ==
          (format != MomentFormat::kInt8));  // there the smallest scale is written
    for (const float moment : state.decoded(false)) REQUIRE(moment == 0);
    for (const float moment : state.decoded(true)) {
      REQUIRE(moment <= (format == MomentFormat::kInt8 ? 0x1p-126F : 0.0F));
    }
  }
}

TEST_CASE("step constants are the formulas, rounded once") {
  const StepConstants first = step_constants(
      {.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-6, .weight_decay = 0.2},
      1, 0.25);
  // The corrections are of the rounded factors, so that they cancel in the first step.
  const double b1 = static_cast<float>(1 - 0.9);
  const double b2 = static_cast<float>(1 - 0.999);
  CHECK(first.gradient_scale == 0.25F);
  CHECK(first.one_minus_beta1 == static_cast<float>(1 - 0.9));
  CHECK(first.one_minus_beta2 == static_cast<float>(1 - 0.999));
  CHECK(first.step_size == static_cast<float>(0.01 * std::sqrt(b2) / b1));
  CHECK(first.epsilon == static_cast<float>(1e-6 * std::sqrt(b2)));
  CHECK(first.decay == static_cast<float>(0.01 * 0.2));

  const auto power = [](double one_minus, int step) {
    return std::pow(1 - static_cast<long double>(one_minus), step);
  };
  for (const int step : {2, 100, 5000}) {
    const StepConstants constants = step_constants(
        {.learning_rate = 0.01, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-6}, step, 1);
    const long double root = std::sqrt(1 - power(b2, step));
    CHECK(constants.step_size == static_cast<float>(0.01L * root / (1 - power(b1, step))));
    CHECK(constants.epsilon == static_cast<float>(1e-6L * root));
  }
  const StepConstants late = step_constants({.learning_rate = 0.01}, 1'000'000'000, 1);
  CHECK(late.step_size == 0.01F);
  CHECK(late.epsilon == 1e-8F);
  CHECK(late.decay == 0);
}

TEST_CASE("hyperparameters out of range are refused by name") {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto refused = [](const Hyperparameters& hyper, double gradient_scale, const char* name) {
    try {
      (void)step_constants(hyper, 1, gradient_scale);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUsage && std::string(error.what()).starts_with(name);
    }
    return false;
  };
  CHECK(refused({.learning_rate = -1}, 1, "learning_rate"));
  CHECK(refused({.learning_rate = kInfinity}, 1, "learning_rate"));
  CHECK(refused({.beta1 = 1}, 1, "adam_beta1"));
  CHECK(refused({.beta1 = kNan}, 1, "adam_beta1"));
  CHECK(refused({.beta2 = -0.1}, 1, "adam_beta2"));
  CHECK(refused({.epsilon = 0}, 1, "adam_epsilon"));
  CHECK(refused({.epsilon = 1e-60}, 1, "adam_epsilon"));
  CHECK(refused({.epsilon = 1e60}, 1, "adam_epsilon"));
  CHECK(refused({.weight_decay = -0.1}, 1, "weight_decay"));
  CHECK(refused({}, kNan, "the gradient scale"));
  CHECK_NOTHROW(step_constants({.learning_rate = 0, .beta1 = 0, .beta2 = 0}, 1, 0));
}

}  // namespace
}  // namespace strata::cpu_adam
