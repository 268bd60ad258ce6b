#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <new>

#include "apps/strata/commands.h"
#include "apps/strata/console.h"
#include "base/error.h"
#include "comm/control.h"
#include "comm/launch.h"
#include "train/rank_exchange.h"

namespace {

/// Whether this process is the one of its host that speaks. What the launcher tells may be wrong,
/// and whoever needs it will say so.
bool is_first_of_host() {
  try {
    return strata::comm::rank_info_from_environment().local_rank == 0;
  } catch (const strata::Error&) {
    return true;
  }
}

/// What is wrong before ranks have met is wrong on all of a host (a file that is not there), and
/// the first says it.
int report(int exit_code, const char* message) {
  if (is_first_of_host()) strata::app::say(fmt::format("strata: {}", message));
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  using strata::ErrorKind;
  CLI::App app{"Strata trains language models that do not fit in one GPU's memory."};
  app.name("strata");
  app.set_version_flag("--version", STRATA_VERSION);
  app.require_subcommand(1);
  app.failure_message([](const CLI::App* failed, const CLI::Error& error) {
    return fmt::format("strata: {}; see '{} --help'\n", error.what(),
                       failed->get_parent() ? "strata " + failed->get_name() : failed->get_name());
  });
  app.footer(
      "Examples:\n"
      "  strata train config.yaml\n"
      "  strata generate runs/mine --prompt 'In the beginning'\n"
      "Exit codes: 0 done, 1 failed, 2 bad usage or input, 3 does not fit, 130 interrupted.");
  strata::app::add_train(app);
  strata::app::add_generate(app);
  strata::app::add_export(app);
  strata::app::add_bench(app);
  strata::app::add_plan(app);
  strata::app::add_store(app);
  try {
    app.parse(argc, argv);
    if (std::fflush(stdout) != 0) {
      return report(static_cast<int>(ErrorKind::kFailed), "cannot write to standard output");
    }
    return 0;
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0 && !is_first_of_host())
      return static_cast<int>(ErrorKind::kUsage);
    return app.exit(error) == 0 ? 0 : static_cast<int>(ErrorKind::kUsage);
  } catch (const strata::train::AgreedError& error) {
    return static_cast<int>(error.kind());
  } catch (const strata::comm::RankFailure& error) {
    if (error.should_print()) strata::app::say(fmt::format("strata: {}", error.what()));
    return static_cast<int>(error.kind());
  } catch (const strata::Error& error) {
    return report(static_cast<int>(error.kind()), error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    const std::string message =
        fmt::format("cannot use '{}': {}", error.path1().string(), error.code().message());
    return report(static_cast<int>(ErrorKind::kFailed), message.c_str());
  } catch (const std::bad_alloc&) {
    return report(static_cast<int>(ErrorKind::kFailed),
                  "the machine refused more memory; close other programs or train a smaller model");
  } catch (const std::exception& error) {
    return report(static_cast<int>(ErrorKind::kFailed), error.what());
  }
}
