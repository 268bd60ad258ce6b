// A rank for tests that kill it: control_child KEY=VALUE...
// Rank 0 tells its port in a first line of standard output; a line of every rank says that the
// first step is done. Who has to tell the user does so in a line of standard error, and ends
// with 1.
//   rank, ranks, address, port, host
//   timeout    heartbeat_timeout in milliseconds
//   connect    connect_timeout in milliseconds
//   steps      how many; each is a task of a millisecond and a gather of all ranks; 0: no end
//   slow       a rank that takes as long as `slow_ms` over step 3
//   limit      the phase's limit in milliseconds
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>
#include <thread>

#include "comm/control.h"

namespace {

using std::chrono::milliseconds;

void end(const std::string& message, bool should_print) {
  if (should_print) {
    const std::string line = message + "\n";
    static_cast<void>(!::write(STDERR_FILENO, line.data(), line.size()));
  }
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace strata::comm;
  std::map<std::string, std::string> given{
      {"address", "127.0.0.1"}, {"port", "0"},       {"host", "here"},
      {"timeout", "1000"},      {"connect", "3000"}, {"steps", "0"},
      {"slow", "-1"},           {"slow_ms", "0"},    {"limit", "0"}};
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = argument.find('=');
    given[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  const auto number = [&](const char* name) { return std::stoi(given.at(name)); };
  try {
    ControlOptions options;
    options.rank = number("rank");
    options.ranks = number("ranks");
    options.local_rank = options.rank;
    options.host = given["host"];
    options.heartbeat_timeout = milliseconds(number("timeout"));
    options.connect_timeout = milliseconds(number("connect"));
    options.on_failure = end;
    const auto start = [&] {
      if (options.rank != 0) {
        return std::make_unique<Control>(given["address"], number("port"), options);
      }
      ControlListener listener(given["address"], number("port"));
      std::printf("%d\n", listener.port());
      std::fflush(stdout);
      return std::make_unique<Control>(std::move(listener), options);
    };
    const std::unique_ptr<Control> control = start();
    control->set_phase("train", milliseconds(number("limit")));
    const int steps = number("steps");
    for (int step = 1; steps == 0 || step <= steps; ++step) {
      if (step == 2) {
        std::printf("trains\n");
        std::fflush(stdout);
      }
      control->set_task("step " + std::to_string(step));
      const bool is_slow = step == 3 && options.rank == number("slow");
      std::this_thread::sleep_for(milliseconds(is_slow ? number("slow_ms") : 1));
      if (control->all_gather(int64_t{step}).back() != step) return 2;
    }
    control->close();
  } catch (const RankFailure& failure) {
    end(failure.what(), failure.should_print());
  } catch (const std::exception& error) {
    end(error.what(), true);
  }
}
