#include "pipeline/plan.h"

namespace strata::pipeline {

size_t occupied_bytes(const Buffer& buffer) noexcept {
  if (buffer.tier == Tier::kNvme) {
    return align_up(buffer.size_bytes, kDriveAlignment) * (buffer.two_slots ? 2 : 1);
  }
  const bool is_state = buffer.purpose == Purpose::kWeights ||
                        buffer.purpose == Purpose::kOptimizerState ||
                        buffer.purpose == Purpose::kGradients;
  return align_up(buffer.size_bytes, buffer.alignment_bytes) + (is_state ? kStateGap : 0);
}

std::array<size_t, kPurposes> Plan::bytes_by_purpose(Tier tier) const {
  std::array<size_t, kPurposes> sums{};
  for (const Buffer& buffer : buffers.all) {
    if (buffer.tier != tier) continue;
    sums[static_cast<size_t>(buffer.purpose)] += occupied_bytes(buffer);
  }
  return sums;
}

size_t Plan::part_bytes(int unit, StateKind kind, int part) const {
  const PartGeometry& geometry = parts[static_cast<size_t>(unit)];
  return state_bytes(kind, geometry.elements(part), dtype, placement.moments);
}

size_t Plan::part_offset_bytes(int unit, StateKind kind, int part) const {
  return state_bytes(kind, parts[static_cast<size_t>(unit)].first(part), dtype, placement.moments);
}

size_t Plan::record_stride_bytes(int unit, StateKind kind) const {
  const PartGeometry& geometry = parts[static_cast<size_t>(unit)];
  if (geometry.parts == 1) return align_up(part_bytes(unit, kind, 0), kDriveAlignment);
  return align_up(state_bytes(kind, geometry.part_elements, dtype, placement.moments),
                  store_chunk_bytes);
}

}  // namespace strata::pipeline
