// What AdamW works on, as plain data: for the CPU (adam.h) and for devices.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cpu_adam/moments.h"

namespace strata::cpu_adam {

/// What one step multiplies with, computed once in double and rounded to float. With c1 = 1 -
/// beta1^step and c2 = 1 - beta2^step, of the betas that the rounded one_minus_beta1 and
/// one_minus_beta2 stand for.
struct StepConstants {
  float gradient_scale;   // unscaling and clipping, in one factor
  float one_minus_beta1;  // 1 - beta in double, then rounded
  float one_minus_beta2;
  float step_size;  // learning_rate * sqrt(c2) / c1
  float epsilon;    // epsilon * sqrt(c2)
  float decay;      // learning_rate * weight_decay, for segments with decay
};

/// A run of consecutive parameters that share whether weight decay applies to them.
struct Segment {
  int64_t count;
  bool decay;
};

/// The arrays of one shard, `count` elements each, any alignment of their element type (moments in
/// kInt8: of a byte). Arrays named *_out may be the input itself (in place) or must not overlap any
/// input.
struct Shard {
  int64_t count = 0;
  DType weight_dtype =
      DType::kBf16;  // kBf16: split master; kF32: weight is the master, no residual
  DType gradient_dtype = DType::kBf16;
  MomentFormat moment_format = MomentFormat::kF32;
  const void* gradient = nullptr;
  const void* weight = nullptr;
  const uint16_t* residual = nullptr;
  const void* moment1 = nullptr;  // moment_bytes(moment_format, count)
  const void* moment2 = nullptr;
  void* weight_out = nullptr;
  uint16_t* residual_out = nullptr;
  void* moment1_out = nullptr;
  void* moment2_out = nullptr;
  /// For the random numbers of stochastic rounding: which chunk of all parameters is this shard's
  /// first, the run's seed, and the step. Not read with kF32.
  uint64_t first_chunk = 0;
  uint64_t seed = 0;
  int64_t step = 0;
};

[[nodiscard]] constexpr int64_t chunk_count(const Shard& shard) noexcept {
  return (shard.count + kChunkElements - 1) / kChunkElements;
}

}  // namespace strata::cpu_adam
