// The random bits of stochastic rounding, and what they are keyed by.
#include <bit>
#include <cmath>
#include <vector>

#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/adam_fixture.h"
#include "cpu_adam/moments.h"
#include "trials.h"

namespace strata::cpu_adam {
namespace {

constexpr uint64_t kChunks = 64;
constexpr uint32_t kElements = kChunkElements;
constexpr double kTotal = static_cast<double>(kChunks) * kElements;

std::vector<uint32_t> bits_of_chunk(uint64_t seed, int64_t step, uint64_t chunk) {
  const RoundingKey key = rounding_key(seed, step, chunk);
  std::vector<uint32_t> bits(kElements);
  for (uint32_t i = 0; i < kElements; ++i) bits[i] = rounding_bits(key, i);
  return bits;
}

/// What moment1 and moment2 round by, as numbers around 0 with a variance of 1.
float uniform1(uint32_t bits) {
  return (static_cast<float>(bits >> 16) - 32767.5F) * static_cast<float>(std::sqrt(12) / 65536);
}
float uniform2(uint32_t bits) { return uniform1(bits << 16); }

/// Sum of products of first(a[i]) and second(b[i + lag]).
template <class First, class Second>
double correlate(const std::vector<uint32_t>& a, First first, const std::vector<uint32_t>& b,
                 Second second, size_t lag) {
  double sum = 0;
  for (size_t i = 0; i + lag < a.size(); ++i) {
    sum += static_cast<double>(first(a[i])) * second(b[i + lag]);
  }
  return sum;
}

/// Of `cells` equally likely counts, in standard deviations from what chance gives.
double chi_square(const std::vector<double>& counts, double total) {
  const double expected = total / static_cast<double>(counts.size());
  double sum = 0;
  for (const double count : counts) sum += (count - expected) * (count - expected) / expected;
  const auto freedom = static_cast<double>(counts.size() - 1);
  return (sum - freedom) / std::sqrt(2 * freedom);
}

TEST_CASE("rounding bits are uniform, one by one, by bytes, and by pairs of moments") {
  std::vector<double> top(256);
  std::vector<double> bottom(256);
  std::vector<double> bf16_pairs(256);
  std::vector<double> int8_pairs(256);
  std::vector<double> ones(32);
  for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
    for (const uint32_t bits : bits_of_chunk(kSeed, 7, chunk)) {
      ++top[bits >> 24];
      ++bottom[bits & 0xff];
      ++bf16_pairs[(bits >> 28 << 4) | (bits >> 12 & 15)];
      ++int8_pairs[(bits >> 28 << 4) | (bits >> 15 & 15)];
      for (size_t k = 0; k < 32; ++k) ones[k] += bits >> k & 1;
    }
  }
  CHECK(std::abs(chi_square(top, kTotal)) < 5);
  CHECK(std::abs(chi_square(bottom, kTotal)) < 5);
  CHECK(std::abs(chi_square(bf16_pairs, kTotal)) < 5);
  CHECK(std::abs(chi_square(int8_pairs, kTotal)) < 5);
  for (const double count : ones) {
    CHECK(std::abs(count - kTotal / 2) < 5 * std::sqrt(kTotal) / 2);
  }
}

TEST_CASE("neighbours' rounding bits hardly correlate") {
  // One multiplication leaves traces at single distances; what is bounded is what they amount to.
  double largest = 0;
  double squares = 0;
  constexpr size_t kLags = trials(64, 8);
  for (size_t lag = 1; lag <= kLags; ++lag) {
    double sum1 = 0;
    double sum2 = 0;
    double across = 0;
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
      const std::vector<uint32_t> bits = bits_of_chunk(kSeed, 8, chunk);
      sum1 += correlate(bits, uniform1, bits, uniform1, lag);
      sum2 += correlate(bits, uniform2, bits, uniform2, lag);
      across += correlate(bits, uniform1, bits, uniform2, lag);
    }
    CHECK(std::abs(across) < 5 * std::sqrt(kTotal));
    largest = std::max({largest, std::abs(sum1), std::abs(sum2)});
    squares += sum1 * sum1 / kTotal / kTotal;
  }
  CAPTURE(largest / kTotal, std::sqrt(squares));
  CHECK(largest / kTotal < 0.01);
  CHECK(std::sqrt(squares) < 0.02);
}

TEST_CASE("moments, steps, chunks and seeds round independently") {
  double moments = 0;
  double steps1 = 0;
  double steps2 = 0;
  double chunks1 = 0;
  double chunks2 = 0;
  double seeds1 = 0;
  for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
    const auto bits = bits_of_chunk(kSeed, 9, chunk);
    const auto next_step = bits_of_chunk(kSeed, 10, chunk);
    const auto next_chunk = bits_of_chunk(kSeed, 9, chunk + 1);
    const auto next_seed = bits_of_chunk(kSeed + 1, 9, chunk);
    moments += correlate(bits, uniform1, bits, uniform2, 0);
    steps1 += correlate(bits, uniform1, next_step, uniform1, 0);
    steps2 += correlate(bits, uniform2, next_step, uniform2, 0);
    chunks1 += correlate(bits, uniform1, next_chunk, uniform1, 0);
    chunks2 += correlate(bits, uniform2, next_chunk, uniform2, 0);
    seeds1 += correlate(bits, uniform1, next_seed, uniform1, 0);
  }
  for (const double sum : {moments, steps1, steps2, chunks1, chunks2, seeds1}) {
    CHECK(std::abs(sum) < 5 * std::sqrt(kTotal));
  }
}

TEST_CASE("stored moments depend on seed, step and chunk, and on nothing else") {
  constexpr size_t kCount = 2000;
  tbb::task_arena arena(2);
  const Values values = values_as_in_training(kCount, 31);
  const Gradient gradient(values.gradient, DType::kBf16);
  const Segment segment{kCount, true};
  for (const MomentFormat format : {MomentFormat::kBf16, MomentFormat::kInt8}) {
    State in(values, DType::kBf16, format);
    const auto stored = [&](uint64_t seed, int64_t step, uint64_t first_chunk) {
      State out(kCount, DType::kBf16, format);
      Shard shard = make_shard(gradient, in, out);
      shard.seed = seed;
      shard.step = step;
      shard.first_chunk = first_chunk;
      // Not step_constants(step): only the rounding is to differ.
      update(arena, shard, {&segment, 1}, some_constants());
      return out;
    };
    const State state = stored(1, 2, 3);
    CHECK(state.same_bits(stored(1, 2, 3)));
    for (const State& other : {stored(2, 2, 3), stored(1, 3, 3), stored(1, 2, 4),
                               stored(1ULL << 40, 2, 3), stored(1, 2, 3ULL << 40)}) {
      CHECK(other.weight16.same_bits(state.weight16));
      CHECK(other.residual.same_bits(state.residual));
      for (const bool second : {false, true}) {
        const std::vector<float> a = state.decoded(second);
        const std::vector<float> b = other.decoded(second);
        size_t different = 0;
        for (size_t i = 0; i < kCount; ++i) different += a[i] != b[i];
        // Two roundings of a fraction that may be anything differ in a third of all cases.
        CHECK(different > kCount / 4);
        CHECK(different < kCount * 5 / 12);
      }
    }
  }
}

TEST_CASE("the rounding bits of a stored run can be made again") {
  // Known answers: a resumed run of another build must round alike.
  const RoundingKey key = rounding_key(0x123456789abcdef0, 1000, 77);
  CHECK(key.first == 0x3d8fcc22);
  CHECK(key.second == 0xd6b577a6);
  CHECK(rounding_bits(key, 0) == 0xdc1ee7be);
  CHECK(rounding_bits(key, 32767) == 0xd41e902e);
}

}  // namespace
}  // namespace strata::cpu_adam
