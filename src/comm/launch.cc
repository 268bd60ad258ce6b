#include "comm/launch.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>

#include "base/error.h"

namespace strata::comm {
namespace {

constexpr size_t kMostHosts = 1 << 16;
// Ports that we derive lie below those that the system gives to outgoing connections.
constexpr uint64_t kFirstDerivedPort = 16384;
constexpr uint64_t kDerivedPorts = 16384;
// Steps from here on are Slurm's own: the batch script, an interactive shell, pending.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

template <class Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

class Environment {
 public:
  explicit Environment(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] std::optional<std::string> text(const char* name) const {
    const char* value = lookup_(name);
    if (value == nullptr || *value == '\0') return std::nullopt;
    return value;
  }
  [[nodiscard]] bool has(const char* name) const { return text(name).has_value(); }

  [[nodiscard]] std::optional<int64_t> number(const char* name) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    const auto parsed = parse_number<int64_t>(*value);
    if (!parsed || *parsed < 0) {
      throw usage_error(fmt::format("{} is '{}', which is not a number from 0 on", name, *value));
    }
    return parsed;
  }
  /// A number that has to be there because `because` is.
  [[nodiscard]] int count(const char* name, const char* because) const {
    const std::optional<int64_t> value = number(name);
    if (!value) {
      throw usage_error(fmt::format("{} is set but {} is not; set both, or start with a launcher",
                                    because, name));
    }
    if (*value > INT32_MAX) throw usage_error(fmt::format("{} is {}: too many", name, *value));
    return static_cast<int>(*value);
  }
  [[nodiscard]] std::optional<int> port(const char* name) const {
    const std::optional<int64_t> value = number(name);
    if (!value) return std::nullopt;
    if (*value < 1 || *value > 65535) {
      throw usage_error(fmt::format("{} is {}, which is not a port from 1 to 65535", name, *value));
    }
    return static_cast<int>(*value);
  }

 private:
  const EnvironmentLookup& lookup_;
};

void check_below(const char* name, int value, const char* limit_name, int limit) {
  if (value >= limit) {
    throw usage_error(
        fmt::format("{} is {} but {} is {}; ranks count from 0", name, value, limit_name, limit));
  }
}

struct Names {
  const char* rank;
  const char* ranks;
  const char* local_rank;
  const char* local_ranks;
};
constexpr Names kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                         "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};

/// The first that is set.
const char* any_of(const Environment& environment, const Names& names) {
  for (const char* name : {names.rank, names.ranks, names.local_rank, names.local_ranks}) {
    if (environment.has(name)) return name;
  }
  return nullptr;
}

void read_four(const Environment& environment, const Names& names, RankInfo& info) {
  const char* because = any_of(environment, names);
  info.rank = environment.count(names.rank, because);
  info.ranks = environment.count(names.ranks, because);
  info.local_rank = environment.count(names.local_rank, because);
  // Not all who set the others by hand set this one.
  info.local_ranks = environment.has(names.local_ranks)
                         ? environment.count(names.local_ranks, because)
                         : info.local_rank + 1;
  check_below(names.rank, info.rank, names.ranks, info.ranks);
  check_below(names.local_rank, info.local_rank, names.local_ranks, info.local_ranks);
  if (info.local_ranks > info.ranks) {
    throw usage_error(fmt::format("{} is {} but {} is {}; a host has no more ranks than all",
                                  names.local_ranks, info.local_ranks, names.ranks, info.ranks));
  }
}

/// Both or, where they are not needed, neither of MASTER_ADDR and MASTER_PORT.
void read_master(const Environment& environment, bool needed, RankInfo& info) {
  info.master_addr = environment.text("MASTER_ADDR");
  info.master_port = environment.port("MASTER_PORT");
  if (info.ranks == 1 || (!info.master_addr && !info.master_port && !needed)) return;
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    if (environment.has(name)) continue;
    throw usage_error(
        fmt::format("{} is not set; {} ranks find each other by MASTER_ADDR, the "
                    "host of rank 0, and MASTER_PORT, a free port there",
                    name, info.ranks));
  }
}

/// Variables that were set by hand and forwarded to all ranks would make all of them one rank.
void check_agreement(const Environment& environment, const char* rank_name, const char* ranks_name,
                     const RankInfo& info) {
  const std::optional<int64_t> rank = environment.number(rank_name);
  if (!rank || environment.number(ranks_name) != info.ranks || *rank == info.rank) return;
  throw usage_error(
      fmt::format("RANK is {} but {} is {}; unset RANK, WORLD_SIZE, LOCAL_RANK and "
                  "LOCAL_WORLD_SIZE to go by the launcher",
                  info.rank, rank_name, *rank));
}

void read_torchrun(const Environment& environment, RankInfo& info) {
  info.launcher = "torchrun";
  read_four(environment, kTorchrun, info);
  read_master(environment, true, info);
  if (!environment.has("TORCHELASTIC_RUN_ID")) {
    check_agreement(environment, kOpenMpi.rank, kOpenMpi.ranks, info);
    if (environment.has("SLURM_STEP_ID")) {
      check_agreement(environment, "SLURM_PROCID", "SLURM_NTASKS", info);
    }
  }
  if (info.master_port && environment.text("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    const auto next = static_cast<uint64_t>(*info.master_port) + 1;
    info.master_port = static_cast<int>(kFirstDerivedPort + next % kDerivedPorts);
  }
}

bool is_slurm_step(const Environment& environment) {
  if (!environment.has("SLURM_PROCID") || !environment.has("SLURM_NTASKS")) return false;
  const std::optional<int64_t> step = environment.number("SLURM_STEP_ID");
  return step && *step < kFirstSpecialStep;
}

int slurm_local_ranks(const Environment& environment, const RankInfo& info) {
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const std::optional<std::string> text = environment.text(name);
    const std::optional<int64_t> node = environment.number("SLURM_NODEID");
    if (!text || !node) continue;
    const auto counts = expand_task_counts(*text);
    if (!counts || *node >= static_cast<int64_t>(counts->size())) {
      throw usage_error(
          fmt::format("{} is '{}', in which node {} cannot be found", name, *text, *node));
    }
    return (*counts)[static_cast<size_t>(*node)];
  }
  return info.ranks == 1 ? 1 : info.local_rank + 1;  // what is known for sure
}

void read_slurm(const Environment& environment, RankInfo& info) {
  info.launcher = "slurm";
  info.rank = environment.count("SLURM_PROCID", "SLURM_STEP_ID");
  const bool has_step_tasks = environment.has("SLURM_STEP_NUM_TASKS");
  const char* ranks_name = has_step_tasks ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  info.ranks = environment.count(ranks_name, "SLURM_PROCID");
  check_below("SLURM_PROCID", info.rank, ranks_name, info.ranks);
  info.local_rank = environment.count("SLURM_LOCALID", "SLURM_PROCID");
  info.local_ranks = slurm_local_ranks(environment, info);
  check_below("SLURM_LOCALID", info.local_rank, "the node's number of tasks", info.local_ranks);

  info.master_addr = environment.text("MASTER_ADDR");
  info.master_port = environment.port("MASTER_PORT");
  if (!info.master_addr) {
    const bool has_step_list = environment.has("SLURM_STEP_NODELIST");
    const char* name = has_step_list ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    const std::optional<std::string> list = environment.text(name);
    if (list) {
      const auto hosts = expand_node_list(*list);
      if (!hosts)
        throw usage_error(fmt::format("{} is '{}', which is no list of hosts", name, *list));
      info.master_addr = hosts->front();
    } else if (info.ranks > 1) {
      throw usage_error(
          "SLURM_PROCID is set but SLURM_STEP_NODELIST is not; set MASTER_ADDR to "
          "the host of rank 0");
    }
  }
  if (!info.master_port) {
    const std::optional<int64_t> job = environment.number("SLURM_JOB_ID");
    if (job) {
      // Steps of one job may run side by side.
      const auto mixed = static_cast<uint64_t>(*job) * 16 +
                         static_cast<uint64_t>(*environment.number("SLURM_STEP_ID"));
      info.master_port = static_cast<int>(kFirstDerivedPort + mixed % kDerivedPorts);
    } else if (info.ranks > 1) {
      throw usage_error(
          "SLURM_PROCID is set but SLURM_JOB_ID is not; set MASTER_PORT to a free "
          "port of the host of rank 0");
    }
  }
}

/// Cuts at the commas that are outside of brackets.
std::optional<std::vector<std::string_view>> split_list(std::string_view list) {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  bool in_brackets = false;
  for (size_t i = 0; i <= list.size(); ++i) {
    if (i == list.size() || (list[i] == ',' && !in_brackets)) {
      if (i == begin) return std::nullopt;
      parts.push_back(list.substr(begin, i - begin));
      begin = i + 1;
    } else if (list[i] == '[' || list[i] == ']') {
      if (in_brackets == (list[i] == '[')) return std::nullopt;
      in_brackets = list[i] == '[';
    }
  }
  if (in_brackets) return std::nullopt;
  return parts;
}

/// Appends prefix + number for each number of `01-03,7`.
bool expand_ranges(const std::vector<std::string>& prefixes, std::string_view ranges,
                   std::vector<std::string>& out) {
  const auto parts = split_list(ranges);
  if (!parts) return false;
  for (const std::string& prefix : prefixes) {
    for (const std::string_view part : *parts) {
      const size_t dash = part.find('-');
      const std::string_view low = part.substr(0, dash);
      const std::string_view high = dash == part.npos ? low : part.substr(dash + 1);
      const auto first = parse_number<uint64_t>(low), last = parse_number<uint64_t>(high);
      if (!first || !last || *last < *first || *last - *first >= kMostHosts) return false;
      for (uint64_t number = *first; number <= *last; ++number) {
        if (out.size() >= kMostHosts) return false;
        out.push_back(fmt::format("{}{:0{}}", prefix, number, low.size()));
      }
    }
  }
  return true;
}

bool expand_name(std::string_view name, std::vector<std::string>& out) {
  std::vector<std::string> names{""};
  while (!name.empty()) {
    const size_t open = name.find('[');
    for (std::string& known : names) known += name.substr(0, open);
    if (open == name.npos) break;
    const size_t closed = name.find(']', open);
    std::vector<std::string> longer;
    if (!expand_ranges(names, name.substr(open + 1, closed - open - 1), longer)) return false;
    names = std::move(longer);
    name.remove_prefix(closed + 1);
  }
  if (out.size() + names.size() > kMostHosts) return false;
  for (std::string& known : names) out.push_back(std::move(known));
  return true;
}

}  // namespace

std::optional<std::vector<std::string>> expand_node_list(std::string_view list) {
  const auto parts = split_list(list);
  if (!parts) return std::nullopt;
  std::vector<std::string> hosts;
  for (const std::string_view part : *parts) {
    if (!expand_name(part, hosts)) return std::nullopt;
  }
  return hosts;
}

std::optional<std::vector<int>> expand_task_counts(std::string_view list) {
  const auto parts = split_list(list);
  if (!parts) return std::nullopt;
  std::vector<int> counts;
  for (std::string_view part : *parts) {
    std::optional<int> times = 1;
    if (const size_t open = part.find("(x"); open != part.npos) {
      if (part.back() != ')') return std::nullopt;
      times = parse_number<int>(part.substr(open + 2, part.size() - open - 3));
      part = part.substr(0, open);
    }
    const auto count = parse_number<int>(part);
    if (!count || !times || *count < 0 || *times < 1) return std::nullopt;
    if (counts.size() + static_cast<size_t>(*times) > kMostHosts) return std::nullopt;
    counts.insert(counts.end(), static_cast<size_t>(*times), *count);
  }
  return counts;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  const std::string_view whole = name.data();
  return std::string(whole.substr(0, whole.find('.')));
}

RankInfo rank_info_from_environment(const EnvironmentLookup& lookup) {
  const Environment environment(lookup);
  RankInfo info;
  info.host = host_name();
  if (any_of(environment, kTorchrun) != nullptr) {
    read_torchrun(environment, info);
  } else if (any_of(environment, kOpenMpi) != nullptr) {
    info.launcher = "openmpi";
    read_four(environment, kOpenMpi, info);
    read_master(environment, false, info);
  } else if (is_slurm_step(environment)) {
    read_slurm(environment, info);
  }
  return info;
}

RankInfo rank_info_from_environment() {
  return rank_info_from_environment([](const char* name) { return std::getenv(name); });
}

}  // namespace strata::comm
