#include "train/export.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "apps/strata/commands.h"
#include "base/bytes.h"

namespace strata::app {
namespace {

struct Arguments {
  std::string source, directory, dtype, max_shard_size = "5GB";
  bool json = false;
};

void run(const Arguments& arguments) {
  train::ExportOptions options;
  options.max_shard_bytes = static_cast<int64_t>(parse_bytes(arguments.max_shard_size));
  if (arguments.dtype == "bf16") options.type = model::ElementType::kBf16;
  if (arguments.dtype == "fp32") options.type = model::ElementType::kF32;
  const train::ExportSummary summary =
      train::export_model(arguments.source, arguments.directory, options);
  if (arguments.json) {
    const nlohmann::ordered_json json{{"schema", 1},
                                      {"checkpoint", summary.checkpoint.string()},
                                      {"directory", arguments.directory},
                                      {"dtype", model::name_of(summary.type)},
                                      {"tensors", summary.tensors},
                                      {"bytes", summary.bytes}};
    fmt::print("{}\n", json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
    return;
  }
  fmt::print("wrote {} tensors, {} as {}, from {} to {}\n", summary.tensors,
             format_bytes(static_cast<size_t>(summary.bytes)), model::name_of(summary.type),
             summary.checkpoint.string(), arguments.directory);
}

}  // namespace

void add_export(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("export", "Write a Hugging Face directory from a checkpoint");
  command->add_option("run", arguments->source, "Output directory of a run, or a checkpoint in it")
      ->required()
      ->type_name("RUN");
  command->add_option("directory", arguments->directory, "Directory to write")
      ->required()
      ->type_name("DIR");
  command
      ->add_option("--dtype", arguments->dtype,
                   "bf16 or fp32; left out: as the model's config says")
      ->check(CLI::IsMember({"bf16", "fp32"}));
  command->add_option("--max-shard-size", arguments->max_shard_size, "Largest weight file")
      ->type_name("BYTES")
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "Print what was written as JSON");
  command->footer(
      "Examples:\n"
      "  strata export runs/mine exported/\n"
      "  strata export runs/mine/checkpoint-001000 exported/ --dtype fp32");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace strata::app
