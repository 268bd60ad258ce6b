#include "train/process_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"

namespace strata::train {

ProcessMemory read_process_memory() {
  std::ifstream status("/proc/self/status");
  std::optional<size_t> resident;
  std::optional<size_t> peak;
  for (std::string line; std::getline(status, line);) {
    std::istringstream words(line);
    std::string name;
    size_t kibibytes = 0;
    if (!(words >> name >> kibibytes)) continue;
    if (name == "VmRSS:") resident = kibibytes * kKiB;
    if (name == "VmHWM:") peak = kibibytes * kKiB;
  }
  if (!resident || !peak) {
    throw failure("cannot tell how much memory is in use: /proc/self/status has no VmRSS or VmHWM");
  }
  return {*resident, *peak};
}

bool reset_peak_resident() noexcept {
  const UniqueFd file = UniqueFd::adopt(::open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC));
  return file && ::write(file.get(), "5", 1) == 1;
}

size_t available_memory_bytes() {
  size_t available = SIZE_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream words(line);
    std::string name;
    size_t kibibytes = 0;
    if (words >> name >> kibibytes && name == "MemAvailable:") available = kibibytes * kKiB;
  }
  // Absent at the root of the hierarchy, and "max" where there is no limit.
  size_t limit = 0;
  size_t used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, limit > used ? limit - used : 0);
  }
  return available;
}

}  // namespace strata::train
