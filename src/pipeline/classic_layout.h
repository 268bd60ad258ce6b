// The accounting of the literature, to be set beside our own layout's: 20 bytes a parameter, whole
// in the device memory of each rank, divided by ZeRO stages (Rajbhandari et al., "ZeRO: Memory
// Optimizations Toward Training Trillion Parameter Models", sections 5 and 7), with fp32
// accumulators of the gradients beside their bf16. Pure functions; any thread.
//
// Bytes here are 10^9 to a GB, no padding, and divisions are real: it is arithmetic of the
// textbook, not of an arena.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace strata::pipeline {

/// What is divided among ranks grows with the stage: the optimizer's state, then gradients, then
/// weights.
enum class ZeroStage : uint8_t { kNone, kOptimizer, kGradients, kWeights };
inline constexpr std::array kZeroStages{ZeroStage::kNone, ZeroStage::kOptimizer,
                                        ZeroStage::kGradients, ZeroStage::kWeights};
/// "plain", "zero-1", "zero-2", "zero-3".
[[nodiscard]] std::string_view name_of(ZeroStage stage) noexcept;

// A parameter's bytes.
inline constexpr int64_t kClassicWeightBytes = 2;         // bf16
inline constexpr int64_t kClassicGradientBytes = 2 + 4;   // bf16, and its fp32 accumulator
inline constexpr int64_t kClassicOptimizerBytes = 3 * 4;  // fp32 master and two moments
inline constexpr int64_t kClassicBytes =
    kClassicWeightBytes + kClassicGradientBytes + kClassicOptimizerBytes;

struct ClassicModel {
  int64_t parameters = 0;
  int64_t largest_block = 0;  // parameters of what is gathered at once
};

/// Of one rank.
struct ClassicMemory {
  double weight_bytes = 0, gradient_bytes = 0, optimizer_bytes = 0;
  /// With kWeights, two whole blocks in bf16: in forward the weights of the block at work and of
  /// the one being gathered, in backward weight and gradient of the block at work. (Gathering ahead
  /// in backward too takes a third; the textbook's "about 0.8 GB" for 7B does not count it.)
  double transient_bytes = 0;

  [[nodiscard]] double state_bytes() const noexcept {
    return weight_bytes + gradient_bytes + optimizer_bytes;
  }
  [[nodiscard]] double total_bytes() const noexcept { return state_bytes() + transient_bytes; }
};
[[nodiscard]] ClassicMemory classic_memory(const ClassicModel& model, ZeroStage stage,
                                           int ranks) noexcept;

/// Bytes that one rank sends (and receives) in an optimizer step, by ring algorithms, which send
/// the least. The classic order runs micro-batch after micro-batch through the whole model.
struct ClassicTraffic {
  double gather_forward_bytes = 0, gather_backward_bytes = 0;  // kWeights
  double gather_update_bytes = 0;  // kOptimizer and kGradients: the weights once updated
  /// Reduce-scatter of gradients; with kNone as much again, as the second half of an all-reduce.
  double reduce_bytes = 0;

  [[nodiscard]] double total_bytes() const noexcept {
    return gather_forward_bytes + gather_backward_bytes + gather_update_bytes + reduce_bytes;
  }
};
/// Per pass 2 N (D - 1) / D: with kWeights two gathers and one reduction for each micro-batch; with
/// kGradients a reduction for each, since whole gradients are not kept; with the others one.
[[nodiscard]] ClassicTraffic classic_traffic(const ClassicModel& model, ZeroStage stage, int ranks,
                                             int64_t micro_batches) noexcept;

}  // namespace strata::pipeline
