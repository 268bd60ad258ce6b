// How the work of attention is dealt to blocks, in both directions and for all shapes,
// and the checks that its launchers share.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/vectors.cuh"
#include "gpu/operators.h"

namespace strata::gpu::cuda::flash {

/// What parts of `rows` rows the sequences have, with one to spare each: part p of sequence s is
/// number sequence_offsets[s] / rows + s + p, so that a block finds its own without a table, and
/// there are no more than this for any lengths.
[[nodiscard]] inline int64_t parts_of(const AttentionArgs& args, int rows) {
  return args.sequences > 0 ? args.tokens / rows + args.sequences : 0;
}

/// Some rows (queries or keys) of a sequence and a head. Heads are the fastest digit of the number
/// of a task, for those of a group to share the L2 cache.
struct Task {
  __device__ __forceinline__ Task(const AttentionArgs& args, unsigned head_count, unsigned number,
                                  int rows)
      : head(static_cast<int>(number % head_count)) {
    const int part = static_cast<int>(number / head_count);
    int sequence = 0;
    int end = static_cast<int>(args.sequences);
    while (end - sequence > 1) {
      const int middle = (sequence + end) / 2;
      (args.sequence_offsets[middle] / rows + middle <= part ? sequence : end) = middle;
    }
    first_token = args.sequence_offsets[sequence];
    length = args.sequence_offsets[sequence + 1] - first_token;
    first_row = (part - first_token / rows - sequence) * rows;
  }
  /// Not so for the parts to spare.
  [[nodiscard]] __device__ __forceinline__ bool exists() const { return first_row < length; }

  int head;
  int first_token, length;  // of the sequence
  int first_row;            // of the task, within the sequence
};

/// Query heads of a key head.
__device__ __forceinline__ int group_of(const AttentionArgs& args) {
  return static_cast<int>(args.heads) / static_cast<int>(args.kv_heads);
}

/// The first token in no sequence.
__device__ __forceinline__ int64_t tokens_used(const AttentionArgs& args) {
  return args.sequences > 0 ? args.sequence_offsets[args.sequences] : 0;
}

/// The forward kernels have so many blocks beyond those with a task, to zero the results of unused
/// tokens: enough for some hundred tokens, of no account where there are none.
inline constexpr unsigned kZeroBlocks = 16;

/// What block `block` of these does.
template <class T>
__device__ __forceinline__ void zero_unused_results(const AttentionArgs& args, unsigned block) {
  const int thread = static_cast<int>(block * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(kZeroBlocks * blockDim.x);
  const int64_t first = tokens_used(args);
  const int unused = static_cast<int>(args.tokens - first);
  const int64_t width = args.heads * args.head_dim;
  T* out = static_cast<T*>(args.out) + first * width;
  for (int64_t i = thread; i < unused * width; i += threads) out[i] = T{};
  for (int i = thread; i < unused * static_cast<int>(args.heads); i += threads) {
    args.log_sum_exp[i / unused * args.tokens + first + i % unused] = 0;
  }
}

inline void check(const AttentionArgs& args) {
  STRATA_CHECK(args.head_dim >= 0 && args.kv_heads > 0 && args.heads % args.kv_heads == 0,
               "attention: heads must be a multiple of kv_heads");
  STRATA_CHECK(args.tokens >= 0 && args.tokens * args.heads <= INT32_MAX / 2 &&
                   args.sequences >= 0 && args.sequences <= INT32_MAX / 2 &&
                   args.max_sequence >= 0 && args.max_sequence <= args.tokens,
               "attention: 32 bits must count rows of heads and sequences");
  STRATA_CHECK(args.qkv_stride >= args.heads * args.head_dim || args.tokens <= 1,
               "attention: rows of queries must not overlap");
}

[[nodiscard]] inline bool is_empty(const AttentionArgs& args) {
  return args.tokens == 0 || args.heads == 0 || args.head_dim == 0;
}

/// Offsets within a tile of up to 256 rows are 32 bits.
inline constexpr int64_t kMaxFastStride = INT32_MAX / 256;

/// Whether the tensor core kernels take the call. The others do at a fraction of the speed.
[[nodiscard]] inline bool is_fast(const AttentionArgs& args) {
  const bool dim =
      args.head_dim == 64 || args.head_dim == 96 || args.head_dim == 128 || args.head_dim == 256;
  return args.dtype == DType::kBf16 && dim && args.scale > 0 && args.qkv_stride % 8 == 0 &&
         args.qkv_stride <= kMaxFastStride && are_aligned(args.q, args.k, args.v, args.out);
}

}  // namespace strata::gpu::cuda::flash
