// The subcommands: each file adds its own to the command line and runs it. Nothing here but
// parsing, printing and exit codes.
#pragma once

#include <CLI/CLI.hpp>

namespace strata::app {

void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_export(CLI::App& app);
void add_bench(CLI::App& app);
void add_plan(CLI::App& app);
void add_store(CLI::App& app);

}  // namespace strata::app
