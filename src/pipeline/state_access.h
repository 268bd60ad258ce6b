// One rank's part of a model's state, wherever it rests: what weights and checkpoints are put into
// and taken from. An Executor is one.
#pragma once

#include <cstddef>
#include <span>

#include "pipeline/placement.h"
#include "pipeline/sharding.h"

namespace strata::pipeline {

/// Calls block; one thread at a time.
class StateAccess {
 public:
  virtual ~StateAccess() = default;

  /// Which of a unit's parameters this rank holds; state of it is their state.
  [[nodiscard]] virtual ElementRange shard(int unit) const = 0;
  /// Bytes of one unit's state of one kind that this rank keeps: of shard().count parameters, or of
  /// more where the shards of all ranks are padded to one size. 0 where it keeps none.
  [[nodiscard]] virtual size_t state_size_bytes(int unit, StateKind kind) const = 0;
  /// The format of what is kept of moments.
  [[nodiscard]] virtual cpu_adam::MomentFormat moments() const noexcept = 0;

  /// Runs pending updates. All ranks call it before any of them reads state.
  virtual void finish_update() = 0;
  /// Copies bytes of one unit's state of one kind from or to its home. Byte 0 is of parameter
  /// shard().first.
  virtual void read_state(int unit, StateKind kind, size_t offset_bytes,
                          std::span<std::byte> out) = 0;
  virtual void write_state(int unit, StateKind kind, size_t offset_bytes,
                           std::span<const std::byte> data) = 0;

 protected:
  StateAccess() = default;
  StateAccess(const StateAccess&) = default;
  StateAccess& operator=(const StateAccess&) = default;
};

}  // namespace strata::pipeline
