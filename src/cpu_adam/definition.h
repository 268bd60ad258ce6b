// The AdamW update of one parameter: what every other implementation must equal bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "base/bf16.h"
#include "cpu_adam/moments.h"
#include "cpu_adam/segments.h"
#include "cpu_adam/shard.h"

namespace strata::cpu_adam {

struct Element {
  float master, moment1, moment2;
};

/// Gradients beyond this are taken as this: so moments stay finite, |moment1| <= 2^63 and moment2
/// <= 2^126, whatever the gradients.
inline constexpr float kGradientBound = 0x1p63F;

/// `decay` is constants.decay, or 0 in a segment without decay. Each line is one binary32
/// operation, numbered as in docs/adam.md. The build must not contract them (-ffp-contract=off),
/// nor relax them
/// (-ffast-math).
[[nodiscard]] inline Element update_element(const Element& old, float gradient,
                                            const StepConstants& constants, float decay) noexcept {
  const float scaled = gradient * constants.gradient_scale;                     // 1
  const float g = std::min(std::max(scaled, -kGradientBound), kGradientBound);  // 2
  const float d = g - old.moment1;                                              // 3
  const float m = std::fma(constants.one_minus_beta1, d, old.moment1);          // 4
  const float t = std::fma(g, g, -old.moment2);                                 // 5
  const float v = std::fma(constants.one_minus_beta2, t, old.moment2);          // 6
  const float r = std::sqrt(v);                                                 // 7
  const float n = r + constants.epsilon;                                        // 8
  const float q = m / n;                                                        // 9
  const float w = decay * old.master;                                           // 10
  const float x = std::fma(constants.step_size, q, w);                          // 11
  return {old.master - x, m, v};                                                // 12
}

/// Decodes elements [begin, begin + out.size()) of a moment of `count` elements.
void load_elements(bool second, int64_t count, MomentFormat format, const void* moment,
                   int64_t begin, std::span<float> out) noexcept;

/// Encodes one block: values.size() elements from `begin`, a multiple of kMomentBlock, which reach
/// the block's or the moment's end. Rounds to nearest where `key` is null.
void store_block(bool second, int64_t count, MomentFormat format, void* moment, int64_t begin,
                 std::span<const float> values, const RoundingKey* key) noexcept;

/// update_element over elements [begin, end) of the shard, with decoded moments, moment1[0] being
/// that of element `begin`.
void update_elements(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                     float decay, float* moment1, float* moment2) noexcept;

/// The whole definition over elements [begin, end), which lie in one chunk and are whole blocks but
/// for the shard's last.
void update_blocks(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                   SegmentCursor& segments) noexcept;

}  // namespace strata::cpu_adam
