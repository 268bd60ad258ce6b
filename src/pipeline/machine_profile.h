// What a machine can do: sizes of its tiers and speeds of its lanes, measured or assumed, each with
// where it comes from. A JSON file; some machines' are shipped in the binary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/simulator.h"

namespace strata::pipeline {

/// Speeds are what lasts, not what data sheets promise. The member's name is its key in the file.
struct MachineProfile {
  std::string name;
  std::string machine;  // one line for people: parts and their number
  std::string device;   // "cuda" or "host"
  bool measured = false;

  size_t device_memory_bytes = 0;
  size_t host_memory_bytes = 0;
  size_t nvme_bytes = 0;  // 0 with drives
  double matmul_bf16_flops_per_s = 0;
  double matmul_fp32_flops_per_s = 0;  // for the reference mode
  double device_memory_bytes_per_s = 0;
  double upload_bytes_per_s = 0;
  double download_bytes_per_s = 0;
  /// Both directions at once, as a part of the sum of the two speeds: 1 where they do not touch
  /// each other, 1/2 where they share all.
  double both_links = 1;
  /// The optimizer on CPU threads: bytes of host memory read and written, of which the exact format
  /// takes 26 a parameter.
  double adam_bytes_per_s = 0;
  /// Host memory, with the optimizer, both directions of the link and the drives at work together.
  double host_memory_bytes_per_s = 0;
  /// Device and optimizer at work together: the speed of each as a part of its speed alone. 1 where
  /// the device has processors of its own.
  double compute_with_adam = 1;
  double read_bytes_per_s = 0;   // of all drives together, 0 without any
  double write_bytes_per_s = 0;  // likewise, and after hours of writing
  int drives = 0;
  double launch_s = 0;        // a task of the device costs besides its work
  double link_latency_s = 0;  // a transfer costs besides its bytes

  // Between ranks. Files may leave these out; 0 is unknown then, and an error only where a plan
  // needs it.
  int ranks_per_node = 0;
  /// What a rank sends in a second, and receives at the same time, in collectives within its node:
  /// what nccl-tests call bus bandwidth.
  double collective_bytes_per_s = 0;
  double collective_latency_s = 0;  // of one hop within a node
  double network_bytes_per_s = 0;   // likewise between nodes, the rank's share of its node's
  double network_latency_s = 0;     // of one hop between nodes

  /// A line of text for each figure above that is known: where it comes from.
  std::map<std::string, std::string, std::less<>> sources;

  /// What the lanes cost each other, for the simulator.
  [[nodiscard]] LaneSharing sharing() const;
  friend bool operator==(const MachineProfile&, const MachineProfile&) = default;
};

/// Keys of all figures, in the file's order.
[[nodiscard]] std::vector<std::string_view> figure_keys();

/// Of the JSON form; `origin` is the file's name in messages. Strict: unknown, missing or doubled
/// keys and values that no machine has are usage errors that name origin and key. Of the figures
/// only those between ranks may be missing.
[[nodiscard]] MachineProfile parse_profile(std::string_view json, const std::string& origin);
[[nodiscard]] std::string to_json(const MachineProfile& profile);

[[nodiscard]] MachineProfile read_profile(const std::filesystem::path& path);
/// Replaces the file atomically. Refuses what read_profile would refuse.
void write_profile(const std::filesystem::path& path, const MachineProfile& profile);

/// Names of the shipped profiles, in alphabetical order.
[[nodiscard]] std::vector<std::string_view> shipped_profiles();
/// The shipped profile of that name, else the profile in that file.
[[nodiscard]] MachineProfile find_profile(const std::string& name_or_path);

}  // namespace strata::pipeline
