// --device, for the subcommands that compute.
#pragma once

#include <CLI/CLI.hpp>

#include "gpu/open_device.h"

namespace strata::app {

/// `choice` holds the default and must live as long as the command.
void add_device_option(CLI::App& command, gpu::DeviceChoice& choice);

}  // namespace strata::app
