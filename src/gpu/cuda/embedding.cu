// Embedding. Bytes an element in bf16: forward 4 (weight read, out written), a thread with 4 loads
// of 16 bytes in flight. Backward 2 (dout) and, for each distinct token, 8 an element of its row
// (dweight in fp32, read and written); a thread reads 8 rows of a token ahead (8 loads of 16
// bytes).
//
// The backward pass adds the rows of one token in the order of t and without atomics: the keys
// (token, t) are sorted, first in tiles by counting smaller keys, then by merging 8 sorted runs at
// a time, where a key's place is the sum of its ranks in the runs. All keys differ, so there is one
// order. The block at the first key of a token then adds up that token's rows. Sorting 8192 tokens
// takes 3 launches, 65536 tokens 4.
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kThreads = 128;

// Forward

constexpr int kPiecesOfThread = 4;

/// Copies rows, n elements at a time; `blocks` make up a row.
template <class T, int n>
__global__ void __launch_bounds__(kThreads) gather_rows(EmbeddingArgs args, unsigned blocks) {
  const int64_t row = blockIdx.x / blocks;
  const int64_t first =
      (int64_t{blockIdx.x % blocks} * kPiecesOfThread * blockDim.x + threadIdx.x) * n;
  const int64_t step = int64_t{blockDim.x} * n;
  const int32_t token = args.tokens[row];
  if (token < 0 || token >= args.vocabulary) {
    ptx::trap();
    return;
  }
  const T* from = static_cast<const T*>(args.weight) + token * args.width;
  T* to = static_cast<T*>(args.out) + row * args.width;

  Packed<T, n> kept[kPiecesOfThread] = {};
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = first + k * step;
    if (i < args.width) kept[k] = load<n>(from + i);
  }
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = first + k * step;
    if (i < args.width) store(to + i, kept[k]);
  }
}

template <class T, int n>
void launch_gather(const EmbeddingArgs& args, StreamHandle stream) {
  const int64_t pieces = args.width / n;
  const unsigned threads = threads_for((pieces + kPiecesOfThread - 1) / kPiecesOfThread, kThreads);
  const unsigned blocks = grid_size(pieces, int64_t{threads} * kPiecesOfThread);
  launch("embedding", gather_rows<T, n>, grid_size(args.rows * blocks, 1), threads, 0, stream, args,
         blocks);
}

// Backward

/// Keys of a sorted tile, one a thread.
constexpr int kTile = 512;
/// Runs that are merged into one.
constexpr int kRuns = 8;

/// Sorted by token, then by t.
__device__ __forceinline__ uint64_t key_of(int32_t token, int64_t t) {
  return uint64_t{static_cast<uint32_t>(token)} << 32 | static_cast<uint64_t>(t);
}

__device__ __forceinline__ int32_t token_of(uint64_t key) {
  return static_cast<int32_t>(key >> 32);
}

__device__ __forceinline__ int64_t row_of(uint64_t key) {
  return static_cast<int64_t>(key & 0xffffffffU);
}

__global__ void __launch_bounds__(kTile)
    sort_tiles(const int32_t* tokens, int64_t rows, int64_t vocabulary, uint64_t* sorted) {
  auto* tile = reinterpret_cast<uint64_t*>(shared_memory());
  const int64_t begin = int64_t{blockIdx.x} * kTile;
  const int64_t t = begin + threadIdx.x;
  uint64_t key = UINT64_MAX;
  if (t < rows) {
    const int32_t token = tokens[t];
    if (token < 0 || token >= vocabulary) ptx::trap();
    key = key_of(token, t);
  }
  tile[threadIdx.x] = key;
  __syncthreads();
  if (t >= rows) return;
  int smaller = 0;
#pragma unroll 8
  for (int i = 0; i < kTile; ++i) smaller += tile[i] < key ? 1 : 0;
  sorted[begin + smaller] = key;
}

/// How many of the `count` sorted keys are smaller.
__device__ __forceinline__ int64_t rank(const uint64_t* keys, int64_t count, uint64_t key) {
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Merges each kRuns runs of `run` keys (the last may be shorter) into one.
__global__ void __launch_bounds__(kThreads)
    merge_runs(const uint64_t* keys, int64_t rows, int64_t run, uint64_t* merged) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows) return;
  const uint64_t key = keys[i];
  const int64_t begin = i / (run * kRuns) * (run * kRuns);
  const int64_t own = i / run * run;
  int64_t place = i - own;
  for (int k = 0; k < kRuns; ++k) {
    const int64_t other = begin + k * run;
    if (other == own || other >= rows) continue;
    place += rank(keys + other, rows - other < run ? rows - other : run, key);
  }
  merged[begin + place] = key;
}

/// n columns of the sum of a token's rows, by the block at the token's first key.
template <class T, int n>
__global__ void __launch_bounds__(kThreads)
    add_rows(EmbeddingBackwardArgs args, const uint64_t* sorted, unsigned blocks) {
  constexpr int kAhead = 8;
  const int64_t first = blockIdx.x / blocks;
  const int64_t column = (int64_t{blockIdx.x % blocks} * blockDim.x + threadIdx.x) * n;
  const int32_t token = token_of(sorted[first]);
  if (first > 0 && token_of(sorted[first - 1]) == token) return;
  if (column >= args.width) return;
  const T* dout = static_cast<const T*>(args.dout) + column;
  float* to = args.dweight + token * args.width + column;

  Floats<n> sum = load_floats<n>(to);
  int64_t next = first;
  bool more = true;
  while (more) {
    Packed<T, n> ahead[kAhead] = {};
    int count = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      more = more && next + k < args.rows && token_of(sorted[next + k]) == token;
      if (more) {
        ahead[k] = load<n>(dout + row_of(sorted[next + k]) * args.width);
        count = k + 1;
      }
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (k < count) {
        const Floats<n> row = unpack(ahead[k]);
#pragma unroll
        for (int j = 0; j < n; ++j) sum[j] += row[j];
      }
    }
    next += kAhead;
  }
  store_floats(to, sum);
}

template <class T, int n>
void launch_add_rows(const EmbeddingBackwardArgs& args, const uint64_t* sorted,
                     StreamHandle stream) {
  const int64_t pieces = args.width / n;
  const unsigned threads = threads_for(pieces, kThreads);
  const unsigned blocks = grid_size(pieces, threads);
  launch("embedding_backward", add_rows<T, n>, grid_size(args.rows * blocks, 1), threads, 0, stream,
         args, sorted, blocks);
}

/// The sorted keys, in one of the two halves of the scratch.
const uint64_t* sort_tokens(const EmbeddingBackwardArgs& args, StreamHandle stream) {
  constexpr const char* kName = "embedding_backward";
  auto* keys = static_cast<uint64_t*>(args.scratch);
  uint64_t* other = keys + args.rows;
  launch(kName, sort_tiles, grid_size(args.rows, kTile), kTile, kTile * sizeof(uint64_t), stream,
         args.tokens, args.rows, args.vocabulary, keys);
  for (int64_t run = kTile; run < args.rows; run *= kRuns) {
    launch(kName, merge_runs, grid_size(args.rows, kThreads), kThreads, 0, stream,
           static_cast<const uint64_t*>(keys), args.rows, run, other);
    std::swap(keys, other);
  }
  return keys;
}

constexpr int kFloatsOfThread = 16;

__global__ void __launch_bounds__(kThreads)
    fill_zero(float* floats, int64_t count, int64_t pieces) {
  const int64_t first = int64_t{blockIdx.x} * kFloatsOfThread * kThreads;
#pragma unroll
  for (int k = 0; k < kFloatsOfThread / 4; ++k) {
    const int64_t piece = first / 4 + k * int64_t{kThreads} + threadIdx.x;
    if (piece < pieces) ptx::store_16(floats + piece * 4, uint4{0, 0, 0, 0});
  }
  for (int64_t i = pieces * 4 + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    floats[i] = 0;
  }
}

void check(int64_t rows, int64_t width, int64_t vocabulary) {
  STRATA_CHECK(rows >= 0 && width >= 0 && vocabulary >= 0,
               "sizes of an operator must not be negative");
  STRATA_CHECK(rows <= UINT32_MAX, "more rows than an embedding can number");
}

}  // namespace

void embedding(const EmbeddingArgs& args, StreamHandle stream) {
  check(args.rows, args.width, args.vocabulary);
  if (args.width == 0) return;
  const bool grouped = args.width % kGroup == 0 && are_aligned(args.weight, args.out);
  if (args.dtype == DType::kBf16) {
    return grouped ? launch_gather<Bf16, kGroup>(args, stream)
                   : launch_gather<Bf16, 1>(args, stream);
  }
  return grouped ? launch_gather<float, kGroup>(args, stream)
                 : launch_gather<float, 1>(args, stream);
}

void embedding_backward(const EmbeddingBackwardArgs& args, StreamHandle stream) {
  check(args.rows, args.width, args.vocabulary);
  if (args.width == 0) return;
  if (!args.accumulate) {
    const int64_t count = args.vocabulary * args.width;
    launch("embedding_backward", fill_zero, grid_size(count, kThreads * kFloatsOfThread), kThreads,
           0, stream, args.dweight, count, are_aligned(args.dweight) ? count / 4 : 0);
  }
  if (args.rows == 0) return;
  const uint64_t* sorted = sort_tokens(args, stream);
  const bool grouped = args.width % kGroup == 0 && are_aligned(args.dout, args.dweight);
  if (args.dtype == DType::kBf16) {
    return grouped ? launch_add_rows<Bf16, kGroup>(args, sorted, stream)
                   : launch_add_rows<Bf16, 1>(args, sorted, stream);
  }
  return grouped ? launch_add_rows<float, kGroup>(args, sorted, stream)
                 : launch_add_rows<float, 1>(args, sorted, stream);
}

}  // namespace strata::gpu::cuda
