// Collective operations of a group of ranks, on a stream of each one's device.
//
// Every rank of a group makes the same calls in the same order with the same sizes. A call returns
// at once; the work is in the order of the stream, and what it reads and writes must live and stay
// untouched until then. Nothing is allocated after construction. An error of a collective is an
// error of the device's stream, thrown by the next synchronize.
//
// Threads: as of a stream, one dispatching thread; abort() from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/dtype.h"
#include "gpu/device.h"

namespace strata::comm {

enum class Collective : uint8_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast };
inline constexpr size_t kCollectives = 4;
[[nodiscard]] std::string_view name_of(Collective collective) noexcept;

/// Bytes that one rank of `ranks` sends (and receives) for one collective, where no algorithm sends
/// less: size_bytes is that of the whole result of a gather, of the whole input of a
/// reduce-scatter, of the array reduced or broadcast. Gather and reduce-scatter: S (D - 1) / D;
/// all-reduce, which is one after the other: twice that; broadcast: S.
[[nodiscard]] size_t collective_bytes(Collective collective, size_t size_bytes, int ranks) noexcept;

class Communicator {
 public:
  virtual ~Communicator() = default;

  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int size() const noexcept = 0;

  /// out [size()][bytes_per_rank], in device memory; `in` may be this rank's place in it.
  virtual void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                                gpu::Stream& stream) = 0;
  /// out [count_per_rank] = the sum over ranks of in [size()][count_per_rank] at this rank's place;
  /// `out` may be that place, and what is elsewhere in `in` is undefined afterwards. On host
  /// devices sums are taken in fp32 in the order of ranks and rounded once (ordered_sum.h); on CUDA
  /// devices they are NCCL's.
  virtual void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                                    gpu::Stream& stream) = 0;
  /// data [count] = the sum over ranks, in place, with the same bits on every rank; as above.
  virtual void all_reduce_async(void* data, int64_t count, DType dtype, gpu::Stream& stream) = 0;
  /// From rank `root` to all.
  virtual void broadcast_async(void* data, size_t size_bytes, int root, gpu::Stream& stream) = 0;
  /// Later work of the stream begins when every rank's stream has come here.
  virtual void barrier_async(gpu::Stream& stream) = 0;

  /// Ends what is under way on this rank with an error, as far as the library can, and refuses what
  /// comes later.
  virtual void abort() noexcept = 0;
};

}  // namespace strata::comm
