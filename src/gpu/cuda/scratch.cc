#include "gpu/cuda/scratch.h"

#include "base/bytes.h"
#include "base/error.h"
#include "cpu_adam/reduction.h"

namespace strata::gpu::cuda {
namespace {

class Sizes final : public Operators {
 public:
  explicit Sizes(size_t matmul_bytes) : matmul_bytes_(matmul_bytes) {}

  size_t matmul_scratch_bytes(const MatmulArgs& /*args*/) const override { return matmul_bytes_; }
  size_t rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args) const override {
    return cuda::rms_norm_backward_scratch_bytes(args);
  }
  size_t attention_scratch_bytes(const AttentionArgs& args) const override {
    return cuda::attention_scratch_bytes(args);
  }
  size_t attention_backward_scratch_bytes(const AttentionBackwardArgs& args) const override {
    return cuda::attention_backward_scratch_bytes(args);
  }
  size_t embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args) const override {
    return cuda::embedding_backward_scratch_bytes(args);
  }
  size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args) const override {
    return cuda::cross_entropy_scratch_bytes(args);
  }
  size_t finish_gradient_scratch_bytes(const FinishGradientArgs& args) const override {
    return cuda::finish_gradient_scratch_bytes(args);
  }

  void matmul(const MatmulArgs&, Stream&) override { refuse(); }
  void rms_norm(const RmsNormArgs&, Stream&) override { refuse(); }
  void residual_rms_norm(const ResidualRmsNormArgs&, Stream&) override { refuse(); }
  void rms_norm_backward(const RmsNormBackwardArgs&, Stream&) override { refuse(); }
  void rotary(const RotaryArgs&, Stream&) override { refuse(); }
  void attention(const AttentionArgs&, Stream&) override { refuse(); }
  void attention_backward(const AttentionBackwardArgs&, Stream&) override { refuse(); }
  void swiglu(const SwigluArgs&, Stream&) override { refuse(); }
  void swiglu_backward(const SwigluBackwardArgs&, Stream&) override { refuse(); }
  void embedding(const EmbeddingArgs&, Stream&) override { refuse(); }
  void embedding_backward(const EmbeddingBackwardArgs&, Stream&) override { refuse(); }
  void cross_entropy(const CrossEntropyArgs&, Stream&) override { refuse(); }
  void add(const AddArgs&, Stream&) override { refuse(); }
  void cast(const CastArgs&, Stream&) override { refuse(); }
  void finish_gradient(const FinishGradientArgs&, Stream&) override { refuse(); }
  void adam(const AdamArgs&, Stream&) override { refuse(); }

 private:
  static void refuse() { STRATA_CHECK(false, "operators that only have sizes"); }

  size_t matmul_bytes_;
};

}  // namespace

size_t matmul_workspace_bytes(int compute_capability_major) noexcept {
  return compute_capability_major >= 9 ? 32 * kMiB : 8 * kMiB;
}

size_t rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args) {
  const int64_t blocks = ceil_div(args.rows, rows_of_block(args));
  return static_cast<size_t>(blocks * partial_stride(args.width)) * sizeof(float);
}

size_t attention_scratch_bytes(const AttentionArgs& /*args*/) { return 0; }

size_t attention_backward_scratch_bytes(const AttentionBackwardArgs& args) {
  return static_cast<size_t>(args.forward.tokens * args.forward.heads) * sizeof(float);
}

size_t embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args) {
  return static_cast<size_t>(args.rows) * 2 * sizeof(uint64_t);
}

size_t cross_entropy_scratch_bytes(const CrossEntropyArgs& args) {
  return static_cast<size_t>(args.rows) * sizeof(double);
}

size_t finish_gradient_scratch_bytes(const FinishGradientArgs& /*args*/) {
  return cpu_adam::kMaxSumParts * sizeof(double);
}

std::unique_ptr<Operators> operator_sizes(int compute_capability_major) {
  return std::make_unique<Sizes>(
      matmul_scratch_bytes(matmul_workspace_bytes(compute_capability_major)));
}

}  // namespace strata::gpu::cuda
