// The operators of the host device as plain blocking functions: each runs on the calling thread and
// the threads of `arena`. Contracts are those of gpu/operators.h. Work is cut into pieces by shape
// alone, never by thread count, so results are the same bits for any number of threads.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include "gpu/operators.h"

namespace strata::gpu::host {

[[nodiscard]] size_t matmul_scratch_bytes(const MatmulArgs& args);
void matmul(const MatmulArgs& args, tbb::task_arena& arena);

void rms_norm(const RmsNormArgs& args, tbb::task_arena& arena);
void residual_rms_norm(const ResidualRmsNormArgs& args, tbb::task_arena& arena);
[[nodiscard]] size_t rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args);
void rms_norm_backward(const RmsNormBackwardArgs& args, tbb::task_arena& arena);

void rotary(const RotaryArgs& args, tbb::task_arena& arena);

// `threads` is the arena's max_concurrency: each has a part of the scratch memory.
[[nodiscard]] size_t attention_scratch_bytes(const AttentionArgs& args, int threads);
void attention(const AttentionArgs& args, tbb::task_arena& arena);
[[nodiscard]] size_t attention_backward_scratch_bytes(const AttentionBackwardArgs& args,
                                                      int threads);
void attention_backward(const AttentionBackwardArgs& args, tbb::task_arena& arena);

void swiglu(const SwigluArgs& args, tbb::task_arena& arena);
void swiglu_backward(const SwigluBackwardArgs& args, tbb::task_arena& arena);

void embedding(const EmbeddingArgs& args, tbb::task_arena& arena);
[[nodiscard]] size_t embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args);
void embedding_backward(const EmbeddingBackwardArgs& args, tbb::task_arena& arena);

[[nodiscard]] size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args);
void cross_entropy(const CrossEntropyArgs& args, tbb::task_arena& arena);

void add(const AddArgs& args, tbb::task_arena& arena);
void cast(const CastArgs& args, tbb::task_arena& arena);

[[nodiscard]] size_t finish_gradient_scratch_bytes(const FinishGradientArgs& args);
void finish_gradient(const FinishGradientArgs& args, tbb::task_arena& arena);

}  // namespace strata::gpu::host
