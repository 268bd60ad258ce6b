// The operators of the CUDA device: the launchers of kernels.h and cuBLASLt's products.
#pragma once

#include "gpu/cuda/matmul.h"
#include "gpu/operators.h"
#include "gpu/sticky_error.h"

namespace strata::gpu::cuda {

/// Streams given must be CudaStreams of the device. What a launch throws becomes the error of the
/// device, after which nothing more is launched.
class CudaOperators final : public Operators {
 public:
  /// On the calling thread's current device, number `ordinal`, which is made current in each call.
  /// `error` must outlive this.
  CudaOperators(int ordinal, size_t matmul_workspace_bytes, StickyError& error)
      : ordinal_(ordinal), error_(error), matmul_(matmul_workspace_bytes) {}

  [[nodiscard]] size_t matmul_scratch_bytes(const MatmulArgs& args) const override;
  void matmul(const MatmulArgs& args, Stream& stream) override;

  void rms_norm(const RmsNormArgs& args, Stream& stream) override;
  void residual_rms_norm(const ResidualRmsNormArgs& args, Stream& stream) override;
  [[nodiscard]] size_t rms_norm_backward_scratch_bytes(
      const RmsNormBackwardArgs& args) const override;
  void rms_norm_backward(const RmsNormBackwardArgs& args, Stream& stream) override;

  void rotary(const RotaryArgs& args, Stream& stream) override;

  [[nodiscard]] size_t attention_scratch_bytes(const AttentionArgs& args) const override;
  void attention(const AttentionArgs& args, Stream& stream) override;
  [[nodiscard]] size_t attention_backward_scratch_bytes(
      const AttentionBackwardArgs& args) const override;
  void attention_backward(const AttentionBackwardArgs& args, Stream& stream) override;

  void swiglu(const SwigluArgs& args, Stream& stream) override;
  void swiglu_backward(const SwigluBackwardArgs& args, Stream& stream) override;

  void embedding(const EmbeddingArgs& args, Stream& stream) override;
  [[nodiscard]] size_t embedding_backward_scratch_bytes(
      const EmbeddingBackwardArgs& args) const override;
  void embedding_backward(const EmbeddingBackwardArgs& args, Stream& stream) override;

  [[nodiscard]] size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args) const override;
  void cross_entropy(const CrossEntropyArgs& args, Stream& stream) override;

  void add(const AddArgs& args, Stream& stream) override;
  void cast(const CastArgs& args, Stream& stream) override;

  [[nodiscard]] size_t finish_gradient_scratch_bytes(const FinishGradientArgs& args) const override;
  void finish_gradient(const FinishGradientArgs& args, Stream& stream) override;

  void adam(const AdamArgs& args, Stream& stream) override;

 private:
  template <class Launch>
  void run(Stream& stream, const Launch& launch) noexcept;

  int ordinal_;
  StickyError& error_;
  Matmul matmul_;
};

}  // namespace strata::gpu::cuda
