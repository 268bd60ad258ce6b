// The control plane between threads of this process, each of which is a rank.
#include "comm/control.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <random>
#include <thread>

#include "catch.h"
#include "comm/ranks.h"
#include "temporary_directory.h"

namespace strata::comm {
namespace {

using namespace std::chrono_literals;

using Body = std::function<void(Control&)>;

/// Runs `body` as each rank; returns what each one threw.
std::vector<std::string> run_ranks(int ranks, const Body& body,
                                   const std::function<void(ControlOptions&)>& change = {}) {
  ControlListener listener("127.0.0.1", 0);
  const int port = listener.port();
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      errors[static_cast<size_t>(rank)] = message_of([&] {
        ControlOptions options = options_of(rank, ranks);
        if (change) change(options);
        if (rank == 0) {
          Control control(std::move(listener), options);
          body(control);
        } else {
          Control control("127.0.0.1", port, options);
          body(control);
        }
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// What a rank gives in a round, the same wherever it is asked.
std::vector<std::byte> content(int rank, int round) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 1000 + static_cast<uint64_t>(round));
  const size_t size = round == 7 ? (1u << 20) + random() % 1000 : random() % 5000;
  std::vector<std::byte> data(round % 5 == 0 && rank % 2 == 0 ? 0 : size);
  for (size_t i = 0; i < data.size(); ++i) {
    if (i % 8 == 0) random();
    data[i] = static_cast<std::byte>(random() >> 32);
  }
  return data;
}

TEST_CASE("control: collectives of one to five ranks") {
  constexpr int kRounds = 12;
  std::vector<std::vector<std::vector<std::byte>>> given(5), sent(5);  // [rank][round]
  for (int rank = 0; rank < 5; ++rank) {
    for (int round = 0; round < kRounds; ++round) {
      given[static_cast<size_t>(rank)].push_back(content(rank, round));
      sent[static_cast<size_t>(rank)].push_back(content(rank, round + 100));
    }
  }
  for (int ranks = 1; ranks <= 5; ++ranks) {
    std::atomic<int> wrong = 0, in_barrier = 0, failures = 0;
    const auto errors = run_ranks(
        ranks,
        [&](Control& control) {
          if (control.ranks() != ranks) ++wrong;
          const auto mine = static_cast<size_t>(control.rank());
          for (int round = 0; round < kRounds; ++round) {
            const auto i = static_cast<size_t>(round);
            control.set_task("round");
            const auto parts = control.all_gather(given[mine][i]);
            for (size_t r = 0; r < parts.size(); ++r) {
              if (parts[r] != given[r][i]) ++wrong;
            }
            if (parts.size() != static_cast<size_t>(ranks)) ++wrong;
            const auto root = i % static_cast<size_t>(ranks);
            if (control.broadcast(sent[mine][i], static_cast<int>(root)) != sent[root][i]) ++wrong;
            const auto numbers = control.all_gather(int64_t{100} * round - control.rank());
            for (int r = 0; r < ranks; ++r) {
              if (numbers[static_cast<size_t>(r)] != 100 * round - r) ++wrong;
            }
            ++in_barrier;
            control.barrier();
            if (in_barrier < (round + 1) * ranks) ++wrong;
            control.barrier();
          }
          for (int r = 0; r < ranks; ++r) {
            const Member& member = control.members()[static_cast<size_t>(r)];
            if (member.host != "host" + std::to_string(r / 2) || member.pid != ::getpid()) ++wrong;
          }
          // Some end later than others, and it is no failure.
          std::this_thread::sleep_for(control.rank() * 5ms);
          control.close();
        },
        [&](ControlOptions& options) {
          options.on_failure = [&](const std::string&, bool) { ++failures; };
        });
    CHECK(wrong == 0);
    CHECK(failures == 0);
    for (const std::string& error : errors) CHECK(error.empty());
  }
}

TEST_CASE("control: ranks that have closed are no failure of those that have not") {
  std::atomic<int> failures = 0;
  const auto errors = run_ranks(
      3,
      [&](Control& control) {
        if (control.rank() == 1) std::this_thread::sleep_for(700ms);
        control.close();
      },
      [&](ControlOptions& options) {
        options.heartbeat_timeout = 300ms;
        options.on_failure = [&](const std::string&, bool) { ++failures; };
      });
  CHECK(failures == 0);
  for (const std::string& error : errors) CHECK(error.empty());
}

/// Failures as the handlers saw them.
struct Seen {
  std::mutex mutex;
  std::vector<std::string> messages;
  std::vector<int> printers;

  void add(int rank, const std::string& message, bool should_print) {
    const std::lock_guard lock(mutex);
    messages.push_back(message);
    if (should_print) printers.push_back(rank);
  }
  [[nodiscard]] std::function<void(ControlOptions&)> handler() {
    return [this](ControlOptions& options) {
      const int rank = options.rank;
      options.on_failure = [this, rank](const std::string& message, bool should_print) {
        add(rank, message, should_print);
      };
    };
  }
};

TEST_CASE("control: a rank that gives up is named with its cause by all, and printed once") {
  for (const int failing : {0, 2}) {
    Seen seen;
    std::atomic<int> verdicts = 0;
    const auto errors = run_ranks(
        4,
        [&](Control& control) {
          control.barrier();
          control.set_task("step 3: read 'a'");
          if (control.rank() == failing) {
            std::this_thread::sleep_for(20ms);
            const Verdict verdict = control.fail("cannot read 'a': Input/output error");
            if (verdict.should_print == (failing == 0)) ++verdicts;
            seen.add(failing, verdict.message, verdict.should_print);
          }
          control.barrier();
        },
        seen.handler());
    CHECK(verdicts == 1);
    const std::string pid = std::to_string(::getpid());
    for (const std::string& error : errors) {
      INFO(error);
      CHECK(contains(error, "rank " + std::to_string(failing) + " (host host" +
                                std::to_string(failing / 2) + ", pid " + pid + ") failed"));
      CHECK(contains(error, ": cannot read 'a': Input/output error; all ranks end; start again"));
    }
    CHECK(seen.messages.size() == 4);
    for (const std::string& message : seen.messages) CHECK(message == errors[0]);
    CHECK(seen.printers == std::vector<int>{0});
  }
}

TEST_CASE("control: two ranks that give up at once give one message") {
  Seen seen;
  const auto errors = run_ranks(
      3,
      [&](Control& control) {
        control.barrier();
        if (control.rank() > 0) {
          const Verdict verdict = control.fail("no space left");
          seen.add(control.rank(), verdict.message, verdict.should_print);
        }
        control.barrier();
      },
      seen.handler());
  CHECK(errors[0] == errors[1]);
  CHECK(errors[0] == errors[2]);
  CHECK(seen.printers == std::vector<int>{0});
}

TEST_CASE("control: a death explains what gives up because of it") {
  Seen seen;
  const auto errors = run_ranks(
      3,
      [&](Control& control) {
        control.barrier();
        if (control.rank() == 1) {
          static_cast<void>(control.fail("MPI: the connection to rank 2 was reset"));
        }
        if (control.rank() == 2) {
          std::this_thread::sleep_for(50ms);
          return;  // without a goodbye
        }
        control.barrier();
      },
      seen.handler());
  CHECK(contains(errors[0], "rank 2 (host host1"));
  CHECK(contains(errors[0], "died"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("control: where rank 0 is lost one rank of each host tells") {
  Seen seen;
  const auto errors = run_ranks(
      6,  // two on each host
      [&](Control& control) {
        control.set_task("saving");
        control.barrier();
        if (control.rank() == 0) {
          std::this_thread::sleep_for(300ms);  // some beats
          return;
        }
        control.barrier();
      },
      [&](ControlOptions& options) {
        options.heartbeat_timeout = 800ms;
        seen.handler()(options);
      });
  for (int r = 1; r < 6; ++r) {
    INFO(errors[static_cast<size_t>(r)]);
    CHECK(contains(errors[static_cast<size_t>(r)], "rank 0 (host host0"));
    CHECK(contains(errors[static_cast<size_t>(r)], "died during 'saving'; all ranks end"));
  }
  std::sort(seen.printers.begin(), seen.printers.end());
  CHECK(seen.printers == std::vector<int>{1, 2, 4});
}

TEST_CASE("control: a phase's limit holds for who does not wait") {
  Seen seen;
  const auto errors = run_ranks(
      3,
      [&](Control& control) {
        control.set_phase("load", 300ms);
        control.barrier();
        control.set_task("waits for drive 3");
        // Slow, but with progress; then far too long without.
        if (control.rank() == 1) {
          for (int i = 0; i < 5; ++i) {
            std::this_thread::sleep_for(100ms);
            control.set_task("reads part " + std::to_string(i));
          }
          std::this_thread::sleep_for(1200ms);
        }
        control.barrier();
      },
      [&](ControlOptions& options) {
        options.heartbeat_timeout = 2s;
        seen.handler()(options);
      });
  for (const std::string& error : errors) {
    INFO(error);
    CHECK(contains(error, "rank 1 (host host0, pid "));
    CHECK(contains(error, "has made no progress for "));
    CHECK(contains(error, "in the phase 'load', which allows 0.3 s (stuck), at 'reads part 4'"));
  }
  CHECK(seen.printers == std::vector<int>{0});
}

TEST_CASE("control: without a limit a rank may take as long as it likes") {
  Seen seen;
  const auto errors = run_ranks(
      2,
      [&](Control& control) {
        control.set_phase("first", 200ms);
        control.barrier();
        control.set_phase("optimizer", 0ms);
        std::this_thread::sleep_for(900ms);  // three times the timeout
        control.barrier();
        control.close();
      },
      [&](ControlOptions& options) {
        options.heartbeat_timeout = 300ms;
        seen.handler()(options);
      });
  CHECK(seen.messages.empty());
  for (const std::string& error : errors) CHECK(error.empty());
}

TEST_CASE("control: ranks at different collectives end with a message") {
  const auto errors = run_ranks(2, [&](Control& control) {
    if (control.rank() == 0) {
      control.barrier();
    } else {
      control.close();
    }
  });
  CHECK(contains(errors[0], "rank 1 is at another collective than rank 0"));
  CHECK(errors[1] == errors[0]);
}

TEST_CASE("control: long task names are cut between characters") {
  Seen seen;
  const auto errors = run_ranks(
      2,
      [&](Control& control) {
        std::string task(159, 'x');
        task += "\xc3\xa4yz";
        if (control.rank() == 0) control.set_task(task);
        control.barrier();
        static_cast<void>(control.rank() == 0 ? control.fail("no") : Verdict{});
        control.barrier();
      },
      [](ControlOptions& options) { options.heartbeat_timeout = 400ms; });
  INFO(errors[1]);
  CHECK(contains(errors[1], "during '" + std::string(159, 'x') + "': no"));
}

TEST_CASE("control: started by what a launcher told") {
  RankInfo info;
  info.host = "a";
  const auto alone = Control::start(info, {});
  CHECK(alone->ranks() == 1);
  CHECK(alone->all_gather(int64_t{5}) == std::vector<int64_t>{5});
  const Verdict verdict = alone->fail("no");
  CHECK(contains(verdict.message, "rank 0 (host a, pid "));
  CHECK(verdict.should_print);
}

}  // namespace
}  // namespace strata::comm
