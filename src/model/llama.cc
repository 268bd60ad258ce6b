#include "model/llama.h"

#include <fmt/format.h>

#include <cstring>

#include "gpu/operators.h"
#include "model/rope.h"

namespace strata::model {

using pipeline::Pass;
using pipeline::SavedActivations;
using pipeline::StepShape;
using pipeline::UnitCall;

Llama::Llama(const LlamaConfig& config, DType dtype, int64_t positions)
    : config_(config),
      dtype_(dtype),
      positions_(positions),
      query_width_(config.num_attention_heads * config.head_dim),
      key_width_(config.num_key_value_heads * config.head_dim) {
  units_.resize(static_cast<size_t>(config.num_hidden_layers) + 2);
  units_.front() = {.name = "embedding", .backward_reads_weight = false};
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    units_[static_cast<size_t>(i) + 1].name = fmt::format("block {}", i);
  }
  units_.back().name = "head";
  units_.back().shared_unit = config.tie_word_embeddings ? 0 : -1;

  constexpr std::string_view kLayers = "model.layers.";
  for (TensorSpec& tensor : llama_tensors(config)) {
    int unit = last_unit();
    if (tensor.name.starts_with(kLayers)) {
      unit = 1 + std::stoi(tensor.name.substr(kLayers.size()));
    } else if (tensor.name.starts_with("model.embed_tokens.")) {
      unit = 0;
    }
    pipeline::UnitSpec& spec = units_[static_cast<size_t>(unit)];
    const int64_t count = tensor.elements();
    spec.segments.push_back({count, tensor.shape.size() > 1});  // norms do not decay
    tensors_.push_back({std::move(tensor), unit, spec.parameter_count});
    spec.parameter_count += count;
  }
}

size_t Llama::boundary_bytes(int64_t tokens) const noexcept {
  return static_cast<size_t>(tokens * config_.hidden_size) * size_of(dtype_);
}

size_t Llama::constants_bytes() const noexcept {
  return static_cast<size_t>(positions_ * config_.head_dim) * sizeof(float);
}

void Llama::write_constants(std::span<std::byte> out) const {
  std::vector<float> table(static_cast<size_t>(positions_ * config_.head_dim));
  write_rotary_table(config_, positions_, table);
  std::memcpy(out.data(), table.data(), out.size());
}

size_t Llama::workspace_bytes(Pass pass, const StepShape& shape,
                              const gpu::Operators& operators) const {
  switch (pass) {
    case Pass::kForward:
    case Pass::kBackward:
      return block_workspace_bytes(shape, operators, pass == Pass::kBackward);
    case Pass::kLoss:
    case Pass::kLossAndBackward:
      return head_workspace_bytes(shape, operators, pass == Pass::kLossAndBackward);
  }
  return 0;
}

size_t Llama::saved_bytes(int unit, SavedActivations saved, int64_t tokens) const {
  return unit == 0 || unit == last_unit() ? 0 : block_saved_bytes(saved, tokens);
}

void Llama::forward(int unit, const UnitCall& call) const {
  if (unit != 0) {
    block_forward(call);
    return;
  }
  call.device.operators().embedding({.rows = call.batch.tokens,
                                     .width = config_.hidden_size,
                                     .vocabulary = config_.vocab_size,
                                     .dtype = dtype_,
                                     .tokens = call.batch.token_ids,
                                     .weight = call.weight,
                                     .out = call.output},
                                    call.stream);
}

void Llama::backward(int unit, const UnitCall& call) const {
  if (unit != 0) {
    block_backward(call);
    return;
  }
  call.device.operators().embedding_backward({.rows = call.batch.tokens,
                                              .width = config_.hidden_size,
                                              .vocabulary = config_.vocab_size,
                                              .dtype = dtype_,
                                              .tokens = call.batch.token_ids,
                                              .dout = call.boundary_gradient,
                                              .dweight = call.gradient,
                                              .accumulate = call.accumulate,
                                              .scratch = call.workspace},
                                             call.stream);
}

}  // namespace strata::model
