// What tests of ranks have in common.
#pragma once

#include <string>

#include "comm/rendezvous.h"

namespace strata::comm {

/// Ranks two by two on hosts.
inline ControlOptions options_of(int rank, int ranks) {
  ControlOptions options;
  options.rank = rank;
  options.ranks = ranks;
  options.host = "host" + std::to_string(rank / 2);
  options.connect_timeout = std::chrono::seconds(10);
  options.heartbeat_timeout = std::chrono::seconds(10);
  return options;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace strata::comm
