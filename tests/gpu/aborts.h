// Whether a piece of code ends the process, as a failed STRATA_CHECK does.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "catch.h"

namespace strata::gpu {

/// Runs body in a child process of one thread. What it says on stderr is lost.
template <class Body>
[[nodiscard]] bool aborts(const Body& body) {
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // not through the test framework's handler
    ::dup2(::open("/dev/null", O_WRONLY), STDERR_FILENO);
    body();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

}  // namespace strata::gpu
