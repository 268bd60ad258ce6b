// Which rank this process is, by the variables that its launcher set: torchrun, Slurm's srun, or
// Open MPI's mpirun. Nothing is connected here.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace strata::comm {

struct RankInfo {
  int rank = 0;
  int ranks = 1;
  int local_rank = 0;  // among the ranks of this host
  /// Ranks on this host; where the launcher does not say, those that are there for sure.
  int local_ranks = 1;
  std::string host;               // this machine's name
  std::string launcher = "none";  // or "torchrun", "slurm", "openmpi"
  /// Where rank 0 listens (by Slurm, the first host of the list); always there with torchrun and
  /// Slurm and more than one rank. mpirun tells no address: there rank 0 has to pick one and send
  /// it over MPI, unless MASTER_ADDR and MASTER_PORT are set.
  std::optional<std::string> master_addr;
  std::optional<int> master_port;
};

/// The value of an environment variable, or null; getenv's form. An empty value counts as unset.
using EnvironmentLookup = std::function<const char*(const char*)>;

/// Of nested launchers the innermost counts: torchrun's variables before Open MPI's before Slurm's.
/// What Slurm sets in a batch script or an interactive shell, outside of srun, is no launch: such a
/// process is alone. Variables that are half given, no numbers or at odds throw a usage error that
/// names the variable.
///
/// torchrun keeps a store of its own at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE=True); there
/// master_port is one derived from it. Without MASTER_PORT, Slurm's is derived from job and step.
[[nodiscard]] RankInfo rank_info_from_environment(const EnvironmentLookup& lookup);
/// The same from this process's environment.
[[nodiscard]] RankInfo rank_info_from_environment();

/// Slurm's compressed list of hosts, such as `node[01-03,7],other` or `r[0-1]n[1-2]`, as names in
/// order; nothing where it cannot be read.
[[nodiscard]] std::optional<std::vector<std::string>> expand_node_list(std::string_view list);

/// Slurm's compressed numbers of tasks on each node, such as `2(x3),1`; nothing where it cannot be
/// read.
[[nodiscard]] std::optional<std::vector<int>> expand_task_counts(std::string_view list);

/// This machine's name, without a domain.
[[nodiscard]] std::string host_name();

}  // namespace strata::comm
