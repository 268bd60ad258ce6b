// Flash attention, forward (Dao et al. 2022; Dao 2023 for the order of the loops).
//
// A block of 4 warps has 64 or 128 queries of one head, 16 or 32 a warp, whose sums stay in
// registers, and walks over the keys that they see: tile j + 1 of keys and values is copied by
// cp.async while tile j is computed with, at one barrier a tile. Probabilities go from the
// registers of one product to those of the next. With n queries and keys that is 2 n^2 head_dim
// FLOPs a head (as many again are masked and, but for tiles on the diagonal, not done); from the L2
// cache come 4 head_dim bytes for each key and block of queries: 64 or 128 FLOPs a byte, of which
// an A100 needs about 60 and an RTX 4090 about 30.
//
// Shared memory delivers 128 bytes a clock, a right operand of 16x16 in 4 clocks. In these an
// A100's tensor cores do 2 mma.sync, those of GeForce cards of sm_86, 89 and 120 half a one; the
// operand serves 2 for each 16 queries of the warp. Hence 32 queries a warp where registers allow.
// They are the limit throughout: 2 blocks a multiprocessor of up to 255 registers a thread.
//
// | head_dim | queries | keys | registers for sums, scores, queries | shared memory |
// | 64       | 128     | 64   | 64, 64, 32                          | 32 KiB        |
// | 96       | 128     | 32   | 96, 32, 48                          | 24 KiB        |
// | 128      | 128     | 32   | 128, 32, in shared memory           | 64 KiB        |
// | 256      | 64      | 32   | 128, 16, in shared memory           | 96 KiB        |
//
// A row's reference (what is subtracted in the exponent) follows its maximum only when that is more
// than 2^8 ahead: rescaling the sums, which takes an A100 a quarter of the time of a tile's
// products, is then rare, and probabilities of up to 2^8 lose nothing in fp32 or bf16.
#include <algorithm>
#include <limits>

#include "gpu/cuda/attention_plain_forward.cuh"
#include "gpu/cuda/attention_tasks.cuh"
#include "gpu/cuda/attention_tile.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"

namespace strata::gpu::cuda {
namespace {

using namespace flash;

constexpr float kReferenceSlack = 8;

template <int kDim>
struct Shape {
  static constexpr int kRowTiles = kDim == 256 ? 1 : 2;  // of 16 queries, a warp
  static constexpr int kKeys = kDim == 64 ? 64 : 32;     // of a tile
  static constexpr bool kQueriesInRegisters = kDim < 128;

  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeyTileBytes = kKeys * Layout<kDim>::kRowBytes;
  static constexpr int kQueryBytes = kRows * Layout<kDim>::kRowBytes;
  static constexpr int kRingBytes = 2 * 2 * kKeyTileBytes;  // keys and values, two of each
  // Queries that are in registers leave their place to the ring.
  static constexpr int kRingOffset = kQueriesInRegisters ? 0 : kQueryBytes;
  static constexpr int kSharedBytes = kQueriesInRegisters
                                          ? (kRingBytes > kQueryBytes ? kRingBytes : kQueryBytes)
                                          : kQueryBytes + kRingBytes;
  static_assert(kSharedBytes <= 99 * 1024);
};

/// A lane's rows of online softmax: row 16 t + 8 i + group of its warp at [t][i]. Sums are of the
/// lane's own columns until the end.
template <int kRowTiles>
struct Softmax {
  float reference[kRowTiles][2];  // binary logarithm
  float sum[kRowTiles][2];
};

/// scores = 2^(scores * scale - reference) with the references brought up to date, and `sums` and
/// the softmax's sums with them.
template <int kDim, int kRowTiles, int kBlocks>
__device__ __forceinline__ void exponentiate(float scale, float (&scores)[kRowTiles][kBlocks][4],
                                             Softmax<kRowTiles>& softmax,
                                             Sums<kRowTiles, kDim>& sums) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    float factors[2] = {1, 1};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float max = -std::numeric_limits<float>::infinity();
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        max = fmaxf(max, fmaxf(scores[t][n][2 * i], scores[t][n][2 * i + 1]));
      }
      max = fmaxf(max, ptx::shuffle_xor(max, 1));
      max = fmaxf(max, ptx::shuffle_xor(max, 2)) * scale;
      if (max > softmax.reference[t][i] + kReferenceSlack) {
        factors[i] = ptx::exp2_approx(softmax.reference[t][i] - max);
        softmax.reference[t][i] = max;
      }
    }
    if (ptx::any(factors[0] != 1 || factors[1] != 1)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        softmax.sum[t][i] *= factors[i];
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
          sums[t][n][2 * i] *= factors[i];
          sums[t][n][2 * i + 1] *= factors[i];
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[t][n][i] =
            ptx::exp2_approx(fmaf(scores[t][n][i], scale, -softmax.reference[t][i / 2]));
        softmax.sum[t][i / 2] += scores[t][n][i];
      }
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const AttentionArgs args, const unsigned tasks) {
  using S = Shape<kDim>;
  if (blockIdx.x >= tasks) return zero_unused_results<Bf16>(args, blockIdx.x - tasks);
  // Backwards: the last parts of a sequence see the most keys.
  const int heads = static_cast<int>(args.heads);
  const Task task(args, static_cast<unsigned>(heads), tasks - 1 - blockIdx.x, S::kRows);
  if (!task.exists()) return;

  const int stride = static_cast<int>(args.qkv_stride);
  const int kv_head = task.head / group_of(args);
  const int64_t first = static_cast<int64_t>(task.first_token) * stride;
  const Bf16* q = static_cast<const Bf16*>(args.q) + first +
                  static_cast<int64_t>(task.first_row) * stride + task.head * kDim;
  const Bf16* k = static_cast<const Bf16*>(args.k) + first + kv_head * kDim;
  const Bf16* v = static_cast<const Bf16*>(args.v) + first + kv_head * kDim;

  std::byte* const ring = shared_memory() + S::kRingOffset;
  const auto copy_keys_async = [&](int tile) {
    const int key = tile * S::kKeys;
    const int64_t offset = static_cast<int64_t>(key) * stride;
    std::byte* to = ring + tile % 2 * 2 * S::kKeyTileBytes;
    copy_rows_async<kDim, S::kKeys>(k + offset, stride, task.length - key, to);
    copy_rows_async<kDim, S::kKeys>(v + offset, stride, task.length - key, to + S::kKeyTileBytes);
    ptx::cp_async_commit();
  };

  const BlockOffsets<kDim> offsets;
  std::byte* const warp_queries =
      shared_memory() + warp_index() * S::kWarpRows * Layout<kDim>::kRowBytes;
  copy_rows_async<kDim, S::kRows>(q, stride, task.length - task.first_row, shared_memory());
  if constexpr (S::kQueriesInRegisters) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  const LeftOperand<kDim, S::kRowTiles, S::kQueriesInRegisters> queries(warp_queries, offsets);
  if constexpr (S::kQueriesInRegisters) __syncthreads();
  copy_keys_async(0);

  const int lane_row = task.first_row + warp_index() * S::kWarpRows + lane_index() / 4;
  const int last_row = task.first_row + warp_index() * S::kWarpRows + S::kWarpRows - 1;
  const int end = std::min(task.first_row + S::kRows, task.length);
  const int tiles = (end + S::kKeys - 1) / S::kKeys;
  const float scale = args.scale * kLog2E;
  Sums<S::kRowTiles, kDim> sums;
  clear(sums);
  Softmax<S::kRowTiles> softmax;
#pragma unroll
  for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      softmax.reference[t][i] = -std::numeric_limits<float>::infinity();
      softmax.sum[t][i] = 0;
    }
  }

  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (tile + 1 < tiles) copy_keys_async(tile + 1);
    const int first_key = tile * S::kKeys;
    if (first_key > last_row) continue;

    const std::byte* keys = ring + tile % 2 * 2 * S::kKeyTileBytes;
    float scores[S::kRowTiles][S::kKeys / 8][4];
    multiply_transposed(queries, keys, offsets, scores);
    if (first_key + S::kKeys > last_row - S::kWarpRows + 1) {
#pragma unroll
      for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
        for (int n = 0; n < S::kKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first_key + 8 * n + lane_index() % 4 * 2 + i % 2;
            if (key > lane_row + 16 * t + i / 2 * 8) {
              scores[t][n][i] = -std::numeric_limits<float>::infinity();
            }
          }
        }
      }
    }
    exponentiate<kDim>(scale, scores, softmax, sums);
    Rounded<S::kRowTiles, S::kKeys> probabilities;
    round(scores, probabilities);
    multiply_add<kDim>(probabilities, keys + S::kKeyTileBytes, offsets, sums);
  }

  float factors[S::kRowTiles][2];
#pragma unroll
  for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = softmax.sum[t][i];
      sum += ptx::shuffle_xor(sum, 1);
      sum += ptx::shuffle_xor(sum, 2);
      factors[t][i] = 1.0F / sum;
      const int row = lane_row + 16 * t + 8 * i;
      if (lane_index() % 4 == 0 && row < task.length) {
        args.log_sum_exp[task.head * args.tokens + task.first_token + row] =
            softmax.reference[t][i] * kLn2 + logf(sum);
      }
    }
  }
  if constexpr (S::kQueriesInRegisters) __syncthreads();  // the ring becomes the warps' own rows
  const int warp_row = task.first_row + warp_index() * S::kWarpRows;
  const int64_t out_stride = args.heads * kDim;
  store_rows<kDim>(
      sums, factors, warp_queries, task.length - warp_row,
      static_cast<Bf16*>(args.out) + (task.first_token + warp_row) * out_stride + task.head * kDim,
      out_stride);
}

template <int kDim>
void launch_fast(const AttentionArgs& args, StreamHandle stream) {
  using S = Shape<kDim>;
  const unsigned tasks = grid_size(parts_of(args, S::kRows) * args.heads, 1);
  launch("attention", attention_kernel<kDim>, grid_size(int64_t{tasks} + kZeroBlocks, 1), kThreads,
         S::kSharedBytes, stream, args, tasks);
}

}  // namespace

void attention(const AttentionArgs& args, StreamHandle stream) {
  check(args);
  if (is_empty(args)) return;
  if (!is_fast(args)) return plain_attention(args, stream);
  switch (args.head_dim) {
    case 64:
      return launch_fast<64>(args, stream);
    case 96:
      return launch_fast<96>(args, stream);
    case 128:
      return launch_fast<128>(args, stream);
    default:
      return launch_fast<256>(args, stream);
  }
}

}  // namespace strata::gpu::cuda
