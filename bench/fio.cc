#include "bench/fio.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/file.h"

namespace strata::bench {
namespace {

/// fio takes a colon for the end of a name.
std::string escaped(const std::string& path) {
  std::string text;
  for (const char c : path) {
    if (c == ':' || c == '\\') text += '\\';
    text += c;
  }
  return text;
}

std::vector<std::string> arguments_of(const FioJob& job) {
  return {"fio", "--name=strata", "--output-format=json", "--filename=" + escaped(job.path),
          "--rw=" + job.mode, "--rwmixread=50", "--size=" + std::to_string(job.file_bytes),
          "--io_size=" + std::to_string(job.total_bytes), "--bs=" + std::to_string(job.block_bytes),
          "--iodepth=" + std::to_string(job.depth),
          "--direct=" + std::string(job.direct ? "1" : "0"), "--ioengine=io_uring",
          "--registerfiles=1", "--fixedbufs=1", "--thread=1", "--fallocate=none",
          // What costs it time and is no part of the transfer.
          "--norandommap=1", "--scramble_buffers=0", "--disable_lat=1", "--disable_slat=1",
          "--disable_clat=1", "--disable_bw_measurement=1"};
}

struct Output {
  int status = 0;
  std::string text;
};

/// Nothing where the program cannot be found. It gets its memory in huge pages, as a Drive's
/// buffers are: with small ones it reads at little more than half the speed.
std::optional<Output> run_program(std::vector<std::string> arguments) {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw IoError("create a pipe for", "fio", errno);
  const UniqueFd out = UniqueFd::adopt(ends[0]);
  UniqueFd in = UniqueFd::adopt(ends[1]);

  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<char*> environment;
  for (char** each = environ; *each != nullptr; ++each) {
    if (!std::string_view(*each).starts_with("GLIBC_TUNABLES=")) environment.push_back(*each);
  }
  std::string huge_pages = "GLIBC_TUNABLES=glibc.malloc.hugetlb=1";
  environment.push_back(huge_pages.data());
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in.get(), STDOUT_FILENO);
  pid_t child = 0;
  const int code =
      ::posix_spawnp(&child, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (code == ENOENT) return std::nullopt;
  if (code != 0) throw IoError("start", argv[0], code);
  in.reset();

  Output output;
  std::array<char, 4096> buffer{};
  for (;;) {
    const ssize_t got = ::read(out.get(), buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    output.text.append(buffer.data(), static_cast<size_t>(got));
  }
  while (::waitpid(child, &output.status, 0) < 0 && errno == EINTR) continue;
  return output;
}

}  // namespace

std::optional<FioResult> run_fio(const FioJob& job) {
  const std::optional<Output> output = run_program(arguments_of(job));
  if (!output) return std::nullopt;
  // Lines for people may stand before the object.
  const size_t start = output->text.find('{');
  if (output->status != 0 || start == std::string::npos) {
    throw failure("fio failed on '" + job.path + "': " + output->text.substr(0, 500));
  }
  const auto report = nlohmann::json::parse(output->text.begin() + static_cast<ptrdiff_t>(start),
                                            output->text.end(), nullptr, false);
  try {
    const nlohmann::json& result = report.at("jobs").at(0);
    const double bytes = result.at("read").at("io_bytes").get<double>() +
                         result.at("write").at("io_bytes").get<double>();
    const double seconds = result.at("job_runtime").get<double>() / 1e3;
    const double cpu =
        (result.at("usr_cpu").get<double>() + result.at("sys_cpu").get<double>()) / 100 * seconds;
    if (bytes <= 0 || seconds <= 0) throw failure("fio transferred nothing");
    return FioResult{bytes / seconds, cpu / bytes};
  } catch (const nlohmann::json::exception& error) {
    throw failure(std::string("fio's report is not understood: ") + error.what());
  }
}

}  // namespace strata::bench
