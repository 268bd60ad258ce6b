// AdamW over a shard of parameters in host memory. Stands by itself: needs base/ and nothing else
// of Strata.
//
// The update is one fixed sequence of IEEE-754 binary32 operations, fused multiply-adds among them,
// each rounded to nearest even (docs/adam.md; one element of it is update_element in
// cpu_adam/definition.h). So every SIMD target, thread count, alignment and chunking gives the same
// bits. Subnormal numbers are kept: the calling threads must not have the processor's flush-to-zero
// modes on.
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), algorithm 2,
// in the arrangement of torch.optim.AdamW, except that the decay joins the update before the one
// subtraction from the parameter.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "cpu_adam/moments.h"
#include "cpu_adam/shard.h"

namespace strata::cpu_adam {

struct Hyperparameters {
  double learning_rate = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
};

/// `step` counts from 1. `gradient_scale` multiplies each gradient before use (1 where the norm is
/// within bounds). Throws a usage error unless both betas lie in [0, 1), epsilon is positive in
/// float, the other hyperparameters are not negative, and all are finite.
[[nodiscard]] StepConstants step_constants(const Hyperparameters& hyper, int64_t step,
                                           double gradient_scale);

/// Updates the shard with the threads of `arena`; blocks until done. `segments` add up to at least
/// shard.count. Does not allocate (oneTBB's own pool of tasks aside). The gradient must be finite:
/// check its sum of squares first.
void update(tbb::task_arena& arena, const Shard& shard, std::span<const Segment> segments,
            const StepConstants& constants);

/// The part of update() that is elements [chunk * kChunkElements, ...) of the shard, on the calling
/// thread: for pipelines that update a chunk while the next is still arriving. Chunks may be done
/// in any order and at once; only their own elements are read and written.
void update_chunk(const Shard& shard, int64_t chunk, std::span<const Segment> segments,
                  const StepConstants& constants);

/// As update(), by the definition: plain scalar code on the calling thread.
void update_reference(const Shard& shard, std::span<const Segment> segments,
                      const StepConstants& constants);

/// What a whole optimizer step did.
struct StepResult {
  double gradient_norm;  // of the unscaled gradient, before clipping
  bool clipped;
  bool finite;  // false: nothing was changed
};

/// One step over one shard: norm, clipping to max_norm (0: none) by the factor max_norm / (norm +
/// 1e-6), update. shard.step is the step's number with every format.
StepResult clip_and_update(tbb::task_arena& arena, const Shard& shard,
                           std::span<const Segment> segments, const Hyperparameters& hyper,
                           double max_norm);

/// Rewrites one moment in another format, of which `second` says that it is moment2. To kF32
/// always, and from kF32 to what it was, without loss; otherwise to nearest. The arrays must not
/// overlap.
void convert_moment(tbb::task_arena& arena, bool second, int64_t count, MomentFormat from,
                    const void* in, MomentFormat to, void* out);

/// Sum of squares of `count` gradients in double, by a reduction tree that depends on `count` alone
/// (docs/adam.md): the same bits for any thread count, alignment and SIMD target. Infinite or NaN
/// where a gradient is. Does not allocate.
[[nodiscard]] double sum_of_squares(tbb::task_arena& arena, const void* gradient, DType dtype,
                                    int64_t count);

}  // namespace strata::cpu_adam
