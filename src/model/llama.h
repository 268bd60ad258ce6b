// A Llama as units for the pipeline: the embedding, each transformer block, the final norm with the
// head. A unit's parameters lie one after the other in the order of llama_tensors(), so query, key
// and value, and gate and up, are one matrix product each.
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "model/hf_config.h"
#include "pipeline/unit_model.h"

namespace strata::model {

/// Where a Hugging Face tensor lies in the units: `first` is the index of its first element.
struct TensorPlace {
  TensorSpec tensor;
  int unit = 0;
  int64_t first = 0;
};

class Llama final : public pipeline::UnitModel {
 public:
  /// `positions`: the longest document that will be seen, the size of the rotary table.
  Llama(const LlamaConfig& config, DType dtype, int64_t positions);

  [[nodiscard]] const LlamaConfig& config() const noexcept { return config_; }
  /// All tensors, in the order of the units.
  [[nodiscard]] const std::vector<TensorPlace>& tensors() const noexcept { return tensors_; }

  [[nodiscard]] std::span<const pipeline::UnitSpec> units() const noexcept override {
    return units_;
  }
  [[nodiscard]] DType dtype() const noexcept override { return dtype_; }
  [[nodiscard]] size_t boundary_bytes(int64_t tokens) const noexcept override;
  [[nodiscard]] size_t constants_bytes() const noexcept override;
  void write_constants(std::span<std::byte> out) const override;
  [[nodiscard]] size_t workspace_bytes(pipeline::Pass pass, const pipeline::StepShape& shape,
                                       const gpu::Operators& operators) const override;
  [[nodiscard]] size_t saved_bytes(int unit, pipeline::SavedActivations saved,
                                   int64_t tokens) const override;
  [[nodiscard]] double matmul_flops(
      int unit, pipeline::Pass pass, int64_t tokens, int64_t sequence_length,
      pipeline::SavedActivations saved = pipeline::SavedActivations::kNone) const override;
  [[nodiscard]] double other_bytes(int unit, pipeline::Pass pass, int64_t tokens,
                                   pipeline::SavedActivations saved) const override;
  void forward(int unit, const pipeline::UnitCall& call) const override;
  void backward(int unit, const pipeline::UnitCall& call) const override;
  void loss(const pipeline::UnitCall& call) const override;
  void logits(const pipeline::UnitCall& call, int64_t row, float* out) const override;
  [[nodiscard]] int64_t vocabulary() const noexcept override { return config_.vocab_size; }

 private:
  struct BlockMemory;
  struct HeadWorkspace;

  [[nodiscard]] int last_unit() const noexcept { return static_cast<int>(units_.size()) - 1; }
  [[nodiscard]] int64_t qkv_width() const noexcept { return query_width_ + 2 * key_width_; }

  // Blocks: llama_block.cc.
  [[nodiscard]] size_t block_scratch_bytes(const pipeline::StepShape& shape,
                                           const gpu::Operators& operators, bool backward) const;
  [[nodiscard]] size_t block_workspace_bytes(const pipeline::StepShape& shape,
                                             const gpu::Operators& operators, bool backward) const;
  [[nodiscard]] size_t block_saved_bytes(pipeline::SavedActivations saved, int64_t tokens) const;
  void block_forward(const pipeline::UnitCall& call) const;
  void block_backward(const pipeline::UnitCall& call) const;
  /// From the input to the output of the attention half, then to the swiglu output, except for what
  /// `held` says is there. x1 is the sum of the input and the attention half.
  void block_activations(const pipeline::UnitCall& call, const BlockMemory& m, void* x1,
                         pipeline::SavedActivations held) const;
  [[nodiscard]] gpu::AttentionArgs attention_args(const pipeline::UnitCall& call,
                                                  const BlockMemory& m) const;
  void rotate(const pipeline::UnitCall& call, void* qkv, bool inverse) const;

  // The head: llama_head.cc.
  /// Rows of logits that the loss holds at a time.
  [[nodiscard]] int64_t logits_rows(int64_t tokens) const noexcept;
  [[nodiscard]] size_t head_scratch_bytes(const pipeline::StepShape& shape,
                                          const gpu::Operators& operators) const;
  [[nodiscard]] size_t head_workspace_bytes(const pipeline::StepShape& shape,
                                            const gpu::Operators& operators, bool backward) const;

  LlamaConfig config_;
  DType dtype_;
  int64_t positions_;
  int64_t query_width_;
  int64_t key_width_;
  std::vector<pipeline::UnitSpec> units_;
  std::vector<TensorPlace> tensors_;
};

}  // namespace strata::model
