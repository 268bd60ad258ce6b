#include "nvme/backend.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "nvme/thread_backend.h"
#include "nvme/uring_backend.h"

namespace strata::nvme {
namespace {

bool means_no_uring(int errno_code) {
  constexpr std::array kCodes{ENOSYS, EPERM, EACCES, EINVAL, ENOMEM, EOPNOTSUPP};
  return std::find(kCodes.begin(), kCodes.end(), errno_code) != kCodes.end();
}

}  // namespace

BackendFactory with_fallback(BackendFactory preferred, BackendFactory other) {
  return [preferred = std::move(preferred),
          other = std::move(other)](const BackendOptions& options) -> std::unique_ptr<Backend> {
    std::string reason;
    try {
      return preferred(options);
    } catch (const IoError& error) {
      if (!means_no_uring(error.errno_code())) throw;
      reason = error.what();
    }
    // A file that cannot be opened is the other's error as well, and thrown here.
    std::unique_ptr<Backend> backend = other(options);
    backend->info().notes.push_back(reason + "; using " + backend->info().name + " instead");
    return backend;
  };
}

std::unique_ptr<Backend> open_backend(const BackendOptions& options) {
  return with_fallback(open_uring_backend, open_thread_backend)(options);
}

}  // namespace strata::nvme
