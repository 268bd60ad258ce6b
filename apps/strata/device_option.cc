#include "apps/strata/device_option.h"

#include <map>
#include <string>

namespace strata::app {

void add_device_option(CLI::App& command, gpu::DeviceChoice& choice) {
  using gpu::DeviceChoice;
  static const std::map<std::string, DeviceChoice> kChoices{
      {"auto", DeviceChoice::kAuto}, {"cuda", DeviceChoice::kCuda}, {"host", DeviceChoice::kHost}};
  command
      .add_option_function<std::string>(
          "--device", [&choice](const std::string& text) { choice = kChoices.at(text); },
          "auto, cuda or host; auto: cuda where there is one, else host")
      ->type_name("DEVICE")
      ->check([](const std::string& text) {
        return kChoices.contains(text) ? std::string()
                                       : "'" + text + "' is none of auto, cuda, host";
      });
}

}  // namespace strata::app
