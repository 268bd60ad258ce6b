// The plan of a run: what its configuration and this machine allow, and the best of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "gpu/device.h"
#include "model/llama.h"
#include "pipeline/executor.h"
#include "pipeline/planner.h"
#include "train/config.h"

namespace strata::train {

/// The profile that the configuration names; without one, the shipped one that comes nearest to the
/// device, or for CPU cores assumed speeds. There are as
/// many drives as the configuration names, if it names any. Links and drives are no faster than it
/// lets them be.
[[nodiscard]] pipeline::MachineProfile profile_of(const TrainConfig& config,
                                                  const gpu::Device& device);

/// Memory that is there for one rank, whatever the configuration allows of it.
struct RunMemory {
  size_t device_bytes = 0;  // within device_memory, if that is set
  size_t host_bytes = 0;
};
/// `local_ranks`: ranks that share this machine's memory.
[[nodiscard]] RunMemory memory_of(const gpu::Device& device, int local_ranks = 1);

/// What one rank may take of the drives of the configuration.
[[nodiscard]] size_t room_on_drives(const TrainConfig& config, int local_ranks = 1);

/// What the plan may not choose anew.
struct RunConstraints {
  size_t data_bytes = 0;  // of host memory, beside the plan
  RunMemory memory{};     // the same on all ranks, which must choose the same plan
  pipeline::RankLayout ranks{};
  int local_ranks = 1;
  std::optional<size_t> nvme_bytes = std::nullopt;  // instead of room_on_drives()
  /// Of the store that the run goes on from, which is committed every step.
  std::optional<int64_t> part_elements = std::nullopt;
};

/// Chooses the plan. Throws a usage error for what does not go together, and an Error of kind
/// kDoesNotFit with numbers.
[[nodiscard]] pipeline::Foretold plan_run(const TrainConfig& config, gpu::Device& device,
                                          const model::Llama& llama,
                                          const pipeline::MachineProfile& profile,
                                          const RunConstraints& constraints);

/// Directories and speeds of the drives.
[[nodiscard]] pipeline::NvmeOptions nvme_options(const TrainConfig& config);

}  // namespace strata::train
