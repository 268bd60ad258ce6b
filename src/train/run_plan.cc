#include "train/run_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "gpu/host/serial_gemm.h"
#include "nvme/arena_file.h"
#include "nvme/throttled_backend.h"
#include "train/process_memory.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using pipeline::MachineProfile;
using pipeline::Tier;

/// Speeds to choose by where nothing was measured: what ordinary cores and memory reach.
MachineProfile assumed_host_profile(int64_t threads) {
  const auto cores = static_cast<double>(threads);
  return {.name = "assumed",
          .machine = "CPU cores",
          .device = "host",
          .matmul_bf16_flops_per_s = (gpu::host::has_bf16_gemm() ? 150e9 : 75e9) * cores,
          .matmul_fp32_flops_per_s = 75e9 * cores,
          .device_memory_bytes_per_s = 10e9 * cores,
          .upload_bytes_per_s = 8e9,
          .download_bytes_per_s = 8e9,
          .both_links = 0.75,
          .adam_bytes_per_s = 15e9 * cores,
          .host_memory_bytes_per_s = 20e9 * cores,
          .compute_with_adam = 0.5,
          .read_bytes_per_s = 2e9,
          .write_bytes_per_s = 1e9,
          .drives = 1,
          .launch_s = 50e-6,
          .link_latency_s = 50e-6,
          .sources = {}};
}

/// The shipped profile of a GPU by its name, or of one that is in no way faster.
std::string_view nearest_profile(std::string_view description) {
  for (const auto& [part, profile] : {std::pair<std::string_view, std::string_view>{"H200", "h200"},
                                      {"H100", "h100"},
                                      {"A100", "a100"}}) {
    if (description.find(part) != std::string_view::npos) return profile;
  }
  return "rtx4090-ddr5";
}

/// What a rank may take of a directory's drive: of its free space, or what the configuration allows
/// of it.
size_t room_of(const DriveSpec& drive, int local_ranks) {
  // A store that is there already will be used again, or made anew in its place.
  std::error_code none;
  const auto existing = fs::file_size(nvme::arena_path(drive.path), none);
  const size_t room =
      static_cast<size_t>(nvme::free_bytes(drive.path)) / static_cast<size_t>(local_ranks) +
      (none ? 0 : existing);
  return drive.limit_bytes ? std::min(*drive.limit_bytes, room) : room;
}

}  // namespace

MachineProfile profile_of(const TrainConfig& config, const gpu::Device& device) {
  MachineProfile profile;
  if (!config.profile.empty()) {
    profile = pipeline::find_profile(config.profile);
  } else if (device.kind() == "host") {
    const auto all = static_cast<int64_t>(std::max(1U, std::thread::hardware_concurrency()));
    profile = assumed_host_profile(config.threads > 0 ? config.threads : all);
  } else {
    profile = pipeline::find_profile(std::string(nearest_profile(device.description())));
  }
  const auto limit = [](double& speed, const std::optional<double>& most, double times = 1) {
    if (most) speed = std::min(speed, *most * times);
  };
  limit(profile.upload_bytes_per_s, config.upload_bandwidth);
  limit(profile.download_bytes_per_s, config.download_bandwidth);
  if (!config.nvme.empty() && profile.drives > 0) {
    // So many as there are directories, each like those of the profile.
    const auto drives = static_cast<double>(config.nvme.size());
    profile.read_bytes_per_s *= drives / profile.drives;
    profile.write_bytes_per_s *= drives / profile.drives;
    profile.drives = static_cast<int>(config.nvme.size());
    limit(profile.read_bytes_per_s, config.nvme_read_bandwidth, drives);
    limit(profile.write_bytes_per_s, config.nvme_write_bandwidth, drives);
  }
  return profile;
}

RunMemory memory_of(const gpu::Device& device, int local_ranks) {
  const auto ranks = static_cast<size_t>(local_ranks);
  // A host device's memory is the machine's, which the ranks share; a GPU is a rank's own.
  const bool is_shared = device.kind() == "host";
  return {.device_bytes = device.free_memory_bytes() / (is_shared ? ranks : 1),
          .host_bytes = available_memory_bytes() / ranks};
}

size_t room_on_drives(const TrainConfig& config, int local_ranks) {
  size_t bytes = 0;
  for (const DriveSpec& drive : config.nvme) bytes += room_of(drive, local_ranks);
  return bytes;
}

pipeline::Foretold plan_run(const TrainConfig& config, gpu::Device& device,
                            const model::Llama& llama, const MachineProfile& profile,
                            const RunConstraints& constraints) {
  // What is asked for is each rank's own; what is merely free is shared.
  const size_t device_bytes = device.kind() == "host" && config.device_memory
                                  ? device.free_memory_bytes()
                                  : constraints.memory.device_bytes;
  const size_t available = constraints.memory.host_bytes;
  size_t host_bytes = config.host_memory.value_or(available);
  const auto subtract = [](size_t from, size_t what) { return from > what ? from - what : 0; };
  host_bytes = subtract(host_bytes, constraints.data_bytes);
  const size_t nvme_bytes = constraints.nvme_bytes
                                ? *constraints.nvme_bytes
                                : room_on_drives(config, constraints.local_ranks);

  pipeline::PlanRequest request{
      .shape = {.micro_batches = config.gradient_accumulation_steps,
                .tokens = config.micro_batch_size * config.sequence_len,
                .max_sequences = config.micro_batch_size},
      .sequence_length = config.sequence_len,
      .budget = {.device_bytes = device_bytes, .host_bytes = host_bytes, .nvme_bytes = nvme_bytes},
      .host_beside_bytes = constraints.data_bytes,
      .moments = config.optimizer_state,
      .ranks = constraints.ranks,
      .clipping = config.max_grad_norm > 0,
      .fixed = {.part_elements = constraints.part_elements}};
  if (config.weight_slots) request.fixed.slots = static_cast<int>(*config.weight_slots);
  switch (config.offload) {
    case OffloadChoice::kAuto:
      break;
    case OffloadChoice::kNone:
      request.fixed.offload = Tier::kDevice;
      break;
    case OffloadChoice::kHost:
      request.fixed.offload = Tier::kHost;
      break;
    case OffloadChoice::kNvme:
      request.fixed.offload = Tier::kNvme;
      request.durable = config.commit == CommitChoice::kStep;
      break;
  }
  if (constraints.part_elements) request.durable = true;
  pipeline::Foretold foretold = pipeline::choose_plan(llama, device.operators(), profile, request);
  if (device.kind() == "host") {
    // Both arenas are this machine's memory.
    const size_t needed = foretold.plan.bytes(Tier::kDevice) + foretold.plan.bytes(Tier::kHost) +
                          constraints.data_bytes;
    if (needed > available) {
      throw Error(
          ErrorKind::kDoesNotFit,
          fmt::format("the plan needs {} ({} bytes) of this machine's memory for both "
                      "arenas{}, and {} are there; lower device_memory and host_memory, or "
                      "micro_batch_size, or choose a smaller model",
                      format_bytes(needed), needed,
                      constraints.local_ranks > 1 ? " of each rank" : "", format_bytes(available)));
    }
  }
  return foretold;
}

pipeline::NvmeOptions nvme_options(const TrainConfig& config) {
  pipeline::NvmeOptions options;
  for (const DriveSpec& drive : config.nvme) {
    nvme::StoreDirectory directory{.directory = drive.path};
    if (drive.limit_bytes) directory.limit_bytes = static_cast<int64_t>(*drive.limit_bytes);
    options.directories.push_back(std::move(directory));
  }
  if (config.nvme_read_bandwidth || config.nvme_write_bandwidth) {
    options.backend = nvme::throttled(options.backend, config.nvme_read_bandwidth.value_or(0),
                                      config.nvme_write_bandwidth.value_or(0));
  }
  return options;
}

}  // namespace strata::train
