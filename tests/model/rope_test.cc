#include "model/rope.h"

#include <cmath>
#include <numbers>
#include <vector>

#include "catch.h"

namespace strata::model {
namespace {

LlamaConfig config_of(int64_t head_dim, double theta) {
  LlamaConfig config;
  config.head_dim = head_dim;
  config.rope_theta = theta;
  return config;
}

LlamaConfig llama31() {
  LlamaConfig config = config_of(128, 500000);
  config.rope_scaling = Llama3RopeScaling{.factor = 8,
                                          .low_freq_factor = 1,
                                          .high_freq_factor = 4,
                                          .original_max_position_embeddings = 8192};
  return config;
}

TEST_CASE("rotary frequencies fall from 1 by equal ratios") {
  const std::vector<double> frequencies = rotary_frequencies(config_of(64, 10000));
  REQUIRE(frequencies.size() == 32);
  CHECK(frequencies[0] == 1.0);
  CHECK(frequencies[16] == Approx(0.01).epsilon(1e-14));
  CHECK(frequencies[31] == Approx(std::pow(10000, -62.0 / 64)).epsilon(1e-14));
}

TEST_CASE("Llama-3 scaling keeps fast pairs, divides slow ones and joins them without a step") {
  LlamaConfig config = llama31();
  const std::vector<double> scaled = rotary_frequencies(config);
  config.rope_scaling.reset();
  const std::vector<double> plain = rotary_frequencies(config);

  int kept = 0;
  int divided = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double turns = 8192 * plain[i] / (2 * std::numbers::pi);  // over the original context
    CAPTURE(i, turns);
    if (turns > 4) {
      CHECK(scaled[i] == plain[i]);
      ++kept;
    } else if (turns < 1) {
      CHECK(scaled[i] == plain[i] / 8);
      ++divided;
    } else {
      const double share = (turns - 1) / 3;
      CHECK(scaled[i] == Approx(plain[i] * (share + (1 - share) / 8)).epsilon(1e-12));
      CHECK(scaled[i] < plain[i]);
      CHECK(scaled[i] > plain[i] / 8);
    }
    if (i > 0) CHECK(scaled[i] < scaled[i - 1]);
  }
  CHECK(kept == 29);
  CHECK(divided == 29);
}

// Computed with transformers' formula in NumPy, fp32 as there, from the published config.
TEST_CASE("Llama-3.1 frequencies are those of Hugging Face") {
  const std::vector<double> scaled = rotary_frequencies(llama31());
  CHECK(scaled[1] == Approx(0.814617217).epsilon(3e-7));
  CHECK(scaled[28] == Approx(0.00321144611).epsilon(3e-7));
  CHECK(scaled[29] == Approx(0.00216657063).epsilon(3e-7));
  CHECK(scaled[31] == Approx(0.00085675146).epsilon(3e-7));
  CHECK(scaled[34] == Approx(0.000178507791).epsilon(3e-7));
  CHECK(scaled[35] == Approx(9.55621217e-05).epsilon(3e-7));
  CHECK(scaled[63] == Approx(3.06892588e-07).epsilon(3e-7));
}

TEST_CASE("a rotary table holds cosines, then sines, of every position") {
  const LlamaConfig config = llama31();
  for (const int64_t positions : {0, 1, 2, 1000}) {
    std::vector<float> table(static_cast<size_t>(positions) * 128, -7.0F);
    write_rotary_table(config, positions, table);
    const std::vector<double> frequencies = rotary_frequencies(config);
    int wrong = 0;
    for (size_t p = 0; p < static_cast<size_t>(positions); ++p) {
      for (size_t i = 0; i < 64; ++i) {
        const double angle = static_cast<double>(p) * frequencies[i];
        wrong += table[p * 128 + i] != static_cast<float>(std::cos(angle));
        wrong += table[p * 128 + 64 + i] != static_cast<float>(std::sin(angle));
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("far positions keep fp32 accuracy") {
  constexpr int64_t kPositions = 131072;
  const LlamaConfig config = config_of(8, 10000);
  std::vector<float> table(kPositions * 8);
  write_rotary_table(config, kPositions, table);
  // Pair 2 turns by exactly 1/100 a position (10000^(-4/8)).
  const long double angle = 131071.0L / 100.0L;
  const float* row = table.data() + (kPositions - 1) * 8;
  CHECK(std::fabs(row[2] - static_cast<float>(std::cos(angle))) < 1e-7F);
  CHECK(std::fabs(row[4 + 2] - static_cast<float>(std::sin(angle))) < 1e-7F);
}

}  // namespace
}  // namespace strata::model
