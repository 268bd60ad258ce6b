// Kernels that show what the emulator does, and some that are wrong on purpose.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace strata::gpu::cuda::emulator::test {

// Registers of 32 lanes, in and out.
void multiply_fragments(float* d, const uint32_t* a, const uint32_t* b, cudaStream_t stream);
/// `shared` is copied to shared memory, of which each lane gives row `rows[lane]` (16 bytes).
/// `count` is 2 or 4; `out` has `count` registers a lane.
void load_fragments(uint32_t* out, const uint16_t* shared, int shared_rows, const int* rows,
                    int count, bool transposed, cudaStream_t stream);

struct ShuffleResults {
  float indexed[32];
  double exclusive_or[32];
  uint64_t down[32];
  int up[32];
  unsigned ballots[32];
  unsigned any[32];
  unsigned all[32];
};
void shuffles(ShuffleResults* out, int lane, int mask, int delta, unsigned predicates,
              cudaStream_t stream);
/// Results of exp2, log2, reciprocal, packed pairs, add, sub, mul, div, sqrt, fma of x[i] and y[i].
inline constexpr int kScalarResults = 10;
void scalars(uint32_t* out, const float* x, const float* y, int count, cudaStream_t stream);

/// Where each thread was: x + 1000 (y + 1000 z) of threadIdx, then of blockIdx.
void indices(uint64_t* out, dim3 grid, dim3 block, cudaStream_t stream);

/// out[i] = in[threads - 1 - i] in each block, through shared memory and `barriers` barriers of the
/// two a round needs: 2 both, 1 without the one before reuse, 0 none. Three rounds with one buffer.
void reverse_thrice(int* out, const int* in, unsigned blocks, int barriers, cudaStream_t stream);
/// The same within one warp, ordered by __syncwarp or by nothing.
void reverse_warp(int* out, const int* in, bool synchronized, cudaStream_t stream);

enum class Pipeline : uint8_t { kRight, kNoWait, kWaitTooFew, kNoBarrierBeforeReuse };
/// Copies `tiles` tiles of 64 x 16 bytes from `in` through two cp.async buffers to `out`.
void pipelined_copy(uint4* out, const uint4* in, int tiles, Pipeline pipeline, cudaStream_t stream);
/// cp_async_16 of which every other one is not valid.
void zero_filled_copy(uint4* out, const uint4* in, cudaStream_t stream);

enum class Mistake : uint8_t {
  kDivergentBarrier,
  kExitBeforeBarrier,
  kExitBeforeShuffle,
  kBarrierAgainstShuffle,
  kTwoShuffles,
  kPartialWarp,
  kSharedWriteAfter,
  kSharedWriteBefore,
  kLoadPastEnd,
  kStorePastEnd,
  kMisaligned,
  kAsyncFromHost,
  kAsyncPastShared,
  kMatrixPastShared,
  kThrows,
};
/// A kernel of 64 threads that makes one mistake; `memory` holds `size_bytes`.
void make_mistake(Mistake mistake, std::byte* memory, size_t size_bytes, cudaStream_t stream);
/// Whether AddressSanitizer (where there is one) would stop an access just outside shared memory.
void probe_shared_ends(unsigned* caught, cudaStream_t stream);
void read_uninitialized(float* out, cudaStream_t stream);
/// Writes one byte at memory[offset], unchecked.
void poke(std::byte* memory, int64_t offset, cudaStream_t stream);
/// The order in which blocks and their threads got to run: a ticket for each.
void tickets(unsigned* out, unsigned* counter, unsigned blocks, cudaStream_t stream);
/// x[i] = x[i] * 3 + 1, `count` elements.
void step(unsigned* x, int64_t count, cudaStream_t stream);
/// Launches with that configuration; does nothing.
void nothing(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream);

}  // namespace strata::gpu::cuda::emulator::test
