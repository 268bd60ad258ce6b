// A Llama's units called one by one on a device, without a pipeline: all micro-batches through one
// unit after the other and back. Memory that a call must not rely on is filled with NaNs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "gpu/device.h"
#include "model/llama.h"
#include "model/test_batch.h"

namespace strata::model {

/// A fill of these bytes is NaN in bf16, fp32 and double.
inline constexpr std::byte kPoison{0xff};

/// Device memory of a size, with a stretch of poison behind it.
class GuardedMemory {
 public:
  static constexpr size_t kGuardBytes = 512;

  GuardedMemory(gpu::Device& device, gpu::Stream& stream, size_t size_bytes)
      : device_(device),
        stream_(stream),
        size_bytes_(size_bytes),
        memory_(device.allocate_device_memory(size_bytes + kGuardBytes)),
        staging_(device.allocate_host_memory(size_bytes + kGuardBytes)) {
    std::fill_n(staging_->data(), staging_->size_bytes(), kPoison);
    copy(staging_->size_bytes(), gpu::CopyDirection::kUpload);
  }

  [[nodiscard]] void* data() const { return memory_->data(); }
  [[nodiscard]] size_t size_bytes() const { return size_bytes_; }

  void poison() {
    std::fill_n(staging_->data(), size_bytes_, kPoison);
    copy(size_bytes_, gpu::CopyDirection::kUpload);
  }
  void write(std::span<const std::byte> bytes) {
    std::copy(bytes.begin(), bytes.end(), staging_->data());
    copy(bytes.size(), gpu::CopyDirection::kUpload);
  }
  [[nodiscard]] std::vector<std::byte> read() {
    copy(size_bytes_, gpu::CopyDirection::kDownload);
    return {staging_->data(), staging_->data() + size_bytes_};
  }
  [[nodiscard]] bool guard_is_intact() {
    copy(staging_->size_bytes(), gpu::CopyDirection::kDownload);
    return std::all_of(staging_->data() + size_bytes_, staging_->data() + staging_->size_bytes(),
                       [](std::byte byte) { return byte == kPoison; });
  }

 private:
  void copy(size_t size_bytes, gpu::CopyDirection direction) {
    const bool up = direction == gpu::CopyDirection::kUpload;
    std::byte* to = up ? memory_->data() : staging_->data();
    std::byte* from = up ? staging_->data() : memory_->data();
    device_.copy_async(to, from, size_bytes, direction, stream_);
    device_.synchronize(stream_);
  }

  gpu::Device& device_;
  gpu::Stream& stream_;
  size_t size_bytes_;
  std::unique_ptr<gpu::Arena> memory_, staging_;
};

/// All that the units computed, as bytes: boundaries, their gradients after each unit, weight
/// gradients, the sum of losses.
struct UnitResults {
  std::vector<std::vector<std::byte>> boundaries, boundary_gradients, gradients;
  std::vector<std::byte> loss_sum;
  bool operator==(const UnitResults&) const = default;
};

class UnitRun {
 public:
  using Memory = std::unique_ptr<GuardedMemory>;

  /// `levels`: what each unit saves.
  UnitRun(gpu::Device& device, const Llama& llama, const std::vector<TestBatch>& batches,
          std::vector<pipeline::SavedActivations> levels)
      : device_(device), llama_(llama), levels_(std::move(levels)) {
    stream_ = device.create_stream("units");
    for (const TestBatch& batch : batches) add_batch(batch);
    shape_.micro_batches = static_cast<int64_t>(batches.size());
    forward_workspace_ = workspace(pipeline::Pass::kForward);
    backward_workspace_ = workspace(pipeline::Pass::kBackward);
    loss_workspace_ = workspace(pipeline::Pass::kLossAndBackward);
    std::vector<std::byte> table(llama.constants_bytes());
    llama.write_constants(table);
    constants_ = holding(table);
    loss_sum_ = holding(std::vector<std::byte>(sizeof(double)));
    for (size_t unit = 0; unit < llama.units().size(); ++unit) {
      const int64_t count = llama.units()[unit].parameter_count;
      weights_.push_back(holding(random_values(count, 0.2F, unit)));
      gradients_.push_back(allocate(static_cast<size_t>(count) * sizeof(float)));
    }
  }

  [[nodiscard]] std::vector<Memory>& saved(int unit) { return saved_[static_cast<size_t>(unit)]; }

  [[nodiscard]] GuardedMemory& gradient(int unit) { return *gradients_[static_cast<size_t>(unit)]; }

  void forward(int unit, size_t batch) {
    forward_workspace_->poison();
    pipeline::UnitCall call = call_of(unit, batch, *forward_workspace_);
    call.output = boundaries_[static_cast<size_t>(unit)][batch]->data();
    llama_.forward(unit, call);
    device_.synchronize(*stream_);
  }

  void loss(size_t batch, bool backward = true) {
    loss_workspace_->poison();
    const int unit = last_unit();
    pipeline::UnitCall call = call_of(unit, batch, *loss_workspace_);
    if (backward) {
      call.boundary_gradient = boundary_gradients_[batch]->data();
      add_gradients(call, unit, batch);
    }
    if (backward && call.shared_weight != nullptr) {
      call.shared_gradient = static_cast<float*>(gradients_[0]->data());
      call.accumulate_shared = batch > 0;
    }
    call.loss_scale = 0.125F;
    call.loss_sum = static_cast<double*>(loss_sum_->data());
    llama_.loss(call);
    device_.synchronize(*stream_);
  }

  void backward(int unit, size_t batch) {
    backward_workspace_->poison();
    pipeline::UnitCall call = call_of(unit, batch, *backward_workspace_);
    call.boundary_gradient = boundary_gradients_[batch]->data();
    add_gradients(call, unit, batch);
    // A tied head has already put its part there.
    call.accumulate = call.accumulate || (unit == 0 && llama_.units().back().shared_unit == 0);
    llama_.backward(unit, call);
    device_.synchronize(*stream_);
  }

  /// The boundary after a unit is poisoned before the unit's backward pass.
  UnitResults forward_backward() {
    UnitResults results;
    for (int unit = 0; unit < last_unit(); ++unit) {
      for (size_t batch = 0; batch < batches_.size(); ++batch) {
        forward(unit, batch);
        results.boundaries.push_back(boundaries_[static_cast<size_t>(unit)][batch]->read());
      }
    }
    const auto keep_gradient = [&](size_t batch) {
      results.boundary_gradients.push_back(boundary_gradients_[batch]->read());
    };
    for (size_t batch = 0; batch < batches_.size(); ++batch) {
      loss(batch);
      keep_gradient(batch);
    }
    for (int unit = last_unit() - 1; unit >= 0; --unit) {
      for (size_t batch = 0; batch < batches_.size(); ++batch) {
        boundaries_[static_cast<size_t>(unit)][batch]->poison();
        backward(unit, batch);
        if (unit > 0) keep_gradient(batch);
      }
    }
    for (const Memory& gradient : gradients_) results.gradients.push_back(gradient->read());
    results.loss_sum = loss_sum_->read();
    return results;
  }

  /// Nothing was written behind the memory of any call.
  [[nodiscard]] bool guards_are_intact() {
    bool intact = true;
    const auto look_at = [&](const Memory& memory) { intact &= memory->guard_is_intact(); };
    for (const Memory* memory :
         {&forward_workspace_, &backward_workspace_, &loss_workspace_, &constants_, &loss_sum_}) {
      look_at(*memory);
    }
    for (const auto* all : {&weights_, &gradients_, &boundary_gradients_}) {
      std::for_each(all->begin(), all->end(), look_at);
    }
    for (const auto* all : {&boundaries_, &saved_}) {
      for (const auto& unit : *all) std::for_each(unit.begin(), unit.end(), look_at);
    }
    return intact;
  }

 private:
  struct Batch {
    Memory tokens, targets, positions, offsets;
    int64_t token_count = 0, sequences = 0, max_sequence = 0;
  };

  [[nodiscard]] int last_unit() const { return static_cast<int>(llama_.units().size()) - 1; }

  Memory allocate(size_t size_bytes) {
    return std::make_unique<GuardedMemory>(device_, *stream_, size_bytes);
  }
  Memory holding(std::span<const std::byte> bytes) {
    Memory memory = allocate(bytes.size());
    memory->write(bytes);
    return memory;
  }
  Memory workspace(pipeline::Pass pass) {
    return allocate(llama_.workspace_bytes(pass, shape_, device_.operators()));
  }

  [[nodiscard]] std::vector<std::byte> random_values(int64_t count, float scale, uint64_t stream) {
    const DType dtype = llama_.dtype();
    std::vector<std::byte> out(static_cast<size_t>(count) * size_of(dtype));
    CounterRandom random(23, stream);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const float value = scale * (static_cast<float>(random.next_below(4001)) / 2000.0F - 1.0F);
      if (dtype == DType::kF32) {
        std::memcpy(out.data() + i * sizeof value, &value, sizeof value);
      } else {
        const Bf16 half = to_bf16(value);
        std::memcpy(out.data() + i * sizeof half, &half, sizeof half);
      }
    }
    return out;
  }

  void add_batch(const TestBatch& source) {
    Batch batch;
    batch.tokens = holding(std::as_bytes(std::span(source.tokens)));
    batch.targets = holding(std::as_bytes(std::span(source.targets)));
    batch.positions = holding(std::as_bytes(std::span(source.positions)));
    batch.offsets = holding(std::as_bytes(std::span(source.offsets)));
    batch.token_count = static_cast<int64_t>(source.tokens.size());
    batch.sequences = static_cast<int64_t>(source.offsets.size()) - 1;
    for (size_t i = 1; i < source.offsets.size(); ++i) {
      batch.max_sequence =
          std::max<int64_t>(batch.max_sequence, source.offsets[i] - source.offsets[i - 1]);
    }
    shape_.tokens = std::max(shape_.tokens, batch.token_count);
    shape_.max_sequences = std::max(shape_.max_sequences, batch.sequences);
    boundary_gradients_.push_back(allocate(llama_.boundary_bytes(batch.token_count)));
    boundaries_.resize(llama_.units().size() - 1);
    saved_.resize(llama_.units().size());
    for (auto& unit : boundaries_) {
      unit.push_back(allocate(llama_.boundary_bytes(batch.token_count)));
    }
    for (size_t unit = 0; unit < saved_.size(); ++unit) {
      saved_[unit].push_back(
          allocate(llama_.saved_bytes(static_cast<int>(unit), levels_[unit], batch.token_count)));
    }
    batches_.push_back(std::move(batch));
  }

  pipeline::UnitCall call_of(int unit, size_t index, const GuardedMemory& workspace) {
    const auto u = static_cast<size_t>(unit);
    const Batch& batch = batches_[index];
    const auto integers = [](const Memory& memory) {
      return static_cast<const int32_t*>(memory->data());
    };
    const GuardedMemory& saved = *saved_[u][index];
    const bool reads_shared = llama_.units()[u].shared_unit == 0;
    return {.device = device_,
            .stream = *stream_,
            .batch = {.tokens = batch.token_count,
                      .sequences = batch.sequences,
                      .max_sequence = batch.max_sequence,
                      .token_ids = integers(batch.tokens),
                      .targets = integers(batch.targets),
                      .positions = integers(batch.positions),
                      .sequence_offsets = integers(batch.offsets)},
            .constants = constants_->data(),
            .workspace = workspace.data(),
            .saved = levels_[u],
            .saved_activations = saved.size_bytes() > 0 ? saved.data() : nullptr,
            .weight = weights_[u]->data(),
            .shared_weight = reads_shared ? weights_[0]->data() : nullptr,
            .input = unit > 0 ? boundaries_[u - 1][index]->data() : nullptr};
  }

  void add_gradients(pipeline::UnitCall& call, int unit, size_t batch) {
    call.gradient = static_cast<float*>(gradients_[static_cast<size_t>(unit)]->data());
    call.accumulate = batch > 0;
  }

  gpu::Device& device_;
  const Llama& llama_;
  std::vector<pipeline::SavedActivations> levels_;
  std::unique_ptr<gpu::Stream> stream_;
  pipeline::StepShape shape_{};
  std::vector<Batch> batches_;
  Memory forward_workspace_, backward_workspace_, loss_workspace_, constants_, loss_sum_;
  std::vector<Memory> weights_, gradients_;              // of a unit
  std::vector<Memory> boundary_gradients_;               // of a micro-batch
  std::vector<std::vector<Memory>> boundaries_, saved_;  // of a unit and a micro-batch
};

}  // namespace strata::model
