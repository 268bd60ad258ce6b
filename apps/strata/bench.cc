#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "apps/strata/commands.h"
#include "bench/lanes.h"

namespace strata::app {
namespace {

struct Lane {
  const char* name;
  std::vector<bench::Row> (*run)(const bench::Options&);
};
constexpr std::array kLanes{Lane{"matmul", bench::run_matmul}, Lane{"step", bench::run_step}};

struct Arguments {
  std::vector<std::string> lanes;
  bench::Options options;
  bool json = false;
};

void run(const Arguments& arguments) {
  std::vector<bench::Row> rows;
  for (const Lane& lane : kLanes) {
    const auto& wanted = arguments.lanes;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), lane.name) == wanted.end()) {
      continue;
    }
    std::vector<bench::Row> more = lane.run(arguments.options);
    rows.insert(rows.end(), std::make_move_iterator(more.begin()),
                std::make_move_iterator(more.end()));
  }
  if (arguments.json) {
    bench::print_json(rows, std::cout);
  } else {
    bench::print_table(rows, std::cout);
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  std::vector<std::string> names;
  for (const Lane& lane : kLanes) names.emplace_back(lane.name);
  CLI::App* command = app.add_subcommand("bench", "Measure this machine's lanes");
  command->add_option("lane", arguments->lanes, "What to measure; left out: everything")
      ->type_name("LANE")
      ->check(CLI::IsMember(names));
  command->add_option("--threads", arguments->options.threads, "0: one for each core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--repetitions", arguments->options.repetitions, "Of which the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print JSON (docs/metrics.md)");
  command->footer(
      "Examples:\n"
      "  strata bench matmul\n"
      "  strata bench step --json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace strata::app
