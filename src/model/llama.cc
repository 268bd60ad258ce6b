#include "model/llama.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "gpu/operators.h"
#include "model/rope.h"

namespace strata::model {
namespace {

using pipeline::Pass;
using pipeline::StepShape;
using pipeline::UnitCall;

constexpr size_t kPieceAlignment = 64;

/// Cuts a workspace into aligned pieces; with a null base it only adds up their sizes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  void* take(size_t size_bytes) {
    std::byte* piece = base_ ? base_ + used_ : nullptr;
    used_ += align_up(size_bytes, kPieceAlignment);
    return piece;
  }
  float* take_floats(int64_t count) {
    return static_cast<float*>(take(static_cast<size_t>(count) * sizeof(float)));
  }
  [[nodiscard]] size_t used_bytes() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

/// `pointer` moved by `elements` of `dtype`; null stays null.
template <class T>
T* advance(T* pointer, int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  if (pointer == nullptr) return nullptr;
  return static_cast<Byte*>(pointer) + elements * static_cast<int64_t>(size_of(dtype));
}

/// y[rows, outputs] = x[rows, inputs] * w[outputs, inputs]^T
gpu::MatmulArgs linear(int64_t rows, int64_t inputs, int64_t outputs, DType dtype) {
  return {.m = rows,
          .n = outputs,
          .k = inputs,
          .dtype = dtype,
          .c_dtype = dtype,
          .transpose_b = true,
          .a_stride = inputs,
          .b_stride = inputs,
          .c_stride = outputs};
}

/// dx[rows, inputs] = dy[rows, outputs] * w[outputs, inputs]
gpu::MatmulArgs linear_input_gradient(int64_t rows, int64_t inputs, int64_t outputs, DType dtype) {
  return {.m = rows,
          .n = inputs,
          .k = outputs,
          .dtype = dtype,
          .c_dtype = dtype,
          .a_stride = outputs,
          .b_stride = inputs,
          .c_stride = inputs};
}

/// dw[outputs, inputs] fp32 (+)= dy[rows, outputs]^T * x[rows, inputs]
gpu::MatmulArgs linear_weight_gradient(int64_t rows, int64_t inputs, int64_t outputs, DType dtype,
                                       bool accumulate) {
  return {.m = outputs,
          .n = inputs,
          .k = rows,
          .dtype = dtype,
          .c_dtype = DType::kF32,
          .transpose_a = true,
          .accumulate = accumulate,
          .a_stride = outputs,
          .b_stride = inputs,
          .c_stride = inputs};
}

void multiply(const UnitCall& call, gpu::MatmulArgs args, const void* a, const void* b, void* c,
              void* scratch) {
  args.a = a;
  args.b = b;
  args.c = c;
  args.scratch = scratch;
  call.device.operators().matmul(args, call.stream);
}

}  // namespace

/// The activations of one block and one micro-batch, and where backward puts gradients in their
/// place once they have been read for the last time.
struct Llama::BlockWorkspace {
  void *norm1, *qkv, *attention, *x1, *norm2, *gate_up, *swiglu, *scratch;
  float *rstd1, *rstd2, *log_sum_exp;
  // Backward: these take over memory of the activations above.
  void *d_attention, *d_qkv;  // gate_up
  size_t size_bytes;

  BlockWorkspace(const Llama& llama, void* base, int64_t tokens, bool backward,
                 size_t scratch_bytes) {
    const LlamaConfig& c = llama.config_;
    Carver carver(base);
    const auto take = [&](int64_t width) {
      return carver.take(static_cast<size_t>(tokens * width) * size_of(llama.dtype_));
    };
    norm1 = take(c.hidden_size);
    qkv = take(llama.qkv_width());
    attention = take(llama.query_width_);
    norm2 = take(c.hidden_size);
    swiglu = take(c.intermediate_size);
    x1 = backward ? take(c.hidden_size) : nullptr;
    const int64_t gradients = backward ? llama.query_width_ + llama.qkv_width() : 0;
    gate_up = take(std::max(2 * c.intermediate_size, gradients));
    d_attention = gate_up;
    d_qkv = advance(gate_up, tokens * llama.query_width_, llama.dtype_);
    rstd1 = carver.take_floats(tokens);
    rstd2 = carver.take_floats(tokens);
    log_sum_exp = carver.take_floats(tokens * c.num_attention_heads);
    scratch = carver.take(scratch_bytes);
    size_bytes = carver.used_bytes();
  }
};

/// The final norm, one chunk of logits, and the gradient of the norm's output.
struct Llama::HeadWorkspace {
  void *norm, *d_norm, *scratch;
  float *rstd, *logits;
  size_t size_bytes;

  HeadWorkspace(const Llama& llama, void* base, int64_t tokens, bool backward,
                size_t scratch_bytes) {
    const LlamaConfig& c = llama.config_;
    Carver carver(base);
    const auto boundary = static_cast<size_t>(tokens * c.hidden_size) * size_of(llama.dtype_);
    norm = carver.take(boundary);
    d_norm = backward ? carver.take(boundary) : nullptr;
    rstd = carver.take_floats(tokens);
    logits = carver.take_floats(llama.logits_rows(tokens) * c.vocab_size);
    scratch = carver.take(scratch_bytes);
    size_bytes = carver.used_bytes();
  }
};

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

int64_t Llama::logits_rows(int64_t tokens) const noexcept {
  // As large as the products like it, but no larger than what the blocks need in any case.
  constexpr int64_t kLeastRows = 64;
  const int64_t block_floats = tokens * (3 * config_.intermediate_size + query_width_) / 2;
  return std::clamp(block_floats / config_.vocab_size, std::min(kLeastRows, tokens), tokens);
}

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

size_t Llama::head_scratch_bytes(const StepShape& shape, const gpu::Operators& operators) const {
  const LlamaConfig& c = config_;
  const int64_t rows = logits_rows(shape.tokens);
  size_t most = 0;
  for (const gpu::MatmulArgs& args :
       {linear(rows, c.hidden_size, c.vocab_size, dtype_),
        linear_input_gradient(rows, c.hidden_size, c.vocab_size, dtype_),
        linear_weight_gradient(rows, c.hidden_size, c.vocab_size, dtype_, true)}) {
    most = std::max(most, operators.matmul_scratch_bytes(args));
  }
  most = std::max(most, operators.cross_entropy_scratch_bytes(
                            {.rows = rows, .vocabulary = c.vocab_size, .dtype = dtype_}));
  return std::max(most, operators.rms_norm_backward_scratch_bytes(
                            {.rows = shape.tokens, .width = c.hidden_size, .dtype = dtype_}));
}

size_t Llama::workspace_bytes(Pass pass, const StepShape& shape,
                              const gpu::Operators& operators) const {
  switch (pass) {
    case Pass::kForward:
    case Pass::kBackward: {
      const bool backward = pass == Pass::kBackward;
      return BlockWorkspace(*this, nullptr, shape.tokens, backward,
                            block_scratch_bytes(shape, operators, backward))
          .size_bytes;
    }
    case Pass::kLoss:
    case Pass::kLossAndBackward:
      return HeadWorkspace(*this, nullptr, shape.tokens, pass == Pass::kLossAndBackward,
                           head_scratch_bytes(shape, operators))
          .size_bytes;
  }
  return 0;
}

double Llama::matmul_flops(int unit, Pass pass, int64_t tokens, int64_t sequence_length) const {
  const auto t = static_cast<double>(tokens);
  const auto d = static_cast<double>(config_.hidden_size);
  const auto f = static_cast<double>(config_.intermediate_size);
  if (unit == 0) return 0;
  if (unit == last_unit()) {
    const double product = 2 * t * d * static_cast<double>(config_.vocab_size);
    return pass == Pass::kLossAndBackward ? 3 * product : product;
  }
  const double products =
      2 * t *
      (d * static_cast<double>(qkv_width()) + static_cast<double>(query_width_) * d + 3 * d * f);
  // Two products of the causal half of each document, five in backward.
  const double attention_product =
      t * static_cast<double>(sequence_length + 1) * static_cast<double>(query_width_);
  if (pass == Pass::kForward) return products + 2 * attention_product;
  const double recomputed = products - 2 * t * d * f + 2 * attention_product;
  return recomputed + 2 * products + 5 * attention_product;
}

gpu::AttentionArgs Llama::attention_args(const UnitCall& call, const BlockWorkspace& w) const {
  return {.tokens = call.batch.tokens,
          .heads = config_.num_attention_heads,
          .kv_heads = config_.num_key_value_heads,
          .head_dim = config_.head_dim,
          .sequences = call.batch.sequences,
          .max_sequence = call.batch.max_sequence,
          .dtype = dtype_,
          .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(config_.head_dim))),
          .sequence_offsets = call.batch.sequence_offsets,
          .q = w.qkv,
          .k = advance(w.qkv, query_width_, dtype_),
          .v = advance(w.qkv, query_width_ + key_width_, dtype_),
          .qkv_stride = qkv_width(),
          .out = w.attention,
          .log_sum_exp = w.log_sum_exp,
          .scratch = w.scratch};
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

void Llama::block_activations(const UnitCall& call, const BlockWorkspace& w, void* x1) const {
  const LlamaConfig& c = config_;
  const int64_t t = call.batch.tokens;
  const int64_t d = c.hidden_size;
  gpu::Operators& ops = call.device.operators();
  const BlockParameters at(d, qkv_width(), query_width_, c.intermediate_size);
  const auto weight = [&](int64_t first) { return advance(call.weight, first, dtype_); };
  const auto epsilon = static_cast<float>(c.rms_norm_eps);

  ops.rms_norm({.rows = t,
                .width = d,
                .dtype = dtype_,
                .epsilon = epsilon,
                .x = call.input,
                .weight = weight(at.norm1),
                .y = w.norm1,
                .rstd = w.rstd1},
               call.stream);
  multiply(call, linear(t, d, qkv_width(), dtype_), w.norm1, weight(at.qkv), w.qkv, w.scratch);
  rotate(call, w.qkv, false);
  ops.attention(attention_args(call, w), call.stream);
  call.device.copy_async(x1, call.input, boundary_bytes(t), gpu::CopyDirection::kWithinDevice,
                         call.stream);
  gpu::MatmulArgs output = linear(t, query_width_, d, dtype_);
  output.accumulate = true;
  multiply(call, output, w.attention, weight(at.output), x1, w.scratch);
  ops.rms_norm({.rows = t,
                .width = d,
                .dtype = dtype_,
                .epsilon = epsilon,
                .x = x1,
                .weight = weight(at.norm2),
                .y = w.norm2,
                .rstd = w.rstd2},
               call.stream);
  multiply(call, linear(t, d, 2 * c.intermediate_size, dtype_), w.norm2, weight(at.gate_up),
           w.gate_up, w.scratch);
  ops.swiglu({.rows = t,
              .width = c.intermediate_size,
              .dtype = dtype_,
              .gate_up = w.gate_up,
              .out = w.swiglu},
             call.stream);
}

void Llama::forward(int unit, const UnitCall& call) const {
  const int64_t t = call.batch.tokens;
  if (unit == 0) {
    call.device.operators().embedding({.rows = t,
                                       .width = config_.hidden_size,
                                       .vocabulary = config_.vocab_size,
                                       .dtype = dtype_,
                                       .tokens = call.batch.token_ids,
                                       .weight = call.weight,
                                       .out = call.output},
                                      call.stream);
    return;
  }
  const BlockWorkspace w(*this, call.workspace, t, false, 0);
  block_activations(call, w, call.output);
  const BlockParameters at(config_.hidden_size, qkv_width(), query_width_,
                           config_.intermediate_size);
  gpu::MatmulArgs down = linear(t, config_.intermediate_size, config_.hidden_size, dtype_);
  down.accumulate = true;
  multiply(call, down, w.swiglu, advance(call.weight, at.down, dtype_), call.output, w.scratch);
}

void Llama::backward(int unit, const UnitCall& call) const {
  const LlamaConfig& c = config_;
  const int64_t t = call.batch.tokens;
  const int64_t d = c.hidden_size;
  const int64_t f = c.intermediate_size;
  gpu::Operators& ops = call.device.operators();
  if (unit == 0) {
    ops.embedding_backward({.rows = t,
                            .width = d,
                            .vocabulary = c.vocab_size,
                            .dtype = dtype_,
                            .tokens = call.batch.token_ids,
                            .dout = call.boundary_gradient,
                            .dweight = call.gradient,
                            .accumulate = call.accumulate,
                            .scratch = call.workspace},
                           call.stream);
    return;
  }
  const BlockWorkspace w(*this, call.workspace, t, true, 0);
  const BlockParameters at(d, qkv_width(), query_width_, f);
  const auto weight = [&](int64_t first) { return advance(call.weight, first, dtype_); };
  const auto weight_gradient = [&](int64_t inputs, int64_t outputs, const void* dy, const void* x,
                                   int64_t first) {
    multiply(call, linear_weight_gradient(t, inputs, outputs, dtype_, call.accumulate), dy, x,
             call.gradient + first, w.scratch);
  };
  const auto input_gradient = [&](int64_t inputs, int64_t outputs, const void* dy, int64_t first,
                                  void* dx) {
    multiply(call, linear_input_gradient(t, inputs, outputs, dtype_), dy, weight(first), dx,
             w.scratch);
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
                           .scratch = w.scratch},
                          call.stream);
  };

  block_activations(call, w, w.x1);
  void* const dx = call.boundary_gradient;

  weight_gradient(f, d, dx, w.swiglu, at.down);
  input_gradient(f, d, dx, at.down, w.swiglu);  // d_swiglu
  ops.swiglu_backward({.rows = t,
                       .width = f,
                       .dtype = dtype_,
                       .gate_up = w.gate_up,
                       .dout = w.swiglu,
                       .d_gate_up = w.gate_up},
                      call.stream);
  weight_gradient(d, 2 * f, w.gate_up, w.norm2, at.gate_up);
  input_gradient(d, 2 * f, w.gate_up, at.gate_up, w.norm2);  // d_norm2
  norm_backward(w.x1, w.rstd2, w.norm2, at.norm2);

  weight_gradient(query_width_, d, dx, w.attention, at.output);
  input_gradient(query_width_, d, dx, at.output, w.d_attention);
  gpu::AttentionArgs attention = attention_args(call, w);
  ops.attention_backward({.forward = attention,
                          .dout = w.d_attention,
                          .dq = w.d_qkv,
                          .dk = advance(w.d_qkv, query_width_, dtype_),
                          .dv = advance(w.d_qkv, query_width_ + key_width_, dtype_),
                          .dqkv_stride = qkv_width()},
                         call.stream);
  rotate(call, w.d_qkv, true);
  weight_gradient(d, qkv_width(), w.d_qkv, w.norm1, at.qkv);
  input_gradient(d, qkv_width(), w.d_qkv, at.qkv, w.norm1);  // d_norm1
  norm_backward(call.input, w.rstd1, w.norm1, at.norm1);
}

void Llama::loss(const UnitCall& call) const {
  const LlamaConfig& c = config_;
  const int64_t t = call.batch.tokens;
  const int64_t d = c.hidden_size;
  const int64_t v = c.vocab_size;
  gpu::Operators& ops = call.device.operators();
  const bool backward = call.boundary_gradient != nullptr;
  const bool tied = units_.back().shared_unit >= 0;
  const HeadWorkspace w(*this, call.workspace, t, backward, 0);
  const void* head = tied ? call.shared_weight : advance(call.weight, d, dtype_);
  float* head_gradient = tied || !backward ? call.shared_gradient : call.gradient + d;
  const bool accumulate = tied ? call.accumulate_shared : call.accumulate;

  ops.rms_norm({.rows = t,
                .width = d,
                .dtype = dtype_,
                .epsilon = static_cast<float>(c.rms_norm_eps),
                .x = call.input,
                .weight = call.weight,
                .y = w.norm,
                .rstd = w.rstd},
               call.stream);
  const int64_t chunk = logits_rows(t);
  // The gradient of the logits overwrites them row by row, in their first half where it is bf16.
  const int64_t dlogits_stride = v * static_cast<int64_t>(sizeof(float) / size_of(dtype_));
  for (int64_t first = 0; first < t; first += chunk) {
    const int64_t rows = std::min(chunk, t - first);
    const void* x = advance(w.norm, first * d, dtype_);
    gpu::MatmulArgs project = linear(rows, d, v, dtype_);
    project.c_dtype = DType::kF32;
    multiply(call, project, x, head, w.logits, w.scratch);
    ops.cross_entropy({.rows = rows,
                       .vocabulary = v,
                       .dtype = dtype_,
                       .logits = w.logits,
                       .logits_stride = v,
                       .targets = call.batch.targets + first,
                       .gradient_scale = call.loss_scale,
                       .loss_sum = call.loss_sum,
                       .dlogits = backward ? w.logits : nullptr,
                       .dlogits_stride = dlogits_stride,
                       .scratch = w.scratch},
                      call.stream);
    if (!backward) continue;
    gpu::MatmulArgs to_weight = linear_weight_gradient(rows, d, v, dtype_, accumulate || first > 0);
    to_weight.a_stride = dlogits_stride;
    multiply(call, to_weight, w.logits, x, head_gradient, w.scratch);
    gpu::MatmulArgs to_input = linear_input_gradient(rows, d, v, dtype_);
    to_input.a_stride = dlogits_stride;
    multiply(call, to_input, w.logits, head, advance(w.d_norm, first * d, dtype_), w.scratch);
  }
  if (!backward) return;
  ops.rms_norm_backward({.rows = t,
                         .width = d,
                         .dtype = dtype_,
                         .x = call.input,
                         .weight = call.weight,
                         .rstd = w.rstd,
                         .dy = w.d_norm,
                         .dx = call.boundary_gradient,
                         .dweight = call.gradient,
                         .accumulate = call.accumulate,
                         .scratch = w.scratch},
                        call.stream);
}

void Llama::logits(const UnitCall& call, int64_t row, float* out) const {
  const int64_t d = config_.hidden_size;
  const HeadWorkspace w(*this, call.workspace, call.batch.tokens, false, 0);
  const bool tied = units_.back().shared_unit >= 0;
  const void* head = tied ? call.shared_weight : advance(call.weight, d, dtype_);
  call.device.operators().rms_norm({.rows = 1,
                                    .width = d,
                                    .dtype = dtype_,
                                    .epsilon = static_cast<float>(config_.rms_norm_eps),
                                    .x = advance(call.input, row * d, dtype_),
                                    .weight = call.weight,
                                    .y = w.norm,
                                    .rstd = w.rstd},
                                   call.stream);
  gpu::MatmulArgs project = linear(1, d, config_.vocab_size, dtype_);
  project.c_dtype = DType::kF32;
  multiply(call, project, w.norm, head, out, w.scratch);
}

}  // namespace strata::model
