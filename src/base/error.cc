#include "base/error.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace strata {
namespace {

std::string io_message(const std::string& operation, const std::string& path, int errno_code,
                       int64_t offset_bytes, int64_t size_bytes) {
  std::string text = "cannot " + operation + " '" + path + "'";
  if (size_bytes >= 0) text += ", " + std::to_string(size_bytes) + " bytes";
  if (offset_bytes >= 0) text += " at offset " + std::to_string(offset_bytes);
  return text + ": " + std::strerror(errno_code);
}

}  // namespace

IoError::IoError(std::string operation, std::string path, int errno_code, int64_t offset_bytes,
                 int64_t size_bytes)
    : Error(ErrorKind::kFailed, io_message(operation, path, errno_code, offset_bytes, size_bytes)),
      path_(std::move(path)),
      errno_code_(errno_code) {}

namespace internal {

void check_failed(const char* condition, const char* file, int line, const char* message) noexcept {
  std::fprintf(stderr, "strata: internal error: %s (%s) at %s:%d\n", message, condition, file,
               line);
  std::abort();
}

}  // namespace internal
}  // namespace strata
