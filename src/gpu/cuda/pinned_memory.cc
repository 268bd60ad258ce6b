#include "gpu/cuda/pinned_memory.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "base/error.h"
#include "gpu/cuda/cuda_error.h"

namespace strata::gpu::cuda {
namespace {

cudaError_t register_memory(void* address, size_t size_bytes) {
  const cudaError_t status = cudaHostRegister(address, size_bytes, cudaHostRegisterPortable);
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  return status;
}

/// The most of the mapping that can be registered, to a sixteenth of it: each try touches all that
/// it registers.
size_t find_limit_bytes(const Mapping& mapping) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t can = 0;
  size_t cannot = mapping.size_bytes;
  while (cannot - can > std::max(page_bytes, mapping.size_bytes / 16)) {
    const size_t middle = can + align_up((cannot - can) / 2, page_bytes);
    if (register_memory(mapping.address, middle) == cudaSuccess) {
      RegistrationTraits::close(mapping.address);
      can = middle;
    } else {
      cannot = middle;
    }
  }
  return can;
}

/// What is known to keep programs from pinning memory.
std::string likely_limits() {
  std::string text;
  rlimit lock{};
  if (getrlimit(RLIMIT_MEMLOCK, &lock) == 0 && lock.rlim_cur != RLIM_INFINITY) {
    text += fmt::format("; this process may lock {} (ulimit -l)", format_bytes(lock.rlim_cur));
  }
  utsname system{};
  if (uname(&system) == 0 &&
      std::string_view(system.release).find("microsoft") != std::string_view::npos) {
    text += "; under WSL2 Windows lets half of the machine's memory be pinned";
  } else {
    text += "; in a container, its memory limit counts as well";
  }
  return text;
}

}  // namespace

void RegistrationTraits::close(Type address) noexcept {
  static_cast<void>(cudaHostUnregister(address));
}

PinnedMemory PinnedMemory::allocate(size_t size_bytes) {
  UniqueMapping mapping = map_memory(size_bytes, "host");
  if (size_bytes == 0) return {std::move(mapping), {}};
  const cudaError_t status = register_memory(mapping.get().address, mapping.get().size_bytes);
  if (status == cudaSuccess) {
    void* address = mapping.get().address;
    return {std::move(mapping), UniqueHandle<RegistrationTraits>::adopt(address)};
  }
  const std::string what =
      fmt::format("pin {} ({} bytes) of host memory", format_bytes(size_bytes), size_bytes);
  if (is_lost(status)) throw cuda_error(status, what);
  throw Error(ErrorKind::kDoesNotFit,
              fmt::format("cannot {}: {}; about {} can be pinned now{}; raise that, or plan with a "
                          "smaller host_memory",
                          what, cudaGetErrorString(status),
                          format_bytes(find_limit_bytes(mapping.get())), likely_limits()));
}

}  // namespace strata::gpu::cuda
