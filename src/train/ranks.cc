#include "train/ranks.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include "comm/nccl_communicator.h"
#include "train/output_directory.h"

namespace strata::train {
namespace {

constexpr const char* kLoopback = "127.0.0.1";

/// An address of this machine under which others may reach it: the first that is not its own alone.
std::string own_address() {
  std::string found = comm::host_name();
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != AF_INET) continue;
    if ((each->ifa_flags & IFF_LOOPBACK) != 0 || (each->ifa_flags & IFF_UP) == 0) continue;
    sockaddr_in address{};
    std::memcpy(&address, each->ifa_addr, sizeof address);
    std::array<char, INET_ADDRSTRLEN> text{};
    if (::inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size()) == nullptr) continue;
    found = text.data();
    break;
  }
  ::freeifaddrs(list);
  return found;
}

/// Where rank 0 listens, as it tells the others over MPI.
struct Meeting {
  std::array<char, 256> address{};
  int32_t port = 0;
};

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

}  // namespace

Ranks::Ranks(comm::RankInfo info, const TrainConfig& config, EndProcess end_process)
    : info_(std::move(info)), config_(config), end_process_(std::move(end_process)) {
  if (info_.ranks == 1) return;
  try {
    connect_control();
    meet_host();
  } catch (...) {
    abandon();
    throw;
  }
}

/// Who shares this machine, and how they divide its CPUs.
void Ranks::meet_host() {
  const auto online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpu_set_t own;
  CPU_ZERO(&own);
  if (::sched_getaffinity(0, sizeof own, &own) != 0) {
    // More CPUs than the set has room for: so many, then.
    for (int cpu = 0; cpu < std::min(online, CPU_SETSIZE); ++cpu) CPU_SET(cpu, &own);
  }
  const std::vector<std::vector<std::byte>> all = all_gather(std::as_bytes(std::span(&own, 1)));
  const auto& members = control_->members();
  const auto rank = static_cast<size_t>(info_.rank);
  std::vector<cpu_set_t> of_host;
  size_t place = 0;
  for (size_t other = 0; other < members.size(); ++other) {
    if (members[other].host != members[rank].host) continue;
    if (other == rank) place = of_host.size();
    std::memcpy(&of_host.emplace_back(), all[other].data(), sizeof own);
  }
  local_ranks_ = static_cast<int>(of_host.size());
  cpus_ = cpu_share(of_host, place, online);
  if (info_.launcher != "openmpi") cpus_.note.clear();  // Slurm binds to what a job has asked for
}

void Ranks::connect_control() {
  const std::chrono::seconds timeout(config_.rank_timeout);
  comm::ControlOptions options{
      .rank = info_.rank,
      .ranks = info_.ranks,
      .local_rank = info_.local_rank,
      .host = info_.host,
      .connect_timeout = timeout,
      .heartbeat_timeout = timeout,
      .on_failure = end_process_,
  };
  if (info_.launcher != "openmpi") {
    control_ = comm::Control::start(info_, options);
    return;
  }
  mpi_ = comm::start_mpi();
  if (info_.master_addr && info_.master_port) {
    control_ = comm::Control::start(info_, options);
    return;
  }
  std::optional<comm::ControlListener> listener;
  Meeting meeting;
  if (info_.rank == 0) {
    const std::string address = info_.local_ranks == info_.ranks ? kLoopback : own_address();
    listener.emplace(address == kLoopback ? address : std::string("0.0.0.0"), 0);
    address.copy(meeting.address.data(), meeting.address.size() - 1);
    meeting.port = listener->port();
  }
  mpi_->broadcast(&meeting, sizeof meeting, 0);
  control_ = listener
                 ? std::make_unique<comm::Control>(std::move(*listener), options)
                 : std::make_unique<comm::Control>(meeting.address.data(), meeting.port, options);
}

Ranks::~Ranks() {
  if (!is_closed_) abandon();
}

void Ranks::abandon() noexcept {
  if (groups_) groups_->abort();
  // Without MPI_Finalize, which would keep this process from telling what has happened.
  [[maybe_unused]] static const comm::MpiWorld* kept = nullptr;
  if (mpi_) kept = mpi_.release();
}

std::vector<std::vector<std::byte>> Ranks::all_gather(std::span<const std::byte> mine) {
  if (control_ == nullptr) return {{mine.begin(), mine.end()}};
  return control_->all_gather(mine);
}

std::vector<int64_t> Ranks::all_gather(int64_t value) {
  if (control_ == nullptr) return {value};
  return control_->all_gather(value);
}

std::string Ranks::describe_rank(int rank) const {
  return fmt::format("rank {} (host {})", rank,
                     control_->members()[static_cast<size_t>(rank)].host);
}

int64_t Ranks::least(int64_t value) {
  const std::vector<int64_t> all = all_gather(value);
  return *std::min_element(all.begin(), all.end());
}

bool Ranks::any(bool value) {
  const std::vector<int64_t> all = all_gather(value ? 1 : 0);
  return std::any_of(all.begin(), all.end(), [](int64_t each) { return each != 0; });
}

int Ranks::ranks_of_a_host() const {
  const auto& members = control_->members();
  std::map<std::string_view, size_t> counts;
  for (const comm::Member& member : members) ++counts[member.host];
  const size_t count = counts[members[0].host];
  for (const auto& [host, ranks] : counts) {
    if (ranks == count) continue;
    throw usage_error(
        fmt::format("host {} has {} of the ranks and host {} has {}, so that hosts cannot be the "
                    "groups of hybrid_shard; start as many on each or give shard_group_size",
                    members[0].host, count, host, ranks));
  }
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].host == members[rank / count * count].host) continue;
    throw usage_error(fmt::format(
        "rank {} is on host {} and rank {} on host {}, so that hosts cannot be the "
        "groups of hybrid_shard, whose ranks follow each other; have the launcher fill "
        "one host after the other (mpirun --map-by slot) or give shard_group_size",
        rank / count * count, members[rank / count * count].host, rank, members[rank].host));
  }
  return static_cast<int>(count);
}

void Ranks::require_shared_output() {
  if (is_on_one_host()) return;
  // Whether all have the same configuration is looked at later.
  if (!any(config_.save_strategy != SaveStrategy::kNo)) return;
  std::optional<DirectoryMark> mark;
  if (is_first()) mark.emplace(config_.output_dir);
  const auto all = all_gather(bytes_of(mark ? mark->path().string() : std::string()));
  const std::string path(reinterpret_cast<const char*>(all[0].data()), all[0].size());
  agree([&] {
    std::error_code ignored;
    if (path.empty() || std::filesystem::exists(path, ignored)) return;
    throw usage_error(
        fmt::format("output_dir '{}' is not the one of rank 0 (host {}); all ranks save into one, "
                    "so name a directory on a file system that all hosts share",
                    config_.output_dir, control_->members()[0].host));
  });
}

pipeline::RankLayout Ranks::layout() const {
  if (info_.ranks == 1) return {};
  auto group = static_cast<int>(config_.shard_group_size);
  if (group == 0 && config_.sharding == pipeline::Sharding::kHybridShard) {
    group = ranks_of_a_host();
  }
  return pipeline::RankLayout::of(config_.sharding, info_.ranks, group, config_.reduce_dtype);
}

void Ranks::check_devices(const gpu::Device& device) {
  const std::vector<std::vector<std::byte>> kinds =
      all_gather(bytes_of(std::string(device.kind())));
  agree([&] {
    for (size_t rank = 1; rank < kinds.size(); ++rank) {
      if (kinds[rank] == kinds[0]) continue;
      throw usage_error(fmt::format(
          "ranks 0 and {} have devices of different kinds; give device cuda or device host", rank));
    }
    if (device.kind() == "cuda") return;
    if (mpi_ == nullptr) {
      throw usage_error(fmt::format(
          "ranks on the host device send their data over MPI, and {} does not start that; start "
          "them with mpirun, or use device cuda",
          info_.launcher == "slurm" ? "srun" : info_.launcher));
    }
    if (mpi_->size() != info_.ranks) {
      throw failure(
          fmt::format("MPI started {} ranks, and the environment speaks of {}; start all "
                      "of them with one mpirun",
                      mpi_->size(), info_.ranks));
    }
  });
}

void Ranks::connect(std::shared_ptr<gpu::Device> device, const pipeline::RankLayout& layout) {
  if (info_.ranks == 1) return;
  device_ = std::move(device);
  check_devices(*device_);
  if (device_->kind() != "cuda") {
    groups_ = mpi_->create_rank_groups(layout.shard_ranks);
    return;
  }
  groups_ = comm::create_nccl_rank_groups(
      *device_,
      {.rank = info_.rank,
       .ranks = info_.ranks,
       .broadcast =
           [this](void* data, size_t size_bytes) {
             const std::vector<std::byte> from_first =
                 control_->broadcast(std::span(static_cast<const std::byte*>(data), size_bytes));
             std::memcpy(data, from_first.data(), std::min(size_bytes, from_first.size()));
           }},
      layout.shard_ranks);
}

void Ranks::set_phase(std::string_view phase, std::chrono::seconds limit) noexcept {
  if (control_ != nullptr) control_->set_phase(phase, limit);
}

void Ranks::set_task(std::string_view task) noexcept {
  if (control_ != nullptr) control_->set_task(task);
}

void Ranks::give_up(std::string_view cause) {
  const comm::Verdict verdict = control_->fail(cause);
  if (end_process_) end_process_(verdict.message, verdict.should_print);
  std::_Exit(static_cast<int>(ErrorKind::kFailed));
}

void Ranks::close() {
  groups_.reset();
  device_.reset();
  if (control_ != nullptr) control_->close();
  mpi_.reset();
  is_closed_ = true;
}

}  // namespace strata::train
