// Output for people.
#pragma once

#include <cstdio>
#include <string>

namespace strata::app {

/// One line on standard error. Never throws: a closed or full log is no reason to end a run.
inline void say(const std::string& line) noexcept {
  std::fputs(line.c_str(), stderr);
  std::fputc('\n', stderr);
}

}  // namespace strata::app
