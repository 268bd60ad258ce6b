// The head: the final norm, the logits, and their loss.
#include <algorithm>

#include "gpu/operators.h"
#include "model/llama.h"
#include "model/llama_internal.h"

namespace strata::model {

using pipeline::StepShape;
using pipeline::UnitCall;

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

int64_t Llama::logits_rows(int64_t tokens) const noexcept {
  // As large as the products like it, but no larger than what the blocks need in any case.
  constexpr int64_t kLeastRows = 64;
  const int64_t block_floats = tokens * (3 * config_.intermediate_size + query_width_) / 2;
  return std::clamp(block_floats / config_.vocab_size, std::min(kLeastRows, tokens), tokens);
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

size_t Llama::head_workspace_bytes(const StepShape& shape, const gpu::Operators& operators,
                                   bool backward) const {
  return HeadWorkspace(*this, nullptr, shape.tokens, backward, head_scratch_bytes(shape, operators))
      .size_bytes;
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
