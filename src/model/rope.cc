#include "model/rope.h"

#include <cmath>
#include <numbers>

#include "base/error.h"

namespace strata::model {

std::vector<double> rotary_frequencies(const LlamaConfig& config) {
  std::vector<double> frequencies(static_cast<size_t>(config.head_dim / 2));
  for (size_t pair = 0; pair < frequencies.size(); ++pair) {
    const double exponent = -2.0 * static_cast<double>(pair) / static_cast<double>(config.head_dim);
    frequencies[pair] = std::pow(config.rope_theta, exponent);
  }
  if (!config.rope_scaling) return frequencies;

  const Llama3RopeScaling& scaling = *config.rope_scaling;
  const auto context = static_cast<double>(scaling.original_max_position_embeddings);
  for (double& frequency : frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    if (wavelength < context / scaling.high_freq_factor) continue;
    if (wavelength > context / scaling.low_freq_factor) {
      frequency /= scaling.factor;
      continue;
    }
    const double smooth = (context / wavelength - scaling.low_freq_factor) /
                          (scaling.high_freq_factor - scaling.low_freq_factor);
    frequency *= (1 - smooth) / scaling.factor + smooth;
  }
  return frequencies;
}

void write_rotary_table(const LlamaConfig& config, int64_t positions, std::span<float> out) {
  STRATA_CHECK(out.size() == static_cast<size_t>(positions * config.head_dim),
               "a rotary table is [positions, head_dim]");
  const std::vector<double> frequencies = rotary_frequencies(config);
  const size_t half = frequencies.size();
  for (size_t position = 0; position < static_cast<size_t>(positions); ++position) {
    float* row = out.data() + position * 2 * half;
    for (size_t pair = 0; pair < half; ++pair) {
      const double angle = static_cast<double>(position) * frequencies[pair];
      row[pair] = static_cast<float>(std::cos(angle));
      row[half + pair] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace strata::model
