// What every communicator must do, as one rank of it sees it: for threads, MPI and NCCL.
//
// Assertions of Catch belong to one thread, so these say what is wrong; empty: nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "gpu/device.h"

namespace strata::comm {

struct Rank {
  gpu::Device& device;
  gpu::Stream& stream;
  Communicator& group;
  /// Whether sums must have the bits of fp32 additions in the order of ranks, rounded once. Else
  /// they must be near.
  bool ordered_sums = true;
  /// Gets memory that is no longer used, where it cannot be given back as long as ranks are at
  /// work: that waits for all streams of a CUDA device, which ranks of the emulator share.
  std::vector<std::unique_ptr<gpu::Arena>>* kept = nullptr;
};

/// Every collective with sizes of 0, 1, odd, and more than a piece of any implementation
/// (`most_elements`); both dtypes; in place and not. All ranks call it at the same time.
[[nodiscard]] std::string check_collectives(const Rank& rank, int64_t most_elements);

/// Input of a rank: values of many sizes, both signs, zeros of both signs. The same for the same
/// arguments; in bf16 they are exact.
[[nodiscard]] std::vector<float> rank_values(uint64_t seed, int rank, int64_t count, DType dtype);

/// The bits of an all-reduce of rank_values(seed, ...).
[[nodiscard]] std::vector<std::byte> all_reduced(const Rank& rank, uint64_t seed, int64_t count,
                                                 DType dtype);
/// What they should be in a group of `ranks`, where sums are ordered.
[[nodiscard]] std::vector<std::byte> expected_sum(uint64_t seed, int ranks, int64_t count,
                                                  DType dtype);

}  // namespace strata::comm
