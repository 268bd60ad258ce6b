// How far a step, and many steps, are from the formula. docs/adam.md states what is found here.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/parallel.h"
#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/adam_fixture.h"

namespace strata::cpu_adam {
namespace {

using Real = long double;  // 64 bits of fraction: its own errors are below 1e-11 ULP of fp32

/// |value - exact| in units in the last place of a float of size `scale`.
double ulps(float value, Real exact, Real scale) {
  int exponent = 0;
  std::frexp(std::max(std::abs(scale), Real{FLT_MIN}), &exponent);
  return static_cast<double>(std::abs(value - exact) * std::ldexp(1.0L, 24 - exponent));
}

/// One step in the arrangement of torch.optim.AdamW, unlike the one under test, and the largest
/// terms that it adds up.
struct ExactStep {
  ExactStep(const Hyperparameters& hyper, int64_t step)
      : beta1(hyper.beta1),
        beta2(hyper.beta2),
        epsilon(hyper.epsilon),
        keep(1 - Real{hyper.learning_rate} * Real{hyper.weight_decay}),
        step_size(hyper.learning_rate / (1 - std::pow(beta1, static_cast<Real>(step)))),
        root2(std::sqrt(1 - std::pow(beta2, static_cast<Real>(step)))) {}

  void operator()(Real& p, Real& m, Real& v, Real g) {
    const Real m_old = beta1 * m;
    const Real m_new = (1 - beta1) * g;
    m = m_old + m_new;
    v = beta2 * v + (1 - beta2) * g * g;
    const Real factor = step_size / (std::sqrt(v) / root2 + epsilon);
    m_scale = std::max({std::abs(m_old), std::abs(m_new), std::abs(m)});
    change_scale = factor * m_scale;
    const Real before = p;
    p = before * keep - factor * m;
    scale = std::max({std::abs(before), std::abs(p), change_scale});
  }

  Real beta1, beta2, epsilon, keep, step_size, root2;
  Real m_scale = 0, change_scale = 0, scale = 0;  // of the last element
};

/// Parameters from far below their updates to far above, gradients from 1e-12 to 1e6 and, now and
/// then, far from what the moments remember.
Values values_of_all_magnitudes(size_t count, uint64_t stream) {
  CounterRandom random(kSeed, stream);
  Values values;
  for (size_t i = 0; i < count; ++i) {
    const double size = std::exp2(60 * random.next_uniform() - 40);
    const double surprise =
        random.next_below(4) == 0 ? std::exp2(40 * random.next_uniform() - 20) : 1;
    values.master.push_back(random_scale(random, -40, 20));
    values.moment1.push_back(static_cast<float>(0.4 * size * random.next_normal()));
    values.moment2.push_back(static_cast<float>(size * size * (0.02 + random.next_uniform())));
    values.gradient.push_back(static_cast<float>(size * surprise * random.next_normal()));
  }
  return values;
}

/// The largest distances of one step, in units of the largest term.
struct Worst {
  double master = 0;        // of parameters at least four times as large as the change to them
  double small_master = 0;  // of the others, which have the change's own errors
  double moment1 = 0, moment2 = 0;

  void merge(const Worst& other) {
    master = std::max(master, other.master);
    small_master = std::max(small_master, other.small_master);
    moment1 = std::max(moment1, other.moment1);
    moment2 = std::max(moment2, other.moment2);
  }
};

Worst worst_of_one_step(const Hyperparameters& hyper, int64_t step, double gradient_scale) {
  constexpr int64_t kParts = 12;
  constexpr size_t kElements = 32768;
  const StepConstants constants = step_constants(hyper, step, gradient_scale);
  std::mutex mutex;
  Worst worst;
  tbb::task_arena arena(2);
  for_each_index(arena, kParts, [&](int64_t part) {
    const Values values = values_of_all_magnitudes(kElements, static_cast<uint64_t>(part));
    State in(values, DType::kBf16, MomentFormat::kF32);
    State out(kElements, DType::kBf16, MomentFormat::kF32);
    const Gradient gradient(values.gradient, DType::kF32);
    const Segment segment{kElements, true};
    update_chunk(make_shard(gradient, in, out), 0, {&segment, 1}, constants);
    const std::vector<float> moment1 = out.decoded(false);
    const std::vector<float> moment2 = out.decoded(true);
    ExactStep exact(hyper, step);
    Worst here;
    for (size_t i = 0; i < kElements; ++i) {
      Real p = values.master[i];
      Real m = values.moment1[i];
      Real v = values.moment2[i];
      exact(p, m, v, values.gradient[i] * static_cast<Real>(gradient_scale));
      const bool is_small = std::abs(values.master[i]) < 4 * exact.change_scale;
      const double distance = ulps(out.master(i), p, exact.scale);
      here.merge({.master = is_small ? 0 : distance,
                  .small_master = is_small ? distance : 0,
                  .moment1 = ulps(moment1[i], m, exact.m_scale),
                  .moment2 = ulps(moment2[i], v, v)});
    }
    const std::lock_guard lock(mutex);
    worst.merge(here);
  });
  return worst;
}

TEST_CASE("one step is within 2 ULP of the formula in long double") {
  CAPTURE(kSeed);
  Worst worst;
  Worst worst_scaled;
  for (const double weight_decay : {0.0, 0.1}) {
    for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{1'000'000}}) {
      const Hyperparameters hyper{.weight_decay = weight_decay};
      worst.merge(worst_of_one_step(hyper, step, 1));
      // A float, but no power of two: the scaled gradient is rounded.
      worst_scaled.merge(worst_of_one_step(hyper, step, 0.3125));
    }
  }
  CAPTURE(worst.master, worst.small_master, worst.moment1, worst.moment2);
  CAPTURE(worst_scaled.master, worst_scaled.small_master, worst_scaled.moment1,
          worst_scaled.moment2);
  // Found: 1.08, 4.82, 1.51 and 1.52; where the gradient is scaled 1.21, 4.32, 2.24 and 3.15
  // (docs/adam.md says where the roundings are).
  CHECK(worst.master <= 1.5);
  CHECK(worst.small_master <= 5.5);
  CHECK(worst.moment1 <= 2);
  CHECK(worst.moment2 <= 2);
  CHECK(worst_scaled.master <= 1.5);
  CHECK(worst_scaled.small_master <= 5.5);
  CHECK(worst_scaled.moment1 <= 2.5);
  CHECK(worst_scaled.moment2 <= 3.5);
}

TEST_CASE("ten thousand steps stay near a run in long double") {
  constexpr int64_t kSteps = 10'000;
  constexpr size_t kElements = 64;  // of one part
  constexpr int64_t kParts = 24;
  const Hyperparameters hyper{.weight_decay = 0.1};
  std::vector<StepConstants> constants;
  std::vector<ExactStep> exact;
  for (int64_t step = 1; step <= kSteps; ++step) {
    constants.push_back(step_constants(hyper, step, 1));
    exact.emplace_back(hyper, step);
  }
  struct Drift {
    double largest = 0;  // in ULP of the largest magnitude that the parameter has had
    double squares = 0;  // the same, squared and added
    double of_path = 0;  // relative to the sum of its changes
    double moment1 = 0;  // relative to the root of moment2
    double moment2 = 0;  // relative
  };
  std::mutex mutex;
  Drift drift;
  tbb::task_arena arena(2);
  for_each_index(arena, kParts, [&](int64_t part) {
    const Values values = values_as_in_training(kElements, static_cast<uint64_t>(1000 + part));
    State state(kElements, DType::kBf16, MomentFormat::kF32);
    std::vector<Real> p(kElements);
    std::vector<Real> m(kElements);
    std::vector<Real> v(kElements);
    std::vector<Real> largest(kElements);
    std::vector<Real> path(kElements);
    for (size_t i = 0; i < kElements; ++i) {
      state.set_master(i, values.master[i]);
      p[i] = values.master[i];
      largest[i] = std::abs(p[i]);
    }
    Gradient gradient(kElements, DType::kF32);
    const Segment segment{kElements, true};
    const Shard shard = make_shard(gradient, state, state);
    CounterRandom random(kSeed, static_cast<uint64_t>(2000 + part));
    for (size_t step = 0; step < kSteps; ++step) {
      ExactStep exact_step = exact[step];
      for (size_t i = 0; i < kElements; ++i) {
        // Noise around a small mean, as gradients are.
        const double noise = 2 * random.next_uniform() - 1;
        gradient.set(i, static_cast<float>(values.gradient[i] * (0.1 + noise)));
        const Real before = p[i];
        exact_step(p[i], m[i], v[i], gradient[i]);
        largest[i] = std::max(largest[i], std::abs(p[i]));
        path[i] += std::abs(p[i] - before);
      }
      update_chunk(shard, 0, {&segment, 1}, constants[step]);
    }
    const std::vector<float> moment1 = state.decoded(false);
    const std::vector<float> moment2 = state.decoded(true);
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < kElements; ++i) {
      const auto relative = [](Real error, Real to) {
        return static_cast<double>(std::abs(error) / to);
      };
      const double distance = ulps(state.master(i), p[i], largest[i]);
      drift.largest = std::max(drift.largest, distance);
      drift.squares += distance * distance;
      drift.of_path = std::max(drift.of_path, relative(state.master(i) - p[i], path[i]));
      drift.moment1 = std::max(drift.moment1, relative(moment1[i] - m[i], std::sqrt(v[i])));
      drift.moment2 = std::max(drift.moment2, relative(moment2[i] - v[i], v[i]));
    }
  });
  const double rms = std::sqrt(drift.squares / static_cast<double>(kElements * kParts));
  CAPTURE(drift.largest, rms, drift.of_path, drift.moment1, drift.moment2);
  // Found: 59.6, 12.9, 2.5e-6, 9e-8 and 3e-7 (docs/adam.md).
  CHECK(drift.largest <= 80);
  CHECK(rms <= 16);
  CHECK(drift.of_path <= 4e-6);
  CHECK(drift.moment1 <= 2e-7);
  CHECK(drift.moment2 <= 5e-7);
}

TEST_CASE("gradients of every size leave everything finite and in its bounds") {
  constexpr size_t kCount = 1000;
  tbb::task_arena arena(2);
  const Segment segment{kCount, true};
  for (const MomentFormat format : kMomentFormats) {
    State state(kCount, DType::kBf16, format);
    for (size_t i = 0; i < kCount; ++i) state.set_master(i, 0.02F);
    Gradient gradient(kCount, DType::kF32);
    CounterRandom random(kSeed, 2);
    for (int64_t step = 1; step <= 200; ++step) {
      for (size_t i = 0; i < kCount; ++i) {
        gradient.set(i, i < 100 ? FLT_MAX : i < 200 ? -FLT_MAX : random_of_any_kind(random, 128));
      }
      const auto constants = step_constants({}, step, step % 3 == 0 ? 1000 : 1);
      Shard shard = make_shard(gradient, state, state);
      shard.step = step;
      update(arena, shard, {&segment, 1}, constants);
    }
    CAPTURE(name_of(format));
    const std::vector<float> moment1 = state.decoded(false);
    const std::vector<float> moment2 = state.decoded(true);
    for (size_t i = 0; i < kCount; ++i) {
      if (!std::isfinite(state.master(i))) FAIL("parameter " << i << ": " << state.master(i));
      // An eighth more where kInt8 rounds the largest up.
      if (!(std::abs(moment1[i]) <= 0x1.2p63F)) FAIL("moment1 " << i << ": " << moment1[i]);
      if (!(moment2[i] >= 0 && moment2[i] <= 0x1.2p126F)) FAIL("moment2 " << i);
    }
    for (size_t i = 0; i < 200; ++i) {
      // The bound's own average, and steps as long as any other.
      CHECK(std::abs(moment1[i]) > 0x1.8p62F);
      CHECK(std::abs(std::abs(state.master(i)) - 0.2F) < 0.05F);
    }
  }
}

TEST_CASE("ten steps agree with torch.optim.AdamW in float64") {
  const auto golden =
      nlohmann::json::parse(read_text_file(std::string(STRATA_TEST_DATA_DIR) + "/adamw.json"));
  const Hyperparameters hyper{.learning_rate = golden.at("learning_rate"),
                              .beta1 = golden.at("beta1"),
                              .beta2 = golden.at("beta2"),
                              .epsilon = golden.at("epsilon"),
                              .weight_decay = golden.at("weight_decay")};
  const auto initial = golden.at("initial").get<std::vector<float>>();
  const auto count = static_cast<int64_t>(initial.size());
  const int64_t decayed = golden.at("decayed");
  const Segment segments[] = {{decayed, true}, {count - decayed, false}};
  const auto expected = [&](const char* name) {
    return golden.at("expected").at(name).get<std::vector<float>>();
  };
  const std::vector<float> parameters = expected("parameters");
  const std::vector<float> moment1 = expected("moment1");
  const std::vector<float> moment2 = expected("moment2");
  REQUIRE(golden.at("gradients").size() == 10);

  tbb::task_arena arena(1);
  for (const Types types : kAllTypes) {
    CAPTURE(name_of(types.weight), name_of(types.gradient));
    State state(initial.size(), types.weight, MomentFormat::kF32);
    for (size_t i = 0; i < initial.size(); ++i) state.set_master(i, initial[i]);
    std::vector<float> largest_gradient(initial.size());
    int64_t step = 0;
    for (const auto& row : golden.at("gradients")) {
      Gradient gradient(initial.size(), types.gradient);
      for (size_t i = 0; i < initial.size(); ++i) {
        const float value = row.at(i);
        gradient.set(i, value);
        REQUIRE(gradient[i] == value);  // the gradients are bf16 values
        largest_gradient[i] = std::max(largest_gradient[i], std::abs(value));
      }
      update(arena, make_shard(gradient, state, state), segments, step_constants(hyper, ++step, 1));
    }
    const std::vector<float> m = state.decoded(false);
    const std::vector<float> v = state.decoded(true);
    double worst = 0;
    double worst_moment = 0;
    for (size_t i = 0; i < initial.size(); ++i) {
      const float scale = std::max(std::abs(initial[i]), std::abs(parameters[i]));
      worst = std::max(worst, ulps(state.master(i), parameters[i], scale));
      worst_moment = std::max({worst_moment, ulps(m[i], moment1[i], largest_gradient[i]),
                               ulps(v[i], moment2[i], moment2[i])});
    }
    CAPTURE(worst, worst_moment);
    // Found: 2 and 2, where PyTorch's own fp32 run differs by up to 4.5 (docs/adam.md).
    CHECK(worst <= 4);
    CHECK(worst_moment <= 4);
  }
}

}  // namespace
}  // namespace strata::cpu_adam
