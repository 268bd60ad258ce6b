// The operators of a language model, forward and backward.
//
// All are asynchronous on the given stream and neither allocate nor synchronise; arguments are
// copied, and the memory they point to (device memory) must stay valid until the work has ended in
// stream order. Where an operator needs scratch, `..._scratch_bytes` says how much from the shape
// fields alone; scratch is 64-byte aligned and holds nothing between calls. All matrices are
// row-major; a row stride ("_stride", in elements) is at least the row's length. Pointers are
// 16-byte aligned. `dtype` is the type of activations and weights: kBf16 with fp32 accumulation, or
// kF32, the reference mode. Results are the same bits for any thread count and timing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cpu_adam/shard.h"
#include "gpu/device.h"

namespace strata::gpu {

/// C[m,n] = op(A)[m,k] * op(B)[k,n] (+ C if accumulate). A and B are of `dtype`; A is stored [k,m]
/// if transpose_a, B is stored [n,k] if transpose_b. c_dtype is `dtype` or kF32. Products are
/// accumulated in fp32; with accumulate the old C joins before the one rounding to c_dtype.
/// In our uses: y = x*W^T (transpose_b), dx = dy*W (none), dW += dy^T*x (transpose_a, fp32 C).
struct MatmulArgs {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kBf16;
  DType c_dtype = DType::kBf16;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  void* scratch = nullptr;
};

/// y[t,:] = x[t,:] * rstd[t] * weight, rstd[t] = 1 / sqrt(mean(x[t,:]^2) + epsilon), computed in
/// fp32 and rounded once. Zhang and Sennrich 2019, eq. 4.
struct RmsNormArgs {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kBf16;
  float epsilon = 1e-5F;
  const void* x = nullptr;
  const void* weight = nullptr;
  void* y = nullptr;
  float* rstd = nullptr;  // [rows], kept for backward
};

/// add and rms_norm in one: sum = a + b, rounded to `dtype` once, and y and rstd as RmsNormArgs has
/// them for x = sum. The results have the bits of the two operators one after the other on the same
/// device. All are [rows, width]; sum may be a or b, y none of the others.
struct ResidualRmsNormArgs {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kBf16;
  float epsilon = 1e-5F;
  const void* a = nullptr;
  const void* b = nullptr;
  void* sum = nullptr;
  const void* weight = nullptr;
  void* y = nullptr;
  float* rstd = nullptr;  // [rows], kept for backward
};

/// Given dy: dx = d/dx (+ residual_gradient where not null; it may be dx itself), and
/// dweight[width] (fp32) += or = the sum over rows in a fixed order.
struct RmsNormBackwardArgs {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kBf16;
  const void* x = nullptr;
  const void* weight = nullptr;
  const float* rstd = nullptr;
  const void* dy = nullptr;
  const void* residual_gradient = nullptr;
  void* dx = nullptr;
  float* dweight = nullptr;
  bool accumulate = true;  // dweight += ; false: dweight =
  void* scratch = nullptr;
};

/// Rotates pairs (i, i + head_dim/2) of each of `heads` consecutive heads of each row, in place, by
/// the angle of the row's position: Su et al. 2021 in the half-split arrangement of Hugging Face.
/// `inverse` rotates back, which is the backward pass. cos_sin is [max_positions, head_dim] fp32:
/// head_dim/2 cosines, then head_dim/2 sines.
struct RotaryArgs {
  int64_t rows = 0, heads = 0, head_dim = 0;
  DType dtype = DType::kBf16;
  void* x = nullptr;
  int64_t x_stride = 0;
  const int32_t* positions = nullptr;  // [rows]
  const float* cos_sin = nullptr;
  bool inverse = false;
};

/// Causal softmax(q*k^T*scale)*v within each sequence, online (Dao et al. 2022): no S x S matrix in
/// memory. q is [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]; rows of q, k, v
/// and their gradients share one stride. Head h reads kv head h / (heads / kv_heads). Sequences are
/// the token ranges [sequence_offsets[i], sequence_offsets[i+1]); tokens after the last offset give
/// zeros. out is [tokens, heads, head_dim], contiguous. Scores and sums are fp32; probabilities
/// and gradients of scores are rounded to `dtype` for the products that they enter. Infinities and
/// NaNs may reach earlier tokens of their sequence, as 0 times them.
struct AttentionArgs {
  int64_t tokens = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int64_t sequences = 0;
  int64_t max_sequence = 0;  // the longest sequence of this call
  DType dtype = DType::kBf16;
  float scale = 1;
  const int32_t* sequence_offsets = nullptr;  // [sequences + 1], device memory
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t qkv_stride = 0;
  void* out = nullptr;
  float* log_sum_exp = nullptr;  // [heads, tokens], of the scaled scores; kept for backward
  void* scratch = nullptr;
};

/// The gradients of attention. dq, dk, dv are written (not accumulated), rows of stride
/// dqkv_stride. Rabe and Staats 2021 / Dao et al. 2022, algorithm 4: the scores are recomputed.
struct AttentionBackwardArgs {
  AttentionArgs forward;  // as in the forward call, whose results out and log_sum_exp hold; scratch
                          // is this call's, of attention_backward_scratch_bytes
  const void* dout = nullptr;
  void* dq = nullptr;
  void* dk = nullptr;
  void* dv = nullptr;
  int64_t dqkv_stride = 0;
};

/// gate_up is [rows, 2*width]: gate, then up. out[rows, width] = silu(gate) * up. Shazeer 2020.
struct SwigluArgs {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kBf16;
  const void* gate_up = nullptr;
  void* out = nullptr;
};

/// d_gate_up [rows, 2*width] may be gate_up itself.
struct SwigluBackwardArgs {
  int64_t rows = 0, width = 0;
  DType dtype = DType::kBf16;
  const void* gate_up = nullptr;
  const void* dout = nullptr;
  void* d_gate_up = nullptr;
};

/// out[t,:] = weight[tokens[t],:]. Every token must lie in [0, vocabulary).
struct EmbeddingArgs {
  int64_t rows = 0, width = 0, vocabulary = 0;
  DType dtype = DType::kBf16;
  const int32_t* tokens = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
};

/// dweight[tokens[t],:] (fp32) += dout[t,:], in the order of t; with accumulate false, dweight is
/// zeroed first.
struct EmbeddingBackwardArgs {
  int64_t rows = 0, width = 0, vocabulary = 0;
  DType dtype = DType::kBf16;
  const int32_t* tokens = nullptr;
  const void* dout = nullptr;
  float* dweight = nullptr;
  bool accumulate = true;
  void* scratch = nullptr;
};

/// Softmax cross-entropy of a chunk of rows, forward and backward in one pass. logits is [rows,
/// vocabulary] fp32. For a row with target >= 0, *loss_sum += logsumexp - logit[target] (rows in
/// order, in double), and dlogits = (softmax - onehot) * gradient_scale; rows with a negative
/// target add nothing and get zeros. dlogits (of `dtype`, dlogits_stride in its own elements) is
/// one of three:
/// - null, for the loss alone;
/// - memory that no byte of logits lies in;
/// - logits itself, which it overwrites. Then row t of dlogits must begin where row t of logits
///   does or earlier: dlogits_stride * size_of(dtype) <= logits_stride * 4, for more than one row.
///   With both the same, each row lies within its logits; with less, rows are packed and overwrite
///   logits of earlier rows, which takes as long as rows have to wait for each other.
struct CrossEntropyArgs {
  int64_t rows = 0, vocabulary = 0;
  DType dtype = DType::kBf16;  // of dlogits
  float* logits = nullptr;
  int64_t logits_stride = 0;
  const int32_t* targets = nullptr;  // [rows]
  float gradient_scale = 1;
  double* loss_sum = nullptr;
  void* dlogits = nullptr;
  int64_t dlogits_stride = 0;
  void* scratch = nullptr;
};

/// out = a + b, element by element; out may be a or b.
struct AddArgs {
  int64_t count = 0;
  DType dtype = DType::kBf16;
  const void* a = nullptr;
  const void* b = nullptr;
  void* out = nullptr;
};

/// out = in in another type; bf16 by rounding to nearest even.
struct CastArgs {
  int64_t count = 0;
  DType in_dtype = DType::kF32;
  DType out_dtype = DType::kBf16;
  const void* in = nullptr;
  void* out = nullptr;
};

/// Ends a gradient's accumulation in one pass: gradient[i] = accumulated[i] in `gradient_dtype`,
/// and *sum_of_squares = the sum of the squares of the rounded values, in double, by a reduction
/// tree that depends on `count` alone. It is infinite or NaN where a gradient is.
struct FinishGradientArgs {
  int64_t count = 0;
  DType gradient_dtype = DType::kBf16;
  const float* accumulated = nullptr;
  void* gradient = nullptr;
  double* sum_of_squares = nullptr;
  void* scratch = nullptr;
};

/// cpu_adam's definition on the device's memory, to the same bits. The segment table is host memory
/// and must live until the work has ended.
struct AdamArgs {
  cpu_adam::Shard shard;
  const cpu_adam::Segment* segments = nullptr;
  int64_t segment_count = 0;
  cpu_adam::StepConstants constants{};
};

class Operators {
 public:
  virtual ~Operators() = default;

  [[nodiscard]] virtual size_t matmul_scratch_bytes(const MatmulArgs& args) const = 0;
  virtual void matmul(const MatmulArgs& args, Stream& stream) = 0;

  virtual void rms_norm(const RmsNormArgs& args, Stream& stream) = 0;
  virtual void residual_rms_norm(const ResidualRmsNormArgs& args, Stream& stream) = 0;
  [[nodiscard]] virtual size_t rms_norm_backward_scratch_bytes(
      const RmsNormBackwardArgs& args) const = 0;
  virtual void rms_norm_backward(const RmsNormBackwardArgs& args, Stream& stream) = 0;

  virtual void rotary(const RotaryArgs& args, Stream& stream) = 0;

  [[nodiscard]] virtual size_t attention_scratch_bytes(const AttentionArgs& args) const = 0;
  virtual void attention(const AttentionArgs& args, Stream& stream) = 0;
  [[nodiscard]] virtual size_t attention_backward_scratch_bytes(
      const AttentionBackwardArgs& args) const = 0;
  virtual void attention_backward(const AttentionBackwardArgs& args, Stream& stream) = 0;

  virtual void swiglu(const SwigluArgs& args, Stream& stream) = 0;
  virtual void swiglu_backward(const SwigluBackwardArgs& args, Stream& stream) = 0;

  virtual void embedding(const EmbeddingArgs& args, Stream& stream) = 0;
  [[nodiscard]] virtual size_t embedding_backward_scratch_bytes(
      const EmbeddingBackwardArgs& args) const = 0;
  virtual void embedding_backward(const EmbeddingBackwardArgs& args, Stream& stream) = 0;

  [[nodiscard]] virtual size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args) const = 0;
  virtual void cross_entropy(const CrossEntropyArgs& args, Stream& stream) = 0;

  virtual void add(const AddArgs& args, Stream& stream) = 0;
  virtual void cast(const CastArgs& args, Stream& stream) = 0;

  [[nodiscard]] virtual size_t finish_gradient_scratch_bytes(
      const FinishGradientArgs& args) const = 0;
  virtual void finish_gradient(const FinishGradientArgs& args, Stream& stream) = 0;

  virtual void adam(const AdamArgs& args, Stream& stream) = 0;
};

}  // namespace strata::gpu
