#include "nvme/store.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/strata/commands.h"
#include "apps/strata/console.h"
#include "base/bytes.h"
#include "base/error.h"
#include "nvme/arena_file.h"

namespace strata::app {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

struct Arguments {
  std::vector<std::string> directories;
  bool json = false;
};

std::string bytes_text(int64_t bytes) { return format_bytes(static_cast<size_t>(bytes)); }

ordered_json map_json(const nvme::Store& store) {
  const nvme::StoreMap& map = store.map();
  ordered_json drives = ordered_json::array();
  for (size_t d = 0; d < store.drives(); ++d) {
    drives.push_back({{"file", store.drive(d).path().string()},
                      {"file_size_bytes", map.drives[d].file_size_bytes}});
  }
  ordered_json records = ordered_json::array();
  for (size_t r = 0; r < map.records.size(); ++r) {
    const nvme::Record& record = map.records[r];
    const nvme::CommittedRecord committed = store.committed(static_cast<int>(r));
    ordered_json parts = ordered_json::array();
    for (const nvme::Part& part : record.parts) {
      parts.push_back({{"chunks", part.chunks},
                       {"data_offset_bytes", part.data_offset_bytes},
                       {"table_offset_bytes", part.table_offset_bytes}});
    }
    records.push_back({{"unit", record.spec.unit},
                       {"kind", nvme::name_of(record.spec.kind)},
                       {"slots", nvme::name_of(record.spec.slots)},
                       {"size_bytes", record.spec.size_bytes},
                       {"chunks", record.chunks},
                       {"generation", committed.generation},
                       {"slot", committed.slot},
                       {"parts", parts}});
  }
  return {{"drives", drives}, {"records", records}};
}

ordered_json report_json(const nvme::Store& store, const nvme::CheckResult& result) {
  ordered_json json{{"schema", 1},
                    {"store", store.id()},
                    {"generation", store.generation()},
                    {"in_flux", store.in_flux()},
                    {"chunk_size_bytes", store.map().chunk_size_bytes},
                    {"alignment_bytes", store.map().alignment_bytes},
                    {"metadata_size_bytes", store.metadata().size()},
                    {"bytes_written_total", store.bytes_written_total()}};
  json.update(map_json(store));
  json["checked_chunks"] = result.chunks;
  json["checked_bytes"] = result.bytes;
  json["notes"] = store.notes();
  json["faults"] = result.faults;
  return json;
}

void print_map(const nvme::Store& store) {
  const nvme::StoreMap& map = store.map();
  fmt::print("store {}, generation {}{}, chunks of {}, {} written in its life\n", store.id(),
             store.generation(), store.in_flux() ? ", in flux" : "",
             bytes_text(map.chunk_size_bytes), bytes_text(store.bytes_written_total()));
  for (size_t d = 0; d < store.drives(); ++d) {
    fmt::print("drive {}: {}, {}\n", d, store.drive(d).path().string(),
               bytes_text(map.drives[d].file_size_bytes));
  }
  fmt::print("{:>5} {:<9} {:<7} {:>14} {:>8} {:>10} {:>4}  {}\n", "unit", "kind", "slots", "bytes",
             "chunks", "generation", "slot", "drive:chunks@offset");
  for (size_t r = 0; r < map.records.size(); ++r) {
    const nvme::Record& record = map.records[r];
    const nvme::CommittedRecord committed = store.committed(static_cast<int>(r));
    const size_t slot =
        record.spec.slots == nvme::Slots::kTwo ? static_cast<size_t>(committed.slot) : 0;
    std::string parts;
    for (size_t d = 0; d < record.parts.size(); ++d) {
      const nvme::Part& part = record.parts[d];
      if (part.chunks == 0) continue;
      parts += fmt::format("{}{}:{}@{}", parts.empty() ? "" : " ", d, part.chunks,
                           part.data_offset_bytes[slot]);
    }
    fmt::print("{:>5} {:<9} {:<7} {:>14} {:>8} {:>10} {:>4}  {}\n", record.spec.unit,
               nvme::name_of(record.spec.kind), nvme::name_of(record.spec.slots),
               record.spec.size_bytes, record.chunks,
               committed.generation == 0 ? "-" : std::to_string(committed.generation),
               committed.generation == 0 ? "-" : std::to_string(committed.slot), parts);
  }
}

void check(const Arguments& arguments) {
  std::vector<nvme::StoreDirectory> directories;
  for (const std::string& directory : arguments.directories) {
    std::error_code none;
    if (!fs::exists(nvme::arena_path(directory), none) &&
        fs::is_directory(fs::path(directory) / "rank-0", none)) {
      throw usage_error(fmt::format(
          "'{0}' holds the stores of several ranks; check each of them, as '{0}/rank-0'",
          directory));
    }
    directories.push_back({.directory = directory});
  }
  nvme::StoreOptions options;
  options.read_only = true;
  options.accept_in_flux = true;
  nvme::Store store = nvme::Store::open(directories, options);
  const nvme::CheckResult result = store.check();
  if (arguments.json) {
    fmt::print(
        "{}\n",
        report_json(store, result).dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
  } else {
    print_map(store);
    for (const std::string& note : store.notes()) fmt::print("note: {}\n", note);
    for (const std::string& fault : result.faults) fmt::print("fault: {}\n", fault);
    fmt::print("verified {} chunks, {}: {}\n", result.chunks, bytes_text(result.bytes),
               result.faults.empty() ? "all as they were written"
                                     : fmt::format("{} damaged", result.faults.size()));
  }
  store.close();
  if (!result.faults.empty()) {
    throw failure(fmt::format("the store in '{}' is damaged in {} places; resume from a checkpoint",
                              arguments.directories.front(), result.faults.size()));
  }
}

}  // namespace

void add_store(CLI::App& app) {
  CLI::App* command = app.add_subcommand("store", "Look into the state that a run keeps on NVMe");
  command->require_subcommand(1);
  auto arguments = std::make_shared<Arguments>();
  CLI::App* checking =
      command->add_subcommand("check", "Verify every checksum of a store and print its map");
  checking
      ->add_option(
          "directory", arguments->directories,
          "The store's directories, one on each drive, in any order; of several ranks DIR/rank-N")
      ->required()
      ->type_name("DIR");
  checking->add_flag("--json", arguments->json, "Print JSON (docs/formats.md)");
  checking->footer(
      "Examples:\n"
      "  strata store check /mnt/nvme0/strata /mnt/nvme1/strata\n"
      "  strata store check --json /mnt/nvme0/strata\n"
      "Refused while a run uses the store. Exit code 1 where anything is damaged.");
  command->footer("Example:\n  strata store check /mnt/nvme0/strata");
  checking->callback([arguments] { check(*arguments); });
}

}  // namespace strata::app
