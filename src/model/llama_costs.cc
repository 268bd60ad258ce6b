// What a call costs, for those who plan.
#include "model/llama.h"

namespace strata::model {

using pipeline::Pass;
using pipeline::SavedActivations;

double Llama::matmul_flops(int unit, Pass pass, int64_t tokens, int64_t sequence_length,
                           SavedActivations saved) const {
  const auto t = static_cast<double>(tokens);
  const auto d = static_cast<double>(config_.hidden_size);
  const auto f = static_cast<double>(config_.intermediate_size);
  if (unit == 0) return 0;
  if (unit == last_unit()) {
    const double product = 2 * t * d * static_cast<double>(config_.vocab_size);
    return pass == Pass::kLossAndBackward ? 3 * product : product;
  }
  const double attention_half =
      2 * t * d * static_cast<double>(qkv_width()) + 2 * t * static_cast<double>(query_width_) * d;
  const double gate_up = 4 * t * d * f;
  const double down = 2 * t * f * d;
  // Two products of the causal half of each document, five in backward.
  const double attention_product =
      t * static_cast<double>(sequence_length + 1) * static_cast<double>(query_width_);
  const double products = attention_half + gate_up + down;
  if (pass == Pass::kForward) return products + 2 * attention_product;
  double recomputed = 0;
  if (saved == SavedActivations::kNone) recomputed += attention_half + 2 * attention_product;
  if (saved != SavedActivations::kAll) recomputed += gate_up;
  return recomputed + 2 * products + 5 * attention_product;
}

double Llama::other_bytes(int unit, Pass pass, int64_t tokens, SavedActivations saved) const {
  const auto t = static_cast<double>(tokens);
  const auto d = static_cast<double>(config_.hidden_size);
  const auto f = static_cast<double>(config_.intermediate_size);
  const auto v = static_cast<double>(config_.vocab_size);
  const auto element = static_cast<double>(size_of(dtype_));
  constexpr double kFloat = sizeof(float);
  constexpr double kIndex = sizeof(int32_t);

  // x and the weight in, y and rstd out.
  const double norm = 2 * t * d * element + d * element + t * kFloat;
  // x, dy, the weight and rstd in, dx out, dweight in and out.
  const double norm_backward = 3 * t * d * element + d * element + t * kFloat + 2 * d * kFloat;
  const double residual = t * d * element;  // the gradient that a block's norms add theirs to
  if (unit == 0) {
    const double row = pass == Pass::kForward ? 2 * d * element : d * element + 2 * d * kFloat;
    return t * (row + kIndex);
  }
  if (unit == last_unit()) {
    const double targets = t * kIndex;
    const double logits = t * v * kFloat;
    if (pass != Pass::kLossAndBackward) return norm + logits + targets;
    return norm + 2 * logits + targets + t * v * element + norm_backward;
  }
  // Queries and keys in and out, a position and a row of the table for each token.
  const double rotation = 2 * t * static_cast<double>(query_width_ + key_width_) * element +
                          t * kIndex + t * static_cast<double>(config_.head_dim) * kFloat;
  const double copy = 2 * t * d * element;
  const double swiglu = 3 * t * f * element;
  const double activations = 2 * norm + swiglu;
  const bool saves = saved != SavedActivations::kNone;
  if (pass == Pass::kForward) return activations + rotation + copy + (saves ? copy : 0);
  const double swiglu_backward = 5 * t * f * element;
  return activations + (saves ? 0 : rotation + copy) + swiglu_backward +
         2 * (norm_backward + residual) + rotation;
}

}  // namespace strata::model
