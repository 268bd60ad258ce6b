// Ranks as processes that are killed, stopped and held up: the others end, in time, and one message
// says who it was. With STRATA_ALL_TRIALS as often as it takes to believe that.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "catch.h"
#include "trials.h"

extern char** environ;

namespace strata::comm {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

#ifdef STRATA_ALL_TRIALS
constexpr int kKills = 50;
#else
constexpr int kKills = trials(10, 5);
#endif

// Ends take a second or three; a machine may be busy with other things.
constexpr auto kPatience = 20s;
constexpr int kRunning = -1000;  // no exit code and no signal

/// A process that is killed and waited for at the end.
class Process {
 public:
  explicit Process(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), STRATA_CONTROL_CHILD);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    int out[2], error[2];
    REQUIRE(::pipe2(out, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(error, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, error[1], STDERR_FILENO);
    REQUIRE(::posix_spawn(&pid_, pointers[0], &actions, nullptr, pointers.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(out[1]);
    ::close(error[1]);
    out_ = UniqueFd::adopt(out[0]);
    error_ = UniqueFd::adopt(error[0]);
  }
  Process(Process&& other) noexcept
      : pid_(std::exchange(other.pid_, -1)),
        status_(other.status_),
        out_(std::move(other.out_)),
        error_(std::move(other.error_)) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (pid_ < 0 || has_ended()) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  void signal(int number) const { REQUIRE(::kill(pid_, number) == 0); }

  [[nodiscard]] bool has_ended() {
    int status = 0;
    if (status_ != kRunning) return true;
    if (::waitpid(pid_, &status, WNOHANG) != pid_) return false;
    status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return true;
  }
  /// Its exit code, its signal as a negative number, or kRunning after so long.
  int wait(std::chrono::milliseconds at_most) {
    for (const auto end = Clock::now() + at_most; !has_ended() && Clock::now() < end;) {
      std::this_thread::sleep_for(2ms);
    }
    return status_;
  }

  std::string read_line() { return read(out_.get(), true); }
  /// What it wrote to standard error, once it has ended.
  std::string errors() { return read(error_.get(), false); }

 private:
  static std::string read(int fd, bool is_line) {
    std::string text;
    for (char byte = 0; ::read(fd, &byte, 1) == 1 && !(is_line && byte == '\n');) text += byte;
    return text;
  }

  pid_t pid_ = -1;
  int status_ = kRunning;
  UniqueFd out_, error_;
};

std::vector<Process> start_ranks(int ranks, const std::vector<std::string>& arguments) {
  std::vector<Process> started;
  std::string port = "0";
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<std::string> all{"rank=" + std::to_string(rank), "ranks=" + std::to_string(ranks),
                                 "port=" + port};
    all.insert(all.end(), arguments.begin(), arguments.end());
    started.emplace_back(all);
    if (rank == 0) port = started[0].read_line();
  }
  return started;
}

/// Waits until all have done a step, and some beats more.
void let_train(std::vector<Process>& ranks, std::chrono::milliseconds beats) {
  for (Process& rank : ranks) REQUIRE(rank.read_line() == "trains");
  std::this_thread::sleep_for(beats);
}

/// Waits until the others have ended with 1, and returns what they printed.
std::string errors_of_others(std::vector<Process>& ranks, size_t victim) {
  const auto end = Clock::now() + kPatience;
  std::string errors;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (r == victim) continue;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    const int status = ranks[r].wait(std::max(left, 0ms));
    INFO("rank " << r << " of " << ranks.size() << ", victim " << victim);
    REQUIRE(status == 1);
    errors += ranks[r].errors();
  }
  return errors;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_CASE("death: of a random rank at a random moment") {
  std::mt19937_64 random(7);
  int before_all_came = 0, of_zero = 0;
  for (int trial = 0; trial < kKills; ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    const size_t victim = random() % static_cast<size_t>(ranks);
    const bool all_came = trial % 2 == 0;
    std::vector<Process> started =
        start_ranks(ranks, {"timeout=5000", all_came ? "connect=20000" : "connect=3000"});
    if (all_came) let_train(started, 0ms);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000));
    started[victim].signal(SIGKILL);
    const std::string errors = errors_of_others(started, victim);
    INFO("rank " << victim << " of " << ranks << " was killed: " << errors);
    REQUIRE(std::count(errors.begin(), errors.end(), '\n') == 1);
    if (victim == 0) ++of_zero;
    const std::string who = "rank " + std::to_string(victim) + " (host here, pid " +
                            std::to_string(started[victim].pid()) + ") died";
    if (contains(errors, who)) {
      CHECK(contains(errors, "; all ranks end; start again with --resume auto"));
      continue;
    }
    ++before_all_came;
    REQUIRE_FALSE(all_came);
    if (victim == 0) {
      CHECK((contains(errors, "cannot reach rank 0 at 127.0.0.1:") ||
             contains(errors, "ended before all ranks had come")));
    } else {
      CHECK(contains(errors, "rank " + std::to_string(victim) + " of " + std::to_string(ranks) +
                                 " has not come to port "));
    }
  }
  std::cout << "SIGKILL: " << kKills << " trials, " << of_zero << " of rank 0, " << before_all_came
            << " before all ranks had come; each named by one message\n";
}

TEST_CASE("death: names the task") {
  std::vector<Process> ranks =
      start_ranks(3, {"timeout=2000", "connect=20000", "slow=2", "slow_ms=60000"});
  let_train(ranks, 800ms);
  ranks[2].signal(SIGKILL);
  CHECK(contains(errors_of_others(ranks, 2), ") died during 'step 3'; all ranks end"));
}

TEST_CASE("death: a stopped rank is named as stuck, and ends when it goes on") {
  for (const size_t victim : {1, 0}) {
    std::vector<Process> ranks = start_ranks(3, {"timeout=1000", "connect=20000"});
    let_train(ranks, 400ms);
    ranks[victim].signal(SIGSTOP);
    const std::string errors = errors_of_others(ranks, victim);
    INFO(errors);
    CHECK(contains(errors, "rank " + std::to_string(victim) + " (host here, pid " +
                               std::to_string(ranks[victim].pid()) + ") has not answered for "));
    CHECK(contains(errors, "s (stuck) during 'step "));
    CHECK(std::count(errors.begin(), errors.end(), '\n') == 1);
    // Nothing that it could do while it is stopped; launchers kill what the others leave.
    CHECK_FALSE(ranks[victim].has_ended());
    ranks[victim].signal(SIGCONT);
    CHECK(ranks[victim].wait(kPatience) == 1);
    const std::string own = ranks[victim].errors();
    INFO(own);
    if (victim == 0) {
      CHECK(contains(own, "was stopped for "));
    } else {
      CHECK(own.empty());  // rank 0 has told
    }
  }
}

TEST_CASE("death: all ranks stopped and continued go on") {
  std::vector<Process> ranks = start_ranks(3, {"timeout=1000", "connect=20000", "steps=600"});
  let_train(ranks, 0ms);
  for (const Process& rank : ranks) rank.signal(SIGSTOP);
  std::this_thread::sleep_for(1500ms);
  for (const Process& rank : ranks) rank.signal(SIGCONT);
  for (Process& rank : ranks) {
    CHECK(rank.wait(kPatience) == 0);
    CHECK(rank.errors().empty());
  }
}

TEST_CASE("death: a rank that is slow and beats is not killed") {
  std::vector<Process> ranks =
      start_ranks(3, {"timeout=800", "connect=20000", "steps=5", "slow=1", "slow_ms=2000"});
  for (Process& rank : ranks) {
    CHECK(rank.wait(kPatience) == 0);
    CHECK(rank.errors().empty());
  }
}

TEST_CASE("death: a rank that beats and makes no progress is named, and ends too") {
  std::vector<Process> ranks =
      start_ranks(3, {"timeout=2000", "connect=20000", "limit=700", "slow=2", "slow_ms=60000"});
  const std::string errors = errors_of_others(ranks, ranks.size());
  INFO(errors);
  CHECK(contains(errors, "rank 2 (host here, pid " + std::to_string(ranks[2].pid()) +
                             ") has made no progress for "));
  CHECK(contains(errors, "in the phase 'train', which allows 0.7 s (stuck), at 'step 3'"));
  CHECK(std::count(errors.begin(), errors.end(), '\n') == 1);
}

}  // namespace
}  // namespace strata::comm
