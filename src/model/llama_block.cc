// A transformer block: its memory, its forward and its backward pass.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gpu/operators.h"
#include "model/llama.h"
#include "model/llama_internal.h"

namespace strata::model {

using pipeline::SavedActivations;
using pipeline::StepShape;
using pipeline::UnitCall;

namespace {

/// Offsets of a block's matrices in its flat parameters, in elements.
struct BlockParameters {
  int64_t norm1, qkv, output, norm2, gate_up, down;
  BlockParameters(int64_t hidden, int64_t qkv_width, int64_t query_width, int64_t intermediate) {
    norm1 = 0;
    qkv = norm1 + hidden;
    output = qkv + qkv_width * hidden;
    norm2 = output + hidden * query_width;
    gate_up = norm2 + hidden;
    down = gate_up + 2 * intermediate * hidden;
  }
};

}  // namespace

/// The activations of one block and one micro-batch, in the workspace and in what outlives forward,
/// and where backward puts gradients in their place once they have been read for the last time.
/// Null bases give sizes.
struct Llama::BlockMemory {
  void *norm1, *qkv, *attention, *norm2, *gate_up, *swiglu, *scratch;
  void* x1;  // null in forward where nothing is saved: it is then the output as it grows
  float *rstd1, *rstd2, *log_sum_exp;
  // Backward:
  void *d_attention, *d_qkv;  // over gate_up, unless that is saved, where they might not fit
  size_t workspace_bytes, saved_bytes;

  BlockMemory(const Llama& llama, void* workspace_base, void* saved_base, SavedActivations saved,
              int64_t tokens, bool backward, size_t scratch_bytes) {
    const LlamaConfig& c = llama.config_;
    Carver workspace(workspace_base);
    Carver kept(saved_base);
    const auto take = [&](Carver& from, int64_t width) {
      return from.take(static_cast<size_t>(tokens * width) * size_of(llama.dtype_));
    };
    Carver& attention_half = saved == SavedActivations::kNone ? workspace : kept;
    qkv = take(attention_half, llama.qkv_width());
    attention = take(attention_half, llama.query_width_);
    const bool x1_is_output = !backward && saved == SavedActivations::kNone;
    x1 = x1_is_output ? nullptr : take(attention_half, c.hidden_size);
    log_sum_exp = attention_half.take_floats(tokens * c.num_attention_heads);

    norm1 = take(workspace, c.hidden_size);
    norm2 = take(workspace, c.hidden_size);
    swiglu = take(workspace, c.intermediate_size);
    const int64_t gradients = backward ? llama.query_width_ + llama.qkv_width() : 0;
    if (saved == SavedActivations::kAll) {
      gate_up = take(kept, 2 * c.intermediate_size);
      d_attention = take(workspace, gradients);
    } else {
      gate_up = take(workspace, std::max(2 * c.intermediate_size, gradients));
      d_attention = gate_up;
    }
    d_qkv = advance(d_attention, tokens * llama.query_width_, llama.dtype_);
    rstd1 = workspace.take_floats(tokens);
    rstd2 = workspace.take_floats(tokens);
    scratch = workspace.take(scratch_bytes);
    workspace_bytes = workspace.used_bytes();
    saved_bytes = kept.used_bytes();
  }

  /// Of a call; scratch goes as far as the workspace does.
  BlockMemory(const Llama& llama, const UnitCall& call, bool backward)
      : BlockMemory(llama, call.workspace, call.saved_activations, call.saved, call.batch.tokens,
                    backward, 0) {
    STRATA_CHECK(call.saved == SavedActivations::kNone || call.saved_activations != nullptr,
                 "saved activations need memory");
  }
};

size_t Llama::block_scratch_bytes(const StepShape& shape, const gpu::Operators& operators,
                                  bool backward) const {
  const LlamaConfig& c = config_;
  const int64_t t = shape.tokens;
  size_t most = 0;
  const auto matmul = [&](const gpu::MatmulArgs& args) {
    most = std::max(most, operators.matmul_scratch_bytes(args));
  };
  const auto linear_scratch = [&](int64_t inputs, int64_t outputs) {
    matmul(linear(t, inputs, outputs, dtype_));
    if (!backward) return;
    matmul(linear_input_gradient(t, inputs, outputs, dtype_));
    matmul(linear_weight_gradient(t, inputs, outputs, dtype_, true));
  };
  linear_scratch(c.hidden_size, qkv_width());
  linear_scratch(query_width_, c.hidden_size);
  linear_scratch(c.hidden_size, 2 * c.intermediate_size);
  linear_scratch(c.intermediate_size, c.hidden_size);
  const gpu::AttentionArgs attention{.tokens = t,
                                     .heads = c.num_attention_heads,
                                     .kv_heads = c.num_key_value_heads,
                                     .head_dim = c.head_dim,
                                     .sequences = shape.max_sequences,
                                     .max_sequence = std::min(t, positions_),
                                     .dtype = dtype_,
                                     .qkv_stride = qkv_width()};
  most = std::max(most, operators.attention_scratch_bytes(attention));
  if (!backward) return most;
  most = std::max(most, operators.attention_backward_scratch_bytes(
                            {.forward = attention, .dqkv_stride = qkv_width()}));
  most = std::max(most, operators.rms_norm_backward_scratch_bytes(
                            {.rows = t, .width = c.hidden_size, .dtype = dtype_}));
  return std::max(
      most, operators.embedding_backward_scratch_bytes(
                {.rows = t, .width = c.hidden_size, .vocabulary = c.vocab_size, .dtype = dtype_}));
}

size_t Llama::block_workspace_bytes(const StepShape& shape, const gpu::Operators& operators,
                                    bool backward) const {
  // Saving more only moves pieces out of it.
  return BlockMemory(*this, nullptr, nullptr, SavedActivations::kNone, shape.tokens, backward,
                     block_scratch_bytes(shape, operators, backward))
      .workspace_bytes;
}

size_t Llama::block_saved_bytes(SavedActivations saved, int64_t tokens) const {
  return BlockMemory(*this, nullptr, nullptr, saved, tokens, false, 0).saved_bytes;
}

gpu::AttentionArgs Llama::attention_args(const UnitCall& call, const BlockMemory& m) const {
  return {.tokens = call.batch.tokens,
          .heads = config_.num_attention_heads,
          .kv_heads = config_.num_key_value_heads,
          .head_dim = config_.head_dim,
          .sequences = call.batch.sequences,
          .max_sequence = call.batch.max_sequence,
          .dtype = dtype_,
          .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config_.head_dim))),
          .sequence_offsets = call.batch.sequence_offsets,
          .q = m.qkv,
          .k = advance(m.qkv, query_width_, dtype_),
          .v = advance(m.qkv, query_width_ + key_width_, dtype_),
          .qkv_stride = qkv_width(),
          .out = m.attention,
          .log_sum_exp = m.log_sum_exp,
          .scratch = m.scratch};
}

void Llama::rotate(const UnitCall& call, void* qkv, bool inverse) const {
  // Queries and keys lie side by side: one call turns both.
  call.device.operators().rotary(
      {.rows = call.batch.tokens,
       .heads = config_.num_attention_heads + config_.num_key_value_heads,
       .head_dim = config_.head_dim,
       .dtype = dtype_,
       .x = qkv,
       .x_stride = qkv_width(),
       .positions = call.batch.positions,
       .cos_sin = static_cast<const float*>(call.constants),
       .inverse = inverse},
      call.stream);
}

void Llama::block_activations(const UnitCall& call, const BlockMemory& m, void* x1,
                              SavedActivations held) const {
  const LlamaConfig& c = config_;
  const int64_t t = call.batch.tokens;
  const int64_t d = c.hidden_size;
  gpu::Operators& ops = call.device.operators();
  const BlockParameters at(d, qkv_width(), query_width_, c.intermediate_size);
  const auto weight = [&](int64_t first) { return advance(call.weight, first, dtype_); };
  const auto norm = [&](const void* x, int64_t first, void* y, float* rstd) {
    ops.rms_norm({.rows = t,
                  .width = d,
                  .dtype = dtype_,
                  .epsilon = static_cast<float>(c.rms_norm_eps),
                  .x = x,
                  .weight = weight(first),
                  .y = y,
                  .rstd = rstd},
                 call.stream);
  };

  norm(call.input, at.norm1, m.norm1, m.rstd1);
  if (held == SavedActivations::kNone) {
    multiply(call, linear(t, d, qkv_width(), dtype_), m.norm1, weight(at.qkv), m.qkv, m.scratch);
    rotate(call, m.qkv, false);
    ops.attention(attention_args(call, m), call.stream);
    call.device.copy_async(x1, call.input, boundary_bytes(t), gpu::CopyDirection::kWithinDevice,
                           call.stream);
    gpu::MatmulArgs output = linear(t, query_width_, d, dtype_);
    output.accumulate = true;
    multiply(call, output, m.attention, weight(at.output), x1, m.scratch);
  }
  norm(x1, at.norm2, m.norm2, m.rstd2);
  if (held != SavedActivations::kAll) {
    multiply(call, linear(t, d, 2 * c.intermediate_size, dtype_), m.norm2, weight(at.gate_up),
             m.gate_up, m.scratch);
  }
  ops.swiglu({.rows = t,
              .width = c.intermediate_size,
              .dtype = dtype_,
              .gate_up = m.gate_up,
              .out = m.swiglu},
             call.stream);
}

void Llama::block_forward(const UnitCall& call) const {
  const int64_t t = call.batch.tokens;
  const BlockMemory m(*this, call, false);
  block_activations(call, m, m.x1 != nullptr ? m.x1 : call.output, SavedActivations::kNone);
  if (m.x1 != nullptr) {
    call.device.copy_async(call.output, m.x1, boundary_bytes(t), gpu::CopyDirection::kWithinDevice,
                           call.stream);
  }
  const BlockParameters at(config_.hidden_size, qkv_width(), query_width_,
                           config_.intermediate_size);
  gpu::MatmulArgs down = linear(t, config_.intermediate_size, config_.hidden_size, dtype_);
  down.accumulate = true;
  multiply(call, down, m.swiglu, advance(call.weight, at.down, dtype_), call.output, m.scratch);
}

void Llama::block_backward(const UnitCall& call) const {
  const LlamaConfig& c = config_;
  const int64_t t = call.batch.tokens;
  const int64_t d = c.hidden_size;
  const int64_t f = c.intermediate_size;
  gpu::Operators& ops = call.device.operators();
  const BlockMemory m(*this, call, true);
  const BlockParameters at(d, qkv_width(), query_width_, f);
  const auto weight = [&](int64_t first) { return advance(call.weight, first, dtype_); };
  const auto weight_gradient = [&](int64_t inputs, int64_t outputs, const void* dy, const void* x,
                                   int64_t first) {
    multiply(call, linear_weight_gradient(t, inputs, outputs, dtype_, call.accumulate), dy, x,
             call.gradient + first, m.scratch);
  };
  const auto input_gradient = [&](int64_t inputs, int64_t outputs, const void* dy, int64_t first,
                                  void* dx) {
    multiply(call, linear_input_gradient(t, inputs, outputs, dtype_), dy, weight(first), dx,
             m.scratch);
  };
  const auto norm_backward = [&](const void* x, const float* rstd, const void* dy, int64_t first) {
    ops.rms_norm_backward({.rows = t,
                           .width = d,
                           .dtype = dtype_,
                           .x = x,
                           .weight = weight(first),
                           .rstd = rstd,
                           .dy = dy,
                           .residual_gradient = call.boundary_gradient,
                           .dx = call.boundary_gradient,
                           .dweight = call.gradient + first,
                           .accumulate = call.accumulate,
                           .scratch = m.scratch},
                          call.stream);
  };

  block_activations(call, m, m.x1, call.saved);
  void* const dx = call.boundary_gradient;

  weight_gradient(f, d, dx, m.swiglu, at.down);
  input_gradient(f, d, dx, at.down, m.swiglu);  // d_swiglu
  ops.swiglu_backward({.rows = t,
                       .width = f,
                       .dtype = dtype_,
                       .gate_up = m.gate_up,
                       .dout = m.swiglu,
                       .d_gate_up = m.gate_up},
                      call.stream);
  weight_gradient(d, 2 * f, m.gate_up, m.norm2, at.gate_up);
  input_gradient(d, 2 * f, m.gate_up, at.gate_up, m.norm2);  // d_norm2
  norm_backward(m.x1, m.rstd2, m.norm2, at.norm2);

  weight_gradient(query_width_, d, dx, m.attention, at.output);
  input_gradient(query_width_, d, dx, at.output, m.d_attention);
  gpu::AttentionArgs attention = attention_args(call, m);
  ops.attention_backward({.forward = attention,
                          .dout = m.d_attention,
                          .dq = m.d_qkv,
                          .dk = advance(m.d_qkv, query_width_, dtype_),
                          .dv = advance(m.d_qkv, query_width_ + key_width_, dtype_),
                          .dqkv_stride = qkv_width()},
                         call.stream);
  rotate(call, m.d_qkv, true);
  weight_gradient(d, qkv_width(), m.d_qkv, m.norm1, at.qkv);
  input_gradient(d, qkv_width(), m.d_qkv, at.qkv, m.norm1);  // d_norm1
  norm_backward(call.input, m.rstd1, m.norm1, at.norm1);
}

}  // namespace strata::model
