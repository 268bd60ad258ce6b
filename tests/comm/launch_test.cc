#include "comm/launch.h"

#include <map>

#include "base/error.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::comm {
namespace {

using Variables = std::map<std::string, std::string>;

RankInfo info_of(const Variables& variables) {
  return rank_info_from_environment([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

const Variables kTorchrun{{"RANK", "5"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "10.0.0.1"},
                          {"MASTER_PORT", "29500"}};
const Variables kSlurm{{"SLURM_PROCID", "3"},
                       {"SLURM_NTASKS", "4"},
                       {"SLURM_LOCALID", "1"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_ID", "2"},
                       {"SLURM_JOB_ID", "1000"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                       {"SLURM_STEP_NODELIST", "node[07-08]"},
                       {"SLURM_JOB_NODELIST", "node[01-08]"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "2"},
                         {"OMPI_COMM_WORLD_SIZE", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};

TEST_CASE("launch: without a launcher a process is alone") {
  const RankInfo info = info_of({{"MASTER_ADDR", "left.over"}, {"PATH", "/bin"}, {"RANK", ""}});
  CHECK(info.launcher == "none");
  CHECK(info.rank == 0);
  CHECK(info.ranks == 1);
  CHECK(info.local_ranks == 1);
  CHECK_FALSE(info.host.empty());
  CHECK_FALSE(info.master_addr);
}

TEST_CASE("launch: torchrun's variables") {
  const RankInfo info = info_of(kTorchrun);
  CHECK(info.launcher == "torchrun");
  CHECK(info.rank == 5);
  CHECK(info.ranks == 8);
  CHECK(info.local_rank == 1);
  CHECK(info.local_ranks == 4);
  CHECK(info.master_addr == "10.0.0.1");
  CHECK(info.master_port == 29500);
  // Its agent listens there itself.
  const Variables agent{{"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  CHECK(info_of(with(kTorchrun, agent)).master_port == 29501);
  for (const char* port : {"1", "16383", "32767", "65535"}) {
    const int derived = *info_of(with(with(kTorchrun, agent), {{"MASTER_PORT", port}})).master_port;
    CHECK(derived != std::stoi(port));
    CHECK(derived >= 16384);
    CHECK(derived < 32768);
  }
}

TEST_CASE("launch: Slurm's variables") {
  RankInfo info = info_of(kSlurm);
  CHECK(info.launcher == "slurm");
  CHECK(info.rank == 3);
  CHECK(info.ranks == 4);
  CHECK(info.local_rank == 1);
  CHECK(info.local_ranks == 2);
  CHECK(info.master_addr == "node07");
  CHECK(info.master_port == 16384 + 16002);
  // Steps of a job side by side, and the next job, get other ports.
  CHECK(info_of(with(kSlurm, {{"SLURM_STEP_ID", "3"}})).master_port == 16384 + 16003);
  CHECK(info_of(with(kSlurm, {{"SLURM_JOB_ID", "1001"}})).master_port == 16384 + 16018 % 16384);
  info = info_of(with(kSlurm, {{"MASTER_PORT", "7"}, {"MASTER_ADDR", "there"}}));
  CHECK(info.master_addr == "there");
  CHECK(info.master_port == 7);
  // A step of fewer tasks than the job.
  CHECK(info_of(with(kSlurm, {{"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "4"}})).ranks == 4);
  CHECK(info_of(without(kSlurm, "SLURM_STEP_NODELIST")).master_addr == "node01");
}

TEST_CASE("launch: Slurm's variables outside of srun leave a process alone") {
  // salloc's shell, sbatch's script, a shell under use_interactive_step.
  for (const Variables& variables :
       {without(kSlurm, "SLURM_PROCID"), without(kSlurm, "SLURM_STEP_ID"),
        without(kSlurm, "SLURM_NTASKS"), with(kSlurm, {{"SLURM_STEP_ID", "4294967290"}}),
        with(kSlurm, {{"SLURM_STEP_ID", "4294967291"}})}) {
    const RankInfo info = info_of(variables);
    CHECK(info.launcher == "none");
    CHECK(info.ranks == 1);
  }
}

TEST_CASE("launch: Open MPI's variables") {
  RankInfo info = info_of(kOpenMpi);
  CHECK(info.launcher == "openmpi");
  CHECK(info.rank == 2);
  CHECK(info.ranks == 3);
  CHECK(info.local_rank == 0);
  CHECK(info.local_ranks == 1);
  CHECK_FALSE(info.master_addr);
  CHECK_FALSE(info.master_port);
  info = info_of(with(kOpenMpi, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1234"}}));
  CHECK(info.master_addr == "a");
  CHECK(info.master_port == 1234);
}

TEST_CASE("launch: of nested launchers the innermost counts") {
  CHECK(info_of(with(kOpenMpi, kSlurm)).launcher == "openmpi");
  // One torchrun a node.
  Variables nested = with(kSlurm, kTorchrun);
  nested["TORCHELASTIC_RUN_ID"] = "none";
  CHECK(info_of(nested).launcher == "torchrun");
  CHECK(info_of(with(nested, {{"SLURM_NTASKS", "8"}})).rank == 5);
}

TEST_CASE("launch: what is half given or at odds is an error that names the variable") {
  struct Case {
    Variables variables;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases{
      {without(kTorchrun, "WORLD_SIZE"), {"RANK is set", "WORLD_SIZE is not"}},
      {{{"WORLD_SIZE", "2"}}, {"WORLD_SIZE is set", "RANK is not"}},
      {without(kTorchrun, "LOCAL_RANK"), {"LOCAL_RANK is not"}},
      {without(kTorchrun, "MASTER_ADDR"), {"MASTER_ADDR is not set", "8 ranks"}},
      {without(kTorchrun, "MASTER_PORT"), {"MASTER_PORT is not set"}},
      {with(kTorchrun, {{"RANK", "8"}}), {"RANK is 8", "WORLD_SIZE is 8"}},
      {with(kTorchrun, {{"RANK", "-1"}}), {"RANK is '-1'"}},
      {with(kTorchrun, {{"RANK", "2x"}}), {"RANK is '2x'"}},
      {with(kTorchrun, {{"WORLD_SIZE", "99999999999"}}), {"WORLD_SIZE"}},
      {with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE is 0"}},
      {with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK is 4", "LOCAL_WORLD_SIZE is 4"}},
      {with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE is 9", "WORLD_SIZE is 8"}},
      {with(kTorchrun, {{"MASTER_PORT", "65536"}}), {"MASTER_PORT is 65536"}},
      {with(kTorchrun, {{"MASTER_PORT", "http"}}), {"MASTER_PORT is 'http'"}},
      // RANK exported by hand to all processes of mpirun.
      {with(with(kOpenMpi, kTorchrun), {{"OMPI_COMM_WORLD_SIZE", "8"}}),
       {"RANK is 5", "OMPI_COMM_WORLD_RANK is 2"}},
      {without(kOpenMpi, "OMPI_COMM_WORLD_SIZE"), {"OMPI_COMM_WORLD_SIZE is not"}},
      {with(kOpenMpi, {{"MASTER_ADDR", "a"}}), {"MASTER_PORT is not set"}},
      {without(kSlurm, "SLURM_LOCALID"), {"SLURM_LOCALID is not"}},
      {with(kSlurm, {{"SLURM_PROCID", "4"}}), {"SLURM_PROCID is 4", "SLURM_NTASKS is 4"}},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "node[1-"}}), {"SLURM_STEP_NODELIST is 'node[1-'"}},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "2"}}), {"SLURM_STEP_TASKS_PER_NODE is '2'"}},
      {without(without(kSlurm, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST"), {"MASTER_ADDR"}},
      {without(kSlurm, "SLURM_JOB_ID"), {"SLURM_JOB_ID is not", "MASTER_PORT"}},
  };
  for (const Case& one : cases) {
    std::string message;
    try {
      static_cast<void>(info_of(one.variables));
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
      message = error.what();
    }
    for (const std::string& word : one.words) {
      INFO(message << " | " << word);
      CHECK(message.find(word) != std::string::npos);
    }
  }
}

TEST_CASE("launch: lists of hosts") {
  using Names = std::vector<std::string>;
  CHECK(expand_node_list("one") == Names{"one"});
  CHECK(expand_node_list("a,b-1,c.d") == Names{"a", "b-1", "c.d"});
  CHECK(expand_node_list("node[01-03,7],other") ==
        Names{"node01", "node02", "node03", "node7", "other"});
  CHECK(expand_node_list("n[9-11]x") == Names{"n9x", "n10x", "n11x"});
  CHECK(expand_node_list("n[098-101]") == Names{"n098", "n099", "n100", "n101"});
  CHECK(expand_node_list("r[0-1]n[1-2]-ib") == Names{"r0n1-ib", "r0n2-ib", "r1n1-ib", "r1n2-ib"});
  for (const char* bad : {"", ",", "a,", "a[", "a]", "a[]", "a[1", "a[1-]", "a[2-1]", "a[x]",
                          "a[1[2]]", "a[1,,2]", "a[0-99999999999]", "a[0-9999][0-9999]"}) {
    INFO(bad);
    CHECK_FALSE(expand_node_list(bad));
  }
  CHECK(expand_task_counts("2(x3),1") == std::vector<int>{2, 2, 2, 1});
  for (const char* bad : {"", "x", "2(x", "2(x0)", "2(3)", "2,,1", "-1"}) {
    INFO(bad);
    CHECK_FALSE(expand_task_counts(bad));
  }
}

}  // namespace
}  // namespace strata::comm
