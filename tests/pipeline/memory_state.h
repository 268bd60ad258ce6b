// The state of a model in ordinary memory, as a rank of several would hold it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "pipeline/state_access.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// What the bytes of state begin as: what was not written shows.
inline constexpr std::byte kUnwritten{0xa5};

class MemoryState final : public StateAccess {
 public:
  /// All kinds but gradients, or weights alone.
  MemoryState(const UnitModel& model, cpu_adam::MomentFormat moments, int shard_ranks = 1,
              int shard_rank = 0, bool training = true)
      : model_(model), moments_(moments), shard_ranks_(shard_ranks), shard_rank_(shard_rank) {
    for (const UnitSpec& unit : model.units()) {
      const int64_t padded = shard_elements(unit.parameter_count, shard_ranks, moments);
      auto& kinds = bytes_.emplace_back();
      for (size_t kind = 0; kind < kinds.size(); ++kind) {
        if (kind > 0 && !training) continue;
        kinds[kind].assign(
            state_bytes(static_cast<StateKind>(kind), padded, model.dtype(), moments), kUnwritten);
      }
    }
  }

  [[nodiscard]] std::vector<std::byte>& bytes(int unit, StateKind kind) {
    return bytes_[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
  }
  [[nodiscard]] const std::vector<std::byte>& bytes(int unit, StateKind kind) const {
    return bytes_[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
  }

  [[nodiscard]] ElementRange shard(int unit) const override {
    return shard_range(model_.units()[static_cast<size_t>(unit)].parameter_count, shard_ranks_,
                       shard_rank_, moments_);
  }
  [[nodiscard]] size_t state_size_bytes(int unit, StateKind kind) const override {
    return bytes(unit, kind).size();
  }
  [[nodiscard]] cpu_adam::MomentFormat moments() const noexcept override { return moments_; }
  void finish_update() override { ++updates_finished; }
  void read_state(int unit, StateKind kind, size_t offset_bytes,
                  std::span<std::byte> out) override {
    STRATA_CHECK(offset_bytes + out.size() <= state_size_bytes(unit, kind), "a range of state");
    if (bytes_until_failure < out.size()) throw failure("the state cannot be read");
    bytes_until_failure -= out.size();
    if (!out.empty()) std::memcpy(out.data(), bytes(unit, kind).data() + offset_bytes, out.size());
  }
  void write_state(int unit, StateKind kind, size_t offset_bytes,
                   std::span<const std::byte> data) override {
    STRATA_CHECK(offset_bytes + data.size() <= state_size_bytes(unit, kind), "a range of state");
    std::copy(data.begin(), data.end(),
              bytes(unit, kind).begin() + static_cast<std::ptrdiff_t>(offset_bytes));
    bytes_written += data.size();
  }

  size_t bytes_until_failure = SIZE_MAX;  // of what is read
  size_t bytes_written = 0;
  int updates_finished = 0;

 private:
  const UnitModel& model_;
  cpu_adam::MomentFormat moments_;
  int shard_ranks_, shard_rank_;
  std::vector<std::array<std::vector<std::byte>, kStateKinds - 1>> bytes_;  // [unit][kind]
};

}  // namespace strata::pipeline
