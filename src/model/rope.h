// The rotary angles of each position (Su et al. 2021), as the table that gpu::RotaryArgs reads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/hf_config.h"

namespace strata::model {

/// Radians per position of the head_dim/2 pairs: f_i = theta^(-2i/d). With Llama-3 scaling (the
/// reference code of Llama 3.1, Meta 2024; the same as Hugging Face's rope_type "llama3"), by the
/// wavelength w = 2*pi/f and the original context c: f where w < c/high_freq_factor, f/factor where
/// w > c/low_freq_factor, and between them f*((1 - s)/factor + s) with
/// s = (c/w - low_freq_factor) / (high_freq_factor - low_freq_factor).
[[nodiscard]] std::vector<double> rotary_frequencies(const LlamaConfig& config);

/// Writes [positions, head_dim] fp32: a row is head_dim/2 cosines, then head_dim/2 sines. Angles
/// are computed in double and rounded once, at the end. Hugging Face rounds frequency and angle to
/// fp32 before the cosine, so its entries differ by up to about position * 2^-23.
void write_rotary_table(const LlamaConfig& config, int64_t positions, std::span<float> out);

}  // namespace strata::model
