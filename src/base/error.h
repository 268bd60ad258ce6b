// Errors as exceptions: thrown by set-up and blocking calls, never by destructors, completion
// handlers or threads. A message is one sentence: what, where, and what to do.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace strata {

/// What kind of failure this is; the values are the exit codes of the command line.
enum class ErrorKind : int {
  kFailed = 1,        // the work could not be done (I/O, device, broken file found midway)
  kUsage = 2,         // bad arguments, configuration or input
  kDoesNotFit = 3,    // refused by the plan before anything was created
  kInterrupted = 130  // stopped by the user after a clean commit
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  [[nodiscard]] ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// A failed system call on a file, with all that is known of it.
class IoError : public Error {
 public:
  IoError(std::string operation, std::string path, int errno_code, int64_t offset_bytes = -1,
          int64_t size_bytes = -1);
  [[nodiscard]] int errno_code() const noexcept { return errno_code_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
  int errno_code_;
};

/// Bad arguments, configuration or input files.
[[nodiscard]] inline Error usage_error(const std::string& message) {
  return {ErrorKind::kUsage, message};
}

/// Work that could not be done.
[[nodiscard]] inline Error failure(const std::string& message) {
  return {ErrorKind::kFailed, message};
}

namespace internal {
[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const char* message) noexcept;
}

}  // namespace strata

/// A programmer's error: kept in release builds, prints the condition and aborts.
#define STRATA_CHECK(condition, message)                                         \
  do {                                                                           \
    if (!(condition)) [[unlikely]]                                               \
      ::strata::internal::check_failed(#condition, __FILE__, __LINE__, message); \
  } while (false)
