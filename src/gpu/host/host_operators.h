// The operators of the host device: the blocking functions of kernels.h, enqueued.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include "gpu/operators.h"

namespace strata::gpu::host {

/// All streams share the threads of one arena. Streams given must be HostStreams and be destroyed
/// before this. Negative sizes and rows longer than their stride are a programmer's error, found
/// in the call; what a kernel throws becomes the error of the device.
class HostOperators final : public Operators {
 public:
  explicit HostOperators(int threads) : threads_(threads), arena_(threads) {}

  [[nodiscard]] int threads() const noexcept { return threads_; }

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
  int threads_;
  tbb::task_arena arena_;
};

}  // namespace strata::gpu::host
