// What the kernels of flash attention are made of: bf16 tiles in shared memory, and products of
// 16-row fragments with them.
//
// A tile is rows of kDim elements. Its 16-byte chunks are permuted within a row by an XOR with bits
// of the row's number, such that the eight rows that one phase of ldmatrix reads (and the eight
// chunks of a row that one phase of a copy writes) lie in different banks.
//
// Fragments are arrays of registers, so every loop over them is unrolled. The four floats of a
// lane in a 16x8 block of sums are, as ptx.cuh says, columns 2 quad and 2 quad + 1 of row `group`,
// then of row group + 8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bf16.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/ptx.cuh"
#include "gpu/cuda/reductions.cuh"

namespace strata::gpu::cuda::flash {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
inline constexpr float kLog2E = 1.44269504088896341F;
inline constexpr float kLn2 = 0.693147180559945309F;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarp; }

template <int kDim>
struct Layout {
  static_assert(kDim % 32 == 0, "chunks are permuted in fours or eights");
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kChunks = kDim / 8;
  // Rows of a multiple of 128 bytes all start at bank 0: the rows of a phase need eight chunks.
  // Rows of 192 bytes start at banks 0 and 16 in turn: pairs of rows, four.
  static constexpr int kPeriod = kChunks % 8 == 0 ? 8 : 4;

  __device__ static __forceinline__ int offset(int row, int chunk) {
    const int mask = kPeriod == 8 ? row & 7 : (row >> 1) & 3;
    return row * kRowBytes + ((chunk ^ mask) << 4);
  }
};

/// Where a lane of an ldmatrix points: one row of a tile, and a chunk out of each pair of chunks.
/// What the unrolled loops add is constant, so it costs no register and no instruction.
template <int kDim>
class LaneOffsets {
 public:
  __device__ __forceinline__ LaneOffsets(int row, int half) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) steps_[i] = Layout<kDim>::offset(row, 2 * i + half);
  }
  /// Of the 16 columns from 16 * step on, in rows first_row (a multiple of 16) and following.
  __device__ __forceinline__ int at(int first_row, int step) const {
    return steps_[step % kSteps] + first_row * Layout<kDim>::kRowBytes +
           step / kSteps * kSteps * 32;
  }

 private:
  static constexpr int kSteps = Layout<kDim>::kPeriod / 2;
  int steps_[kSteps];
};

/// The two ways in which ldmatrix_x4 takes a 16x16 block of a tile.
template <int kDim>
struct BlockOffsets {
  /// Quarters in the order upper left, lower left, upper right, lower right: a left operand, or,
  /// transposed by the load, two right operands side by side.
  LaneOffsets<kDim> by_column{lane_index() % 16, lane_index() / 16};
  /// Upper left, upper right, lower left, lower right: two right operands, which are the transposes
  /// of the upper and the lower half.
  LaneOffsets<kDim> by_row{lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2};
};

/// Begins to copy the first `valid_rows` of kRows rows to a tile, and zeros for the others. All
/// threads of the block take part. A thread's copies differ by constants and by multiples of the
/// stride, so that little is kept in registers between two calls.
template <int kDim, int kRows>
__device__ __forceinline__ void copy_rows_async(const Bf16* rows, int stride, int valid_rows,
                                                std::byte* tile) {
  constexpr int kLanes = Layout<kDim>::kPeriod;  // of a row
  constexpr int kRowsAtOnce = kThreads / kLanes;
  static_assert(kRows % kRowsAtOnce == 0, "all threads copy equally much");
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  std::byte* to = tile + Layout<kDim>::offset(row, lane);
  const Bf16* from = rows + row * stride + lane * 8;
#pragma unroll
  for (int first = 0; first < kRows; first += kRowsAtOnce) {
#pragma unroll
    for (int chunk = 0; chunk < Layout<kDim>::kChunks; chunk += kLanes) {
      ptx::cp_async_16(to + first * Layout<kDim>::kRowBytes + chunk * 16,
                       from + first * stride + chunk * 8, row + first < valid_rows);
    }
  }
}

/// 16 * kRowTiles rows of a tile as the left operand of products over kDim: read once into
/// registers, or from shared memory each time.
template <int kDim, int kRowTiles, bool kInRegisters>
class LeftOperand;

template <int kDim, int kRowTiles>
class LeftOperand<kDim, kRowTiles, true> {
 public:
  __device__ __forceinline__ LeftOperand(const std::byte* tile, const BlockOffsets<kDim>& offsets) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        ptx::ldmatrix_x4(fragments_[step][t], tile + offsets.by_column.at(16 * t, step));
      }
    }
  }
  __device__ __forceinline__ void load(int step, uint32_t (&fragments)[kRowTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) fragments[t][i] = fragments_[step][t][i];
    }
  }

 private:
  uint32_t fragments_[kDim / 16][kRowTiles][4];
};

template <int kDim, int kRowTiles>
class LeftOperand<kDim, kRowTiles, false> {
 public:
  __device__ __forceinline__ LeftOperand(const std::byte* tile, const BlockOffsets<kDim>& offsets)
      : tile_(tile), offsets_(offsets.by_column) {}
  __device__ __forceinline__ void load(int step, uint32_t (&fragments)[kRowTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      ptx::ldmatrix_x4(fragments[t], tile_ + offsets_.at(16 * t, step));
    }
  }

 private:
  const std::byte* tile_;
  LaneOffsets<kDim> offsets_;
};

/// The sums of 16 * kRowTiles rows and kColumns columns.
template <int kRowTiles, int kColumns>
using Sums = float[kRowTiles][kColumns / 8][4];

/// The same, rounded to bf16 as the left operand of a product over kColumns.
template <int kRowTiles, int kColumns>
using Rounded = uint32_t[kRowTiles][kColumns / 16][4];

template <int kRowTiles, int kBlocks>
__device__ __forceinline__ void clear(float (&sums)[kRowTiles][kBlocks][4]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][n][i] = 0;
    }
  }
}

template <int kRowTiles, int kBlocks, int kSteps>
__device__ __forceinline__ void round(const float (&sums)[kRowTiles][kBlocks][4],
                                      uint32_t (&rounded)[kRowTiles][kSteps][4]) {
  static_assert(kBlocks == 2 * kSteps);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      rounded[t][n / 2][n % 2 * 2] = ptx::pack_bf16(sums[t][n][0], sums[t][n][1]);
      rounded[t][n / 2][n % 2 * 2 + 1] = ptx::pack_bf16(sums[t][n][2], sums[t][n][3]);
    }
  }
}

/// sums[.., 16 * pair + (0..15)] += left * (two 16x8 right operands).
template <int kRowTiles, int kBlocks>
__device__ __forceinline__ void multiply_pair(float (&sums)[kRowTiles][kBlocks][4], int pair,
                                              const uint32_t (&left)[kRowTiles][4],
                                              const uint32_t (&right)[4]) {
  const uint32_t first[2] = {right[0], right[1]};
  const uint32_t second[2] = {right[2], right[3]};
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
    ptx::mma_m16n8k16_bf16(sums[t][2 * pair], left[t], first);
    ptx::mma_m16n8k16_bf16(sums[t][2 * pair + 1], left[t], second);
  }
}

/// sums = left * tile^T, a column of sums for each row of the tile.
template <int kDim, int kRowTiles, int kBlocks, bool kInRegisters>
__device__ __forceinline__ void multiply_transposed(
    const LeftOperand<kDim, kRowTiles, kInRegisters>& left, const std::byte* tile,
    const BlockOffsets<kDim>& offsets, float (&sums)[kRowTiles][kBlocks][4]) {
  clear(sums);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    uint32_t rows[kRowTiles][4];
    left.load(step, rows);
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) {
      uint32_t columns[4];
      ptx::ldmatrix_x4(columns, tile + offsets.by_row.at(16 * pair, step));
      multiply_pair(sums, pair, rows, columns);
    }
  }
}

/// sums += left * tile, for a tile of 16 * kSteps rows.
template <int kDim, int kRowTiles, int kSteps>
__device__ __forceinline__ void multiply_add(const uint32_t (&left)[kRowTiles][kSteps][4],
                                             const std::byte* tile,
                                             const BlockOffsets<kDim>& offsets,
                                             Sums<kRowTiles, kDim>& sums) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t rows[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[t][i] = left[t][step][i];
    }
#pragma unroll
    for (int pair = 0; pair < kDim / 16; ++pair) {
      uint32_t columns[4];
      ptx::ldmatrix_x4_trans(columns, tile + offsets.by_column.at(16 * step, pair));
      multiply_pair(sums, pair, rows, columns);
    }
  }
}

/// Writes the first `valid_rows` of a warp's rows of sums, each times its factor, rounded to bf16:
/// by way of `tile`, which is 16 * kRowTiles rows that only this warp uses, for whole 16 bytes.
/// factors[t][i] is of row 16 t + 8 i + group.
template <int kDim, int kRowTiles>
__device__ __forceinline__ void store_rows(const Sums<kRowTiles, kDim>& sums,
                                           const float (&factors)[kRowTiles][2], std::byte* tile,
                                           int valid_rows, Bf16* rows, int64_t stride) {
  constexpr int kChunks = Layout<kDim>::kChunks;
  const int lane = lane_index();
  __syncwarp();
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 16 * t + 8 * i + lane / 4;
#pragma unroll
      for (int n = 0; n < kChunks; ++n) {
        *reinterpret_cast<uint32_t*>(tile + Layout<kDim>::offset(row, n) + lane % 4 * 4) =
            ptx::pack_bf16(sums[t][n][2 * i] * factors[t][i],
                           sums[t][n][2 * i + 1] * factors[t][i]);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * kRowTiles * kChunks / kWarp; ++i) {
    const int row = (lane + i * kWarp) / kChunks;
    const int chunk = (lane + i * kWarp) % kChunks;
    if (row < valid_rows) {
      ptx::store_16(rows + row * stride + chunk * 8,
                    *reinterpret_cast<const uint4*>(tile + Layout<kDim>::offset(row, chunk)));
    }
  }
}

}  // namespace strata::gpu::cuda::flash
