// What the pipeline knows of a model: a list of units with sizes, a forward and a backward. The
// first unit turns tokens into a boundary, the last one turns a boundary into a loss, those between
// turn one boundary into the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "cpu_adam/shard.h"
#include "gpu/device.h"
#include "gpu/operators.h"

namespace strata::pipeline {

struct UnitSpec {
  std::string name;
  int64_t parameter_count = 0;                // a multiple of 8
  std::vector<cpu_adam::Segment> segments{};  // which parameters decay, in order
  bool backward_reads_weight = true;
  /// Another unit whose weight this one reads too and to whose gradient it adds (a tied head), or
  /// -1.
  int shared_unit = -1;
};

/// The size of what one optimizer step works on; fixed for a run.
struct StepShape {
  int64_t micro_batches = 1;
  int64_t tokens = 0;         // of one micro-batch
  int64_t max_sequences = 0;  // documents that one micro-batch can hold
};

/// One micro-batch in device memory.
struct MicroBatch {
  int64_t tokens = 0;
  int64_t sequences = 0;
  int64_t max_sequence = 0;
  const int32_t* token_ids = nullptr;         // [tokens]
  const int32_t* targets = nullptr;           // [tokens], negative: not part of the loss
  const int32_t* positions = nullptr;         // [tokens], within the document
  const int32_t* sequence_offsets = nullptr;  // [sequences + 1]
};

/// What a unit's forward pass keeps for its backward pass beside the input boundary. Results are
/// the same bits at every level.
enum class SavedActivations : uint8_t {
  kNone,       // nothing: backward recomputes all
  kAttention,  // of the attention half, what took a matrix product or attention to compute
  kAll,        // of the feed-forward half too
};

/// "none", "attention", "all".
[[nodiscard]] std::string_view name_of(SavedActivations saved) noexcept;

/// The device memory that one call of a unit works in. Pointers a call does not need are null.
struct UnitCall {
  gpu::Device& device;
  gpu::Stream& stream;
  MicroBatch batch;
  const void* constants = nullptr;
  void* workspace = nullptr;
  SavedActivations saved = SavedActivations::kNone;
  /// saved_bytes() of device memory, aligned to 64 bytes: written by forward, read by backward,
  /// which may overwrite it. Other than kNone only where backward follows.
  void* saved_activations = nullptr;
  const void* weight = nullptr;         // [parameter_count] of dtype()
  const void* shared_weight = nullptr;  // that of shared_unit
  const void* input = nullptr;          // boundary before the unit
  void* output = nullptr;               // boundary after the unit
  /// In: the gradient of the loss by `output`; out: by `input`. loss() only writes it; null there
  /// asks for the loss alone.
  void* boundary_gradient = nullptr;
  float* gradient = nullptr;  // [parameter_count] fp32, added to if accumulate, else overwritten
  bool accumulate = false;
  float* shared_gradient = nullptr;
  bool accumulate_shared = false;
  float loss_scale = 0;        // the gradient of the step's loss by one token's loss
  double* loss_sum = nullptr;  // added to
};

enum class Pass : uint8_t { kForward, kBackward, kLoss, kLossAndBackward };

/// Calls are asynchronous on the call's stream, in order, and neither allocate nor synchronise.
class UnitModel {
 public:
  virtual ~UnitModel() = default;

  [[nodiscard]] virtual std::span<const UnitSpec> units() const noexcept = 0;
  /// Of weights and boundaries: kBf16, or kF32 in the reference mode.
  [[nodiscard]] virtual DType dtype() const noexcept = 0;
  [[nodiscard]] virtual size_t boundary_bytes(int64_t tokens) const noexcept = 0;
  /// Tables that the units read (rotary angles): written once, kept on the device.
  [[nodiscard]] virtual size_t constants_bytes() const noexcept = 0;
  virtual void write_constants(std::span<std::byte> out) const = 0;

  /// Enough for any unit at any level of saved activations.
  [[nodiscard]] virtual size_t workspace_bytes(Pass pass, const StepShape& shape,
                                               const gpu::Operators& operators) const = 0;
  /// Of one micro-batch; 0 where there is nothing to keep: at kNone, and in the first and the last
  /// unit.
  [[nodiscard]] virtual size_t saved_bytes(int unit, SavedActivations saved,
                                           int64_t tokens) const = 0;
  /// Floating-point operations of the matrix products of one call, with what backward recomputes
  /// at this level; attention counts the causal half of full-length documents only.
  [[nodiscard]] virtual double matmul_flops(
      int unit, Pass pass, int64_t tokens, int64_t sequence_length,
      SavedActivations saved = SavedActivations::kNone) const = 0;
  /// Bytes of device memory that one call reads and writes outside matrix products and attention
  /// (norms, rotation, activation functions, embedding, cross-entropy, copies), recomputation
  /// included: the operands of each operator called, weights and per-row values too, each once and
  /// the logits twice where they become gradients. Gradients count as added to, rows of the
  /// embedding as all different; scratch does not count.
  [[nodiscard]] virtual double other_bytes(int unit, Pass pass, int64_t tokens,
                                           SavedActivations saved) const = 0;

  virtual void forward(int unit, const UnitCall& call) const = 0;
  /// Recomputes from the input boundary what forward did not save. Tokens and `saved` are those of
  /// the forward call.
  virtual void backward(int unit, const UnitCall& call) const = 0;
  /// The last unit: the loss, and with boundary_gradient the backward pass at once.
  virtual void loss(const UnitCall& call) const = 0;
  /// The last unit: logits [vocabulary] fp32 of one row.
  virtual void logits(const UnitCall& call, int64_t row, float* out) const = 0;
  [[nodiscard]] virtual int64_t vocabulary() const noexcept = 0;
};

}  // namespace strata::pipeline
