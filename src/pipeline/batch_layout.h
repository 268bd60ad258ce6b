// How one micro-batch lies in memory, on the host and on the device alike: one copy moves it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "pipeline/unit_model.h"

namespace strata::pipeline {

/// Offsets in bytes of the int32 arrays of a micro-batch.
struct BatchLayout {
  size_t token_ids, targets, positions, sequence_offsets, size_bytes;
};

[[nodiscard]] constexpr BatchLayout batch_layout(const StepShape& shape) noexcept {
  const size_t array = align_up(static_cast<size_t>(shape.tokens) * sizeof(int32_t), 64);
  const size_t offsets = static_cast<size_t>(shape.max_sequences + 1) * sizeof(int32_t);
  return {0, array, 2 * array, 3 * array, align_up(3 * array + offsets, 64)};
}

}  // namespace strata::pipeline
