#include "pipeline/classic_layout.h"

namespace strata::pipeline {

std::string_view name_of(ZeroStage stage) noexcept {
  constexpr std::array<std::string_view, 4> names{"plain", "zero-1", "zero-2", "zero-3"};
  return names[static_cast<size_t>(stage)];
}

ClassicMemory classic_memory(const ClassicModel& model, ZeroStage stage, int ranks) noexcept {
  const auto parameters = static_cast<double>(model.parameters);
  const auto bucket = [&](int64_t bytes, ZeroStage divided_from) {
    const double whole = static_cast<double>(bytes) * parameters;
    return stage >= divided_from ? whole / ranks : whole;
  };
  ClassicMemory memory{.weight_bytes = bucket(kClassicWeightBytes, ZeroStage::kWeights),
                       .gradient_bytes = bucket(kClassicGradientBytes, ZeroStage::kGradients),
                       .optimizer_bytes = bucket(kClassicOptimizerBytes, ZeroStage::kOptimizer)};
  if (stage == ZeroStage::kWeights && ranks > 1) {
    memory.transient_bytes =
        2 * static_cast<double>(kClassicWeightBytes) * static_cast<double>(model.largest_block);
  }
  return memory;
}

ClassicTraffic classic_traffic(const ClassicModel& model, ZeroStage stage, int ranks,
                               int64_t micro_batches) noexcept {
  const double pass = static_cast<double>(kClassicWeightBytes) *
                      static_cast<double>(model.parameters) * (ranks - 1) / ranks;
  const double passes = static_cast<double>(micro_batches) * pass;
  switch (stage) {
    case ZeroStage::kNone:
      return {.reduce_bytes = 2 * pass};
    case ZeroStage::kOptimizer:
      return {.gather_update_bytes = pass, .reduce_bytes = pass};
    case ZeroStage::kGradients:
      return {.gather_update_bytes = pass, .reduce_bytes = passes};
    case ZeroStage::kWeights:
      return {
          .gather_forward_bytes = passes, .gather_backward_bytes = passes, .reduce_bytes = passes};
  }
  return {};
}

}  // namespace strata::pipeline
