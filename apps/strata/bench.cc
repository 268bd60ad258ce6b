#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "apps/strata/commands.h"
#include "apps/strata/console.h"
#include "apps/strata/device_option.h"
#include "base/bytes.h"
#include "bench/lanes.h"
#include "gpu/open_device.h"

namespace strata::app {
namespace {

struct Lane {
  const char* name;
  std::vector<bench::Row> (*run)(gpu::Device&, const bench::Options&);
};
constexpr std::array kLanes{
    Lane{"adam", bench::run_adam},         Lane{"matmul", bench::run_matmul},
    Lane{"step", bench::run_step},         Lane{"nvme", bench::run_nvme},
    Lane{"pipeline", bench::run_pipeline}, Lane{"ranks", bench::run_ranks}};

struct Arguments {
  std::vector<std::string> lanes;
  bench::Options options;
  std::string size;
  gpu::DeviceChoice device = gpu::DeviceChoice::kAuto;
  bool json = false;
};

void run(const Arguments& arguments) {
  const gpu::OpenedDevice opened =
      gpu::open_device({.choice = arguments.device,
                        .host = {.threads = arguments.options.threads, .memory_bytes = 16 * kGiB}});
  if (!opened.note.empty()) say(opened.note);
  bench::Options options = arguments.options;
  options.say = say;
  if (!arguments.size.empty()) options.size_bytes = parse_bytes(arguments.size);
  std::vector<bench::Row> rows;
  for (const Lane& lane : kLanes) {
    const auto& wanted = arguments.lanes;
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), lane.name) == wanted.end()) {
      continue;
    }
    std::vector<bench::Row> more = lane.run(*opened.device, options);
    rows.insert(rows.end(), std::make_move_iterator(more.begin()),
                std::make_move_iterator(more.end()));
  }
  if (arguments.json) {
    bench::print_json(rows, opened.device->description(), std::cout);
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
  add_device_option(*command, arguments->device);
  command->add_option("--repetitions", arguments->options.repetitions, "Of which the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option("--parameters", arguments->options.parameters,
                   "Whose state the optimizer updates (adam), 60 bytes each in all")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command
      ->add_option("--path", arguments->options.path,
                   "Directory on the drive to measure (nvme, pipeline); nothing is left in it")
      ->type_name("DIR")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  command
      ->add_option("--size", arguments->size,
                   "Of the file to measure with (nvme), e.g. 8GiB; left out: 4GiB or half the room")
      ->type_name("BYTES");
  command
      ->add_option("--traces", arguments->options.traces,
                   "Directory for traces of steps, for Perfetto or chrome://tracing (pipeline)")
      ->type_name("DIR")
      ->check(CLI::ExistingDirectory);
  command->add_flag("--json", arguments->json, "Print JSON (docs/metrics.md)");
  command->footer(
      "Examples:\n"
      "  strata bench adam --threads 8\n"
      "  strata bench matmul\n"
      "  strata bench step --device host --json\n"
      "  strata bench nvme --path /mnt/nvme0 --size 8GiB\n"
      "  strata bench pipeline --traces /tmp");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace strata::app
