// The sizes and sums of a plan: names, bytes of state at rest, bytes of a tier by purpose.

#include "base/bytes.h"
#include "pipeline/step_graph.h"

namespace strata::pipeline {

std::string_view name_of(Tier tier) noexcept { return tier == Tier::kDevice ? "device" : "host"; }

std::string_view name_of(StateKind kind) noexcept {
  switch (kind) {
    case StateKind::kWeight:
      return "weight";
    case StateKind::kResidual:
      return "residual";
    case StateKind::kMoment1:
      return "moment1";
    case StateKind::kMoment2:
      return "moment2";
    case StateKind::kGradient:
      return "gradient";
  }
  return "?";
}

std::string_view name_of(Lane lane) noexcept {
  switch (lane) {
    case Lane::kUpload:
      return "upload";
    case Lane::kCompute:
      return "compute";
    case Lane::kDownload:
      return "download";
    case Lane::kCpu:
      return "cpu";
  }
  return "?";
}

std::string_view name_of(TaskKind kind) noexcept {
  switch (kind) {
    case TaskKind::kUploadBatch:
      return "upload batch";
    case TaskKind::kUploadWeight:
      return "upload weight";
    case TaskKind::kClearScalars:
      return "clear scalars";
    case TaskKind::kForward:
      return "forward";
    case TaskKind::kBackward:
      return "backward";
    case TaskKind::kLoss:
      return "loss";
    case TaskKind::kFinishGradient:
      return "finish gradient";
    case TaskKind::kDownloadGradient:
      return "download gradient";
    case TaskKind::kDownloadScalars:
      return "download scalars";
    case TaskKind::kAdam:
      return "adam";
  }
  return "?";
}

std::string_view name_of(Purpose purpose) noexcept {
  switch (purpose) {
    case Purpose::kWeights:
      return "weights";
    case Purpose::kOptimizerState:
      return "optimizer state";
    case Purpose::kGradients:
      return "gradients";
    case Purpose::kSlots:
      return "slots";
    case Purpose::kAccumulators:
      return "gradient accumulators";
    case Purpose::kBoundaries:
      return "boundaries";
    case Purpose::kWorkspace:
      return "workspace";
    case Purpose::kBatches:
      return "batches";
    case Purpose::kConstants:
      return "constants";
  }
  return "?";
}

size_t state_bytes(StateKind kind, DType dtype) noexcept {
  switch (kind) {
    case StateKind::kWeight:
    case StateKind::kGradient:
      return size_of(dtype);
    case StateKind::kResidual:
      return dtype == DType::kBf16 ? 2 : 0;
    case StateKind::kMoment1:
    case StateKind::kMoment2:
      return 4;
  }
  return 0;
}

std::array<size_t, kPurposes> Plan::bytes_by_purpose(Tier tier) const {
  std::array<size_t, kPurposes> sums{};
  for (const Buffer& buffer : buffers.all) {
    if (buffer.tier != tier) continue;
    sums[static_cast<size_t>(buffer.purpose)] += align_up(buffer.size_bytes, kBufferAlignment);
  }
  return sums;
}

}  // namespace strata::pipeline
