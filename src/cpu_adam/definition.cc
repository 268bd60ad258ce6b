#include "cpu_adam/definition.h"

namespace strata::cpu_adam {
namespace {

float load_gradient(const Shard& shard, int64_t i) noexcept {
  if (shard.gradient_dtype == DType::kF32) return static_cast<const float*>(shard.gradient)[i];
  return to_float(Bf16{static_cast<const uint16_t*>(shard.gradient)[i]});
}

float load_master(const Shard& shard, int64_t i) noexcept {
  if (shard.weight_dtype == DType::kF32) return static_cast<const float*>(shard.weight)[i];
  const Bf16 weight{static_cast<const uint16_t*>(shard.weight)[i]};
  return join_master({weight, shard.residual[i]});
}

void store_master(const Shard& shard, int64_t i, float master) noexcept {
  if (shard.weight_dtype == DType::kF32) {
    static_cast<float*>(shard.weight_out)[i] = master;
    return;
  }
  const SplitMaster split = split_master(master);
  static_cast<uint16_t*>(shard.weight_out)[i] = split.weight.bits;
  shard.residual_out[i] = split.residual;
}

}  // namespace

void update_elements(const Shard& shard, int64_t begin, int64_t end, const StepConstants& constants,
                     float decay) noexcept {
  for (int64_t i = begin; i < end; ++i) {
    const Element old{load_master(shard, i), shard.moment1[i], shard.moment2[i]};
    const Element updated = update_element(old, load_gradient(shard, i), constants, decay);
    store_master(shard, i, updated.master);
    shard.moment1_out[i] = updated.moment1;
    shard.moment2_out[i] = updated.moment2;
  }
}

}  // namespace strata::cpu_adam
