// What the sources about MPI share. Needs no mpi.h, and so has no types of it.
#pragma once

#include <atomic>
#include <memory>
#include <string_view>

#include "comm/mpi_communicator.h"

namespace strata::comm {

/// MPI between its start and its end, owned by all that use it.
class MpiSession {
 public:
  /// Starts MPI; throws a failure.
  MpiSession();
  /// Finalizes it, unless left().
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  /// From now on MPI is not finalized. From any thread.
  void leave() noexcept { left_ = true; }
  [[nodiscard]] bool left() const noexcept { return left_; }

 private:
  std::atomic<bool> left_ = false;
};

/// Throws a failure "cannot WHAT: MPI's words" where `code` is one.
void check_mpi(int code, std::string_view what);

/// The ranks of MPI_COMM_WORLD that give the same color.
[[nodiscard]] std::unique_ptr<Communicator> create_mpi_communicator(
    const std::shared_ptr<MpiSession>& session, int color, int key);

}  // namespace strata::comm
