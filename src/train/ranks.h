// This process among the ranks of its run: started by torchrun, srun or mpirun, or alone.
//
// Small things go over comm::Control, which also watches that no rank dies or hangs; data goes over
// the communicators of groups(). With one rank nothing is connected and nothing watched.
//
// Threads: the one that trains.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "comm/control.h"
#include "comm/mpi_communicator.h"
#include "comm/rank_groups.h"
#include "gpu/device.h"
#include "pipeline/sharding.h"
#include "train/config.h"
#include "train/cpu_share.h"
#include "train/rank_exchange.h"

namespace strata::train {

/// Is called on any thread when the run is over because a rank was lost: prints the message if it
/// is to, and ends the process without looking back.
using EndProcess = std::function<void(const std::string& message, bool should_print)>;

class Ranks final : public RankExchange {
 public:
  /// Connects the rank that `info` tells of with the others, where there are any. Blocks until all
  /// have come, or throws within config.rank_timeout.
  Ranks(comm::RankInfo info, const TrainConfig& config, EndProcess end_process);
  ~Ranks() override;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] int rank() const noexcept override { return info_.rank; }
  [[nodiscard]] int ranks() const noexcept override { return info_.ranks; }
  [[nodiscard]] int local_rank() const noexcept { return info_.local_rank; }
  /// Ranks that share this machine.
  [[nodiscard]] int local_ranks() const noexcept { return local_ranks_; }
  /// This rank's share of the CPUs of its machine; of several ranks only.
  [[nodiscard]] int cpu_threads() const noexcept { return cpus_.threads; }
  /// A sentence for the user, where the launcher has bound ranks to a part of the CPUs; or nothing.
  [[nodiscard]] const std::string& cpu_note() const noexcept { return cpus_.note; }
  [[nodiscard]] bool is_first() const noexcept { return info_.rank == 0; }

  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> mine) override;
  [[nodiscard]] std::vector<int64_t> all_gather(int64_t value);
  [[nodiscard]] std::string describe_rank(int rank) const override;
  [[nodiscard]] int64_t least(int64_t value);
  [[nodiscard]] bool any(bool value);

  /// Refuses an output_dir that is another directory on another host, where ranks save. All ranks
  /// call it.
  void require_shared_output();
  /// How the ranks of this run divide the state. Throws a usage error.
  [[nodiscard]] pipeline::RankLayout layout() const;
  /// Connects the ranks' devices; all ranks call it, and not within agree(). What does not go
  /// together is an AgreedError; what fails while they connect is this rank's alone.
  void connect(std::shared_ptr<gpu::Device> device, const pipeline::RankLayout& layout);
  /// Null with one rank, and before connect().
  [[nodiscard]] const comm::RankGroups* groups() const noexcept {
    return groups_ ? &*groups_ : nullptr;
  }

  /// What all ranks do from here on, and how long one may take for one task of it; 0: as long as it
  /// likes.
  void set_phase(std::string_view phase, std::chrono::seconds limit = {}) noexcept;
  void set_task(std::string_view task) noexcept;

  /// This rank cannot go on: tells the others why and ends the process.
  [[noreturn]] void give_up(std::string_view cause);
  /// The end of the run on all ranks.
  void close();

 private:
  void connect_control();
  void meet_host();
  void check_devices(const gpu::Device& device);
  /// Leaves what cannot be ended in order, for that would wait for ranks which may be lost.
  void abandon() noexcept;
  /// How many ranks each host has. Throws a usage error where hosts differ in that, or their ranks
  /// are not consecutive.
  [[nodiscard]] int ranks_of_a_host() const;
  [[nodiscard]] bool is_on_one_host() const noexcept { return local_ranks_ == info_.ranks; }

  comm::RankInfo info_;
  int local_ranks_ = 1;
  CpuShare cpus_;
  const TrainConfig& config_;
  EndProcess end_process_;
  std::unique_ptr<comm::MpiWorld> mpi_;
  std::unique_ptr<comm::Control> control_;
  std::shared_ptr<gpu::Device> device_;  // of which groups_ have memory
  std::optional<comm::RankGroups> groups_;
  bool is_closed_ = false;
};

}  // namespace strata::train
