// Flash attention, backward (Dao et al. 2022, algorithm 4), in three kernels:
//
// 1. delta = sum(dout * out) of each query and head. 4 head_dim bytes read, 4 written: bound by
//    memory.
// 2. key kernel: a block has 64 keys of one key head and walks over the queries that see them, of
//    all heads of its group. Scores are computed transposed, so that probabilities and their
//    gradients go from the registers of one product to those of the next; dk and dv stay in
//    registers. At head_dim 256 those would not hold both, so blocks of two kinds do one each.
// 3. query kernel: a block has 64 or 128 queries of one head, walks over the keys that they see and
//    keeps dq in registers.
//
// With n queries and keys, a product is n^2 head_dim FLOPs a head (as many again are masked). 2.
// does 4 of them and 3. does 3, against the 5 of one kernel that adds up dq in memory. That one
// needs float atomics, whose order is not fixed, or partial sums: 8 head_dim bytes written and read
// for each query and block of 64 keys, in which time 5 * 2 * 64 * head_dim FLOPs are done, 80 a
// byte. In the time of a byte of DRAM, an RTX 4090 does 165 and an A100 160: partial sums would
// cost twice what the products do, where computing scores again costs 7/5. (At head_dim 256, 8
// of 5.)
//
// | kernel | head_dim | rows | tile | registers for sums, scores, left operands | shared memory |
// | key    | 64       | 64   | 64   | 32 + 32, 32 + 32, 16 + 16                 | 49 KiB        |
// | key    | 96       | 64   | 32   | 48 + 48, 16 + 16, 24 + 24                 | 48.5 KiB      |
// | key    | 128      | 64   | 32   | 64 + 64, 16 + 16, in shared memory        | 64.5 KiB      |
// | dk     | 256      | 64   | 16   | 128, 8 + 8, in shared memory              | 96.25 KiB     |
// | dv     | 256      | 64   | 16   | 128, 8, in shared memory                  | 64.25 KiB     |
// | query  | 64       | 128  | 32   | 64, 16 + 16, 32 + 32                      | 32 KiB        |
// | query  | 96       | 64   | 32   | 48, 16 + 16, 24 + 24                      | 24 KiB        |
// | query  | 128      | 64   | 32   | 64, 16 + 16, 32 + 32                      | 32 KiB        |
// | query  | 256      | 64   | 16   | 128, 8 + 8, in shared memory              | 96 KiB        |
#include <algorithm>
#include <limits>

#include "gpu/cuda/attention_plain_backward.cuh"
#include "gpu/cuda/attention_tasks.cuh"
#include "gpu/cuda/attention_tile.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"

namespace strata::gpu::cuda {
namespace {

using namespace flash;

constexpr int kDeltaThreads = 256;
constexpr int kDeltaLanes = 8;  // of a row: 128 contiguous bytes a load
constexpr int kMaxChunksOfLane = 256 / 8 / kDeltaLanes;

__device__ __forceinline__ float dot_chunk(uint4 a, uint4 b) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w};
  const uint32_t right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += ptx::low_bf16(left[i]) * ptx::low_bf16(right[i]);
    sum += ptx::high_bf16(left[i]) * ptx::high_bf16(right[i]);
  }
  return sum;
}

/// Also zeros the gradients of unused tokens.
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(const AttentionBackwardArgs args) {
  const AttentionArgs& forward = args.forward;
  const int heads = static_cast<int>(forward.heads);
  const int row = static_cast<int>((blockIdx.x * kDeltaThreads + threadIdx.x) /
                                   kDeltaLanes);  // [tokens, heads]
  const int lane = static_cast<int>(threadIdx.x) % kDeltaLanes;
  const bool used =
      row < forward.tokens * heads && !zero_unused_gradients<Bf16>(args, row, lane, kDeltaLanes);
  const int chunks = used ? static_cast<int>(forward.head_dim) / 8 : 0;
  const auto* out = static_cast<const Bf16*>(forward.out) + row * forward.head_dim;
  const auto* dout = static_cast<const Bf16*>(args.dout) + row * forward.head_dim;
  uint4 left[kMaxChunksOfLane];
  uint4 right[kMaxChunksOfLane];
#pragma unroll
  for (int i = 0; i < kMaxChunksOfLane; ++i) {
    const int chunk = lane + i * kDeltaLanes;
    left[i] = chunk < chunks ? ptx::load_16(out + chunk * 8) : uint4{};
    right[i] = chunk < chunks ? ptx::load_16(dout + chunk * 8) : uint4{};
  }
  float delta = 0;
#pragma unroll
  for (int i = 0; i < kMaxChunksOfLane; ++i) delta += dot_chunk(left[i], right[i]);
#pragma unroll
  for (int mask = kDeltaLanes / 2; mask > 0; mask /= 2) delta += ptx::shuffle_xor(delta, mask);
  if (used && lane == 0) deltas(args)[row % heads * forward.tokens + row / heads] = delta;
}

/// The rows of a task's sequence, from its first token on, and of head 0.
struct Rows {
  __device__ __forceinline__ Rows(const AttentionBackwardArgs& args, const Task& task, int dim)
      : stride(static_cast<int>(args.forward.qkv_stride)),
        dout_stride(static_cast<int>(args.forward.heads) * dim),
        q(static_cast<const Bf16*>(args.forward.q) + offset(task, args.forward.qkv_stride)),
        k(static_cast<const Bf16*>(args.forward.k) + offset(task, args.forward.qkv_stride)),
        v(static_cast<const Bf16*>(args.forward.v) + offset(task, args.forward.qkv_stride)),
        dout(static_cast<const Bf16*>(args.dout) + offset(task, dout_stride)),
        log_sum_exp(args.forward.log_sum_exp + task.first_token),
        delta(deltas(args) + task.first_token) {}
  __device__ static __forceinline__ int64_t offset(const Task& task, int64_t stride) {
    return task.first_token * stride;
  }

  int stride, dout_stride;
  const Bf16 *q, *k, *v, *dout;
  const float *log_sum_exp, *delta;
};

template <int kDim, bool kDk, bool kDv>
struct KeyShape {
  static constexpr int kQueries = kDim == 64 ? 64 : kDim == 256 ? 16 : 32;
  static constexpr bool kInRegisters = kDim < 128;  // keys and values

  static constexpr int kWarpRows = 16;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeyBytes = kRows * Layout<kDim>::kRowBytes;
  static constexpr int kQueryTileBytes = kQueries * Layout<kDim>::kRowBytes;
  // Keys, values (where dk needs them), two tiles of queries and of dout, and for each of those the
  // queries' log_sum_exp and delta.
  static constexpr int kRingOffset = kDk ? 2 * kKeyBytes : kKeyBytes;
  static constexpr int kRowSumsOffset = kRingOffset + 4 * kQueryTileBytes;
  static constexpr int kSharedBytes =
      kRowSumsOffset + 2 * 2 * kQueries * static_cast<int>(sizeof(float));
  static_assert(kSharedBytes <= 99 * 1024);
};

template <int kDim, bool kDk, bool kDv>
__global__ void __launch_bounds__(kThreads, 2) key_kernel(const AttentionBackwardArgs args) {
  using S = KeyShape<kDim, kDk, kDv>;
  const AttentionArgs& forward = args.forward;
  const int kv_heads = static_cast<int>(forward.kv_heads);
  const int group = static_cast<int>(forward.heads) / kv_heads;
  const Task task(forward, static_cast<unsigned>(kv_heads), blockIdx.x, S::kRows);
  if (!task.exists()) return;
  const Rows rows(args, task, kDim);

  std::byte* const shared = shared_memory();
  std::byte* const ring = shared + S::kRingOffset;
  auto* const row_sums = reinterpret_cast<float*>(shared + S::kRowSumsOffset);
  const int first_tile = task.first_row / S::kQueries;
  const int tiles = (task.length + S::kQueries - 1) / S::kQueries - first_tile;
  const int steps = tiles * group;

  const auto copy_queries_async = [&](int step) {
    const int head = task.head * group + step / tiles;
    const int query = (first_tile + step % tiles) * S::kQueries;
    std::byte* to = ring + step % 2 * 2 * S::kQueryTileBytes;
    copy_rows_async<kDim, S::kQueries>(
        rows.q + static_cast<int64_t>(query) * rows.stride + head * kDim, rows.stride,
        task.length - query, to);
    copy_rows_async<kDim, S::kQueries>(
        rows.dout + static_cast<int64_t>(query) * rows.dout_stride + head * kDim, rows.dout_stride,
        task.length - query, to + S::kQueryTileBytes);
    // Zeros for queries that do not exist: as their dout is, their probabilities of 1 do not
    // matter.
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 2 * S::kQueries) {
      const int row = query + thread % S::kQueries;
      const float* from =
          (thread < S::kQueries ? rows.log_sum_exp : rows.delta) + head * forward.tokens + row;
      ptx::cp_async_4(row_sums + step % 2 * 2 * S::kQueries + thread, from, row < task.length);
    }
    ptx::cp_async_commit();
  };
  const int64_t block_offset =
      static_cast<int64_t>(task.first_row) * rows.stride + task.head * kDim;
  copy_rows_async<kDim, S::kRows>(rows.k + block_offset, rows.stride, task.length - task.first_row,
                                  shared);
  if constexpr (kDk) {
    copy_rows_async<kDim, S::kRows>(rows.v + block_offset, rows.stride,
                                    task.length - task.first_row, shared + S::kKeyBytes);
  }
  copy_queries_async(0);

  const BlockOffsets<kDim> offsets;
  const int warp_row = warp_index() * S::kWarpRows;
  std::byte* const warp_keys = shared + warp_row * Layout<kDim>::kRowBytes;
  if constexpr (S::kInRegisters) {
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  const LeftOperand<kDim, 1, S::kInRegisters> keys(warp_keys, offsets);
  const LeftOperand<kDim, 1, S::kInRegisters> values(warp_keys + S::kKeyBytes, offsets);
  const int warp_key = task.first_row + warp_row;
  const float scale = forward.scale * kLog2E;
  Sums<1, kDim> dk;
  Sums<1, kDim> dv;
  if constexpr (kDk) clear(dk);
  if constexpr (kDv) clear(dv);

  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (step + 1 < steps) copy_queries_async(step + 1);
    const int first_query = (first_tile + step % tiles) * S::kQueries;
    if (first_query + S::kQueries <= warp_key) continue;

    const std::byte* queries = ring + step % 2 * 2 * S::kQueryTileBytes;
    const std::byte* douts = queries + S::kQueryTileBytes;
    const float* log_sum_exp = row_sums + step % 2 * 2 * S::kQueries + lane_index() % 4 * 2;
    const float* delta = log_sum_exp + S::kQueries;

    float probabilities[1][S::kQueries / 8][4];
    multiply_transposed(keys, queries, offsets, probabilities);
    const bool masked = first_query < warp_key + S::kWarpRows - 1;
#pragma unroll
    for (int n = 0; n < S::kQueries / 8; ++n) {
      const float2 pair = *reinterpret_cast<const float2*>(log_sum_exp + 8 * n);
      const float references[2] = {pair.x * kLog2E, pair.y * kLog2E};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& probability = probabilities[0][n][i];
        probability = ptx::exp2_approx(fmaf(probability, scale, -references[i % 2]));
        const int query = first_query + 8 * n + lane_index() % 4 * 2 + i % 2;
        const int key = warp_key + i / 2 * 8 + lane_index() / 4;
        if (masked && key > query) probability = 0;
      }
    }
    Rounded<1, S::kQueries> rounded;
    if constexpr (kDv) {
      round(probabilities, rounded);
      multiply_add<kDim>(rounded, douts, offsets, dv);
    }
    if constexpr (kDk) {
      float gradients[1][S::kQueries / 8][4];
      multiply_transposed(values, douts, offsets, gradients);
#pragma unroll
      for (int n = 0; n < S::kQueries / 8; ++n) {
        const float2 pair = *reinterpret_cast<const float2*>(delta + 8 * n);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          gradients[0][n][i] =
              probabilities[0][n][i] * (gradients[0][n][i] - (i % 2 == 0 ? pair.x : pair.y));
        }
      }
      round(gradients, rounded);
      multiply_add<kDim>(rounded, queries, offsets, dk);
    }
  }

  // A warp's own keys are the way out for its rows of both results.
  const int64_t offset = (task.first_token + warp_key) * args.dqkv_stride + task.head * kDim;
  const int valid_rows = task.length - warp_key;
  const auto store = [&](const Sums<1, kDim>& sums, float factor, void* to) {
    const float factors[1][2] = {{factor, factor}};
    store_rows<kDim>(sums, factors, warp_keys, valid_rows, static_cast<Bf16*>(to) + offset,
                     args.dqkv_stride);
  };
  if constexpr (kDk) store(dk, forward.scale, args.dk);
  if constexpr (kDv) store(dv, 1, args.dv);
}

template <int kDim>
struct QueryShape {
  static constexpr int kRowTiles = kDim == 64 ? 2 : 1;  // of 16 queries, a warp
  static constexpr int kKeys = kDim == 256 ? 16 : 32;   // of a tile
  static constexpr int kStepKeys = kDim == 64 ? 16 : kKeys;
  static constexpr bool kInRegisters = kDim < 256;  // queries and dout

  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kKeyTileBytes = kKeys * Layout<kDim>::kRowBytes;
  static constexpr int kQueryBytes = kRows * Layout<kDim>::kRowBytes;
  static constexpr int kRingBytes = 2 * 2 * kKeyTileBytes;  // keys and values, two of each
  static constexpr int kRingOffset = kInRegisters ? 0 : 2 * kQueryBytes;
  static constexpr int kSharedBytes =
      kInRegisters ? (kRingBytes > 2 * kQueryBytes ? kRingBytes : 2 * kQueryBytes)
                   : 2 * kQueryBytes + kRingBytes;
  static_assert(kSharedBytes <= 99 * 1024);
};

template <int kDim>
__global__ void __launch_bounds__(kThreads, 2) query_kernel(const AttentionBackwardArgs args) {
  using S = QueryShape<kDim>;
  const AttentionArgs& forward = args.forward;
  const int heads = static_cast<int>(forward.heads);
  // Backwards: the last parts of a sequence see the most keys.
  const Task task(forward, static_cast<unsigned>(heads), gridDim.x - 1 - blockIdx.x, S::kRows);
  if (!task.exists()) return;
  const Rows rows(args, task, kDim);
  const int kv_offset = task.head / group_of(forward) * kDim;

  std::byte* const shared = shared_memory();
  std::byte* const ring = shared + S::kRingOffset;
  const auto copy_keys_async = [&](int tile) {
    const int key = tile * S::kKeys;
    const int64_t offset = static_cast<int64_t>(key) * rows.stride + kv_offset;
    std::byte* to = ring + tile % 2 * 2 * S::kKeyTileBytes;
    copy_rows_async<kDim, S::kKeys>(rows.k + offset, rows.stride, task.length - key, to);
    copy_rows_async<kDim, S::kKeys>(rows.v + offset, rows.stride, task.length - key,
                                    to + S::kKeyTileBytes);
    ptx::cp_async_commit();
  };

  const BlockOffsets<kDim> offsets;
  const int warp_row = warp_index() * S::kWarpRows;
  std::byte* const warp_queries = shared + warp_row * Layout<kDim>::kRowBytes;
  copy_rows_async<kDim, S::kRows>(
      rows.q + static_cast<int64_t>(task.first_row) * rows.stride + task.head * kDim, rows.stride,
      task.length - task.first_row, shared);
  copy_rows_async<kDim, S::kRows>(
      rows.dout + static_cast<int64_t>(task.first_row) * rows.dout_stride + task.head * kDim,
      rows.dout_stride, task.length - task.first_row, shared + S::kQueryBytes);
  if constexpr (S::kInRegisters) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  const LeftOperand<kDim, S::kRowTiles, S::kInRegisters> queries(warp_queries, offsets);
  const LeftOperand<kDim, S::kRowTiles, S::kInRegisters> douts(warp_queries + S::kQueryBytes,
                                                               offsets);
  if constexpr (S::kInRegisters) __syncthreads();
  copy_keys_async(0);

  const int first_row = task.first_row + warp_row;
  const int last_row = first_row + S::kWarpRows - 1;
  const int lane_row = first_row + lane_index() / 4;
  float references[S::kRowTiles][2];  // binary logarithms
  float deltas[S::kRowTiles][2];
#pragma unroll
  for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_row + 16 * t + 8 * i;
      const int64_t index = task.head * forward.tokens + row;
      references[t][i] = row < task.length ? rows.log_sum_exp[index] * kLog2E : 0;
      deltas[t][i] = row < task.length ? rows.delta[index] : 0;
    }
  }
  const int end = std::min(task.first_row + S::kRows, task.length);
  const int tiles = (end + S::kKeys - 1) / S::kKeys;
  const float scale = forward.scale * kLog2E;
  Sums<S::kRowTiles, kDim> dq;
  clear(dq);

  for (int tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // the tile is there, and nobody reads the one before it any more
    if (tile + 1 < tiles) copy_keys_async(tile + 1);

#pragma unroll 1
    for (int step = 0; step < S::kKeys; step += S::kStepKeys) {
      const int first_key = tile * S::kKeys + step;
      if (first_key > last_row) break;
      const std::byte* keys =
          ring + tile % 2 * 2 * S::kKeyTileBytes + step * Layout<kDim>::kRowBytes;
      float probabilities[S::kRowTiles][S::kStepKeys / 8][4];
      float gradients[S::kRowTiles][S::kStepKeys / 8][4];
      multiply_transposed(queries, keys, offsets, probabilities);
      multiply_transposed(douts, keys + S::kKeyTileBytes, offsets, gradients);
      const bool masked = first_key + S::kStepKeys > first_row + 1;
#pragma unroll
      for (int t = 0; t < S::kRowTiles; ++t) {
#pragma unroll
        for (int n = 0; n < S::kStepKeys / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float probability =
                ptx::exp2_approx(fmaf(probabilities[t][n][i], scale, -references[t][i / 2]));
            const int key = first_key + 8 * n + lane_index() % 4 * 2 + i % 2;
            gradients[t][n][i] = masked && key > lane_row + 16 * t + i / 2 * 8
                                     ? 0
                                     : probability * (gradients[t][n][i] - deltas[t][i / 2]);
          }
        }
      }
      Rounded<S::kRowTiles, S::kStepKeys> rounded;
      round(gradients, rounded);
      multiply_add<kDim>(rounded, keys, offsets, dq);
    }
  }

  if constexpr (S::kInRegisters) __syncthreads();  // the ring becomes the warps' own rows
  float factors[S::kRowTiles][2];
#pragma unroll
  for (int t = 0; t < S::kRowTiles; ++t) factors[t][0] = factors[t][1] = forward.scale;
  store_rows<kDim>(dq, factors, warp_queries, task.length - first_row,
                   static_cast<Bf16*>(args.dq) + (task.first_token + first_row) * args.dqkv_stride +
                       task.head * kDim,
                   args.dqkv_stride);
}

template <int kDim, bool kDk, bool kDv>
void launch_keys(const AttentionBackwardArgs& args, StreamHandle stream) {
  using S = KeyShape<kDim, kDk, kDv>;
  const AttentionArgs& forward = args.forward;
  launch("attention backward (keys)", key_kernel<kDim, kDk, kDv>,
         grid_size(parts_of(forward, S::kRows) * forward.kv_heads, 1), kThreads, S::kSharedBytes,
         stream, args);
}

template <int kDim>
void launch_fast(const AttentionBackwardArgs& args, StreamHandle stream) {
  const AttentionArgs& forward = args.forward;
  launch("attention backward (delta)", delta_kernel,
         grid_size(forward.tokens * forward.heads, kDeltaThreads / kDeltaLanes), kDeltaThreads, 0,
         stream, args);
  if constexpr (kDim == 256) {
    launch_keys<kDim, true, false>(args, stream);
    launch_keys<kDim, false, true>(args, stream);
  } else {
    launch_keys<kDim, true, true>(args, stream);
  }
  using S = QueryShape<kDim>;
  launch("attention backward (queries)", query_kernel<kDim>,
         grid_size(parts_of(forward, S::kRows) * forward.heads, 1), kThreads, S::kSharedBytes,
         stream, args);
}

}  // namespace

void attention_backward(const AttentionBackwardArgs& args, StreamHandle stream) {
  const AttentionArgs& forward = args.forward;
  check(forward);
  STRATA_CHECK(args.dqkv_stride >= forward.heads * forward.head_dim || forward.tokens <= 1,
               "attention: rows of gradients must not overlap");
  if (is_empty(forward)) return;
  if (!is_fast(forward) || args.dqkv_stride % 8 != 0 ||
      !are_aligned(args.dout, args.dq, args.dk, args.dv)) {
    return plain_attention_backward(args, stream);
  }
  switch (forward.head_dim) {
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
