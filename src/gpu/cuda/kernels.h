// The operators of the CUDA device (all but matmul, see matmul.h) as launches: each enqueues its
// kernels on `stream` and returns. Contracts are those of gpu/operators.h: nothing here allocates
// or synchronises, and args are copied (AdamArgs' segments are read before the launcher returns).
// A shape that breaks its contract is a programmer's error; a launch that CUDA refuses throws a
// failure that names the operator. Grids, block sizes and orders of summation follow from shapes
// alone, never from the device, so results are the same bits on every device of one architecture.
//
// Compiles without CUDA's headers: a StreamHandle is a cudaStream_t by another name.
#pragma once

#include <cstddef>

#include "gpu/operators.h"

struct CUstream_st;

namespace strata::gpu::cuda {

using StreamHandle = CUstream_st*;

void rms_norm(const RmsNormArgs& args, StreamHandle stream);
void residual_rms_norm(const ResidualRmsNormArgs& args, StreamHandle stream);
[[nodiscard]] size_t rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args);
void rms_norm_backward(const RmsNormBackwardArgs& args, StreamHandle stream);

void rotary(const RotaryArgs& args, StreamHandle stream);

[[nodiscard]] size_t attention_scratch_bytes(const AttentionArgs& args);
void attention(const AttentionArgs& args, StreamHandle stream);
[[nodiscard]] size_t attention_backward_scratch_bytes(const AttentionBackwardArgs& args);
void attention_backward(const AttentionBackwardArgs& args, StreamHandle stream);

void swiglu(const SwigluArgs& args, StreamHandle stream);
void swiglu_backward(const SwigluBackwardArgs& args, StreamHandle stream);

// A token outside the vocabulary stops the kernel with a trap, which the next synchronize reports.
void embedding(const EmbeddingArgs& args, StreamHandle stream);
[[nodiscard]] size_t embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args);
void embedding_backward(const EmbeddingBackwardArgs& args, StreamHandle stream);

// A target outside the vocabulary stops the kernel likewise.
[[nodiscard]] size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args);
void cross_entropy(const CrossEntropyArgs& args, StreamHandle stream);

void add(const AddArgs& args, StreamHandle stream);
void cast(const CastArgs& args, StreamHandle stream);

// The sum of squares has the bits of cpu_adam::sum_of_squares over the same gradient.
[[nodiscard]] size_t finish_gradient_scratch_bytes(const FinishGradientArgs& args);
void finish_gradient(const FinishGradientArgs& args, StreamHandle stream);

void adam(const AdamArgs& args, StreamHandle stream);

}  // namespace strata::gpu::cuda
