// AdamW over a shard of parameters in host memory. Stands by itself: needs base/ and nothing else
// of Strata.
//
// The update is one fixed sequence of IEEE-754 binary32 additions, multiplications, divisions and
// square roots, each rounded to nearest even and none fused (docs/adam.md; one element of it is
// update_element in cpu_adam/definition.h). So every SIMD target, thread count, alignment and
// chunking gives the same bits. Subnormal numbers are kept: the calling threads must not have the
// processor's flush-to-zero modes on.
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2,
// in the arrangement of torch.optim.AdamW, except that the decay joins the update before the one
// subtraction from the parameter.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include <cstdint>
#include <span>

#include "base/bf16.h"
#include "base/dtype.h"

namespace strata::cpu_adam {

struct Hyperparameters {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
};

/// What one step multiplies with, computed once in double and rounded to float.
struct StepConstants {
  float gradient_scale;          // unscaling and clipping, in one factor
  float beta1, one_minus_beta1;  // one_minus: 1 - beta in double, then rounded
  float beta2, one_minus_beta2;
  float inverse_sqrt_correction2;  // 1 / sqrt(1 - beta2^step)
  float step_size;                 // learning_rate / (1 - beta1^step)
  float epsilon;
  float decay;  // learning_rate * weight_decay, for segments with decay
};

/// `step` counts from 1. `gradient_scale` multiplies each gradient before use (1 where the norm is
/// within bounds). Throws a usage error unless both betas lie in [0, 1), epsilon is positive in
/// float, the other hyperparameters are not negative, and all are finite.
[[nodiscard]] StepConstants step_constants(const Hyperparameters& hyper, int64_t step,
                                           double gradient_scale);

/// A run of consecutive parameters that share whether weight decay applies to them.
struct Segment {
  int64_t count;
  bool decay;
};

/// The arrays of one shard, `count` elements each, any alignment of their element type. Arrays
/// named *_out may be the input itself (in place) or must not overlap any input.
struct Shard {
  int64_t count = 0;
  DType weight_dtype =
      DType::kBf16;  // kBf16: split master; kF32: weight is the master, no residual
  DType gradient_dtype = DType::kBf16;
  const void* gradient = nullptr;
  const void* weight = nullptr;
  const uint16_t* residual = nullptr;
  const float* moment1 = nullptr;
  const float* moment2 = nullptr;
  void* weight_out = nullptr;
  uint16_t* residual_out = nullptr;
  float* moment1_out = nullptr;
  float* moment2_out = nullptr;
};

/// update() hands out the shard in chunks of this size. No result depends on it.
inline constexpr int64_t kChunkElements = 32768;

/// Updates the shard with the threads of `arena`; blocks until done. `segments` add up to at least
/// shard.count. Does not allocate (oneTBB's own pool of tasks aside). The gradient must be finite:
/// check its sum of squares first.
void update(tbb::task_arena& arena, const Shard& shard, std::span<const Segment> segments,
            const StepConstants& constants);

/// As update(), by the definition: plain scalar code on the calling thread.
void update_reference(const Shard& shard, std::span<const Segment> segments,
                      const StepConstants& constants);

/// Sum of squares of `count` gradients in double, by a reduction tree that depends on `count` alone
/// (docs/adam.md): the same bits for any thread count, alignment and SIMD target. Infinite or NaN
/// where a gradient is. Does not allocate.
[[nodiscard]] double sum_of_squares(tbb::task_arena& arena, const void* gradient, DType dtype,
                                    int64_t count);

}  // namespace strata::cpu_adam
