// Softmax cross-entropy, loss and gradient. Bytes a logit in bf16: 10 at most: read, read again,
// gradient written. A block of 1024 threads has the multiprocessor to itself, so that as few rows
// as possible are under way and the second reading finds what it can in the L2 cache (128 rows of
// 128k logits are 64 MiB). A thread has 4 loads of 16 bytes in flight, a block 64 KiB.
//
// The gradient may lie over the logits. An element of it never begins behind its logit, so a block
// reads a stretch of its row, waits for all of its threads, and writes the gradients of the
// stretch. Where rows of gradients are packed more tightly than rows of logits they also overwrite
// earlier rows: these launches go in waves of rows that can overwrite nothing but rows of earlier
// waves.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gpu/cross_entropy_place.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr int kPiecesOfThread = 4;
constexpr int kSlots = kMaxThreads / kWarp;
constexpr size_t kSharedBytes = kSlots * (sizeof(double) + sizeof(float));
constexpr float kMinusInfinity = -__builtin_huge_valf();

/// What logits are taken relative to: their maximum, or 0 while all are minus infinity.
__device__ __forceinline__ float shift_of(float max) { return max == kMinusInfinity ? 0.0F : max; }

/// The largest of a thread's logits so far, and the sum of exp(logit - shift_of(max)).
struct Partial {
  float max = kMinusInfinity;
  float sum = 0;
};

template <int n>
__device__ __forceinline__ void include(Partial& partial, const Floats<n>& logits) {
  float max = partial.max;
#pragma unroll
  for (int j = 0; j < n; ++j) max = fmaxf(max, logits[j]);
  const float shift = shift_of(max);
  if (max > partial.max) partial.sum *= expf(partial.max - shift);
  partial.max = max;
#pragma unroll
  for (int j = 0; j < n; ++j) partial.sum += expf(logits[j] - shift);
}

/// A block a row from first_row on, n logits at a time. Leaves each row's loss in `losses`.
template <class T, int n>
__global__ void __launch_bounds__(kMaxThreads)
    cross_entropy_rows(CrossEntropyArgs args, int64_t first_row, double* losses) {
  const int64_t row = first_row + blockIdx.x;
  const float* logits = args.logits + row * args.logits_stride;
  T* dlogits =
      args.dlogits == nullptr ? nullptr : static_cast<T*>(args.dlogits) + row * args.dlogits_stride;
  const int32_t target = args.targets[row];
  const auto thread = static_cast<int64_t>(threadIdx.x);
  const auto threads = static_cast<int64_t>(blockDim.x);
  const int64_t pieces = args.vocabulary / n;
  const int64_t stretch = threads * kPiecesOfThread;
  const int64_t last = pieces * n + thread;  // of the fewer than n logits after the last piece

  if (target < 0) {
    if (thread == 0) losses[row] = 0;
    if (dlogits == nullptr) return;
    for (int64_t piece = thread; piece < pieces; piece += threads) {
      store_floats(dlogits + piece * n, Floats<n>{});
    }
    if (last < args.vocabulary) store_floats(dlogits + last, Floats<1>{});
    return;
  }
  if (target >= args.vocabulary) {
    ptx::trap();
    return;
  }
  const float target_logit = logits[target];

  Partial partial;
  for (int64_t first = thread; first < pieces; first += stretch) {
    Packed<float, n> kept[kPiecesOfThread];
#pragma unroll
    for (int k = 0; k < kPiecesOfThread; ++k) {
      const int64_t piece = first + k * threads;
      if (piece < pieces) kept[k] = load<n>(logits + piece * n);
    }
#pragma unroll
    for (int k = 0; k < kPiecesOfThread; ++k) {
      if (first + k * threads < pieces) include(partial, unpack(kept[k]));
    }
  }
  if (last < args.vocabulary) include(partial, load_floats<1>(logits + last));

  auto* sums = reinterpret_cast<double*>(shared_memory());
  auto* maxima = reinterpret_cast<float*>(sums + kSlots);
  const float shift = shift_of(block_max(partial.max, maxima));
  // NaN rather than 0 where the sum is NaN: a maximum does not show NaNs.
  const double scaled =
      static_cast<double>(partial.sum) * static_cast<double>(expf(shift_of(partial.max) - shift));
  const double sum = block_sum(scaled, sums);
  if (thread == 0) {
    losses[row] = log(sum) - (static_cast<double>(target_logit) - static_cast<double>(shift));
  }
  if (dlogits == nullptr) return;

  const float scale = args.gradient_scale;
  const auto factor = static_cast<float>(static_cast<double>(scale) / sum);
  const auto gradient = [&](float logit, int64_t i) {
    const float softmax = expf(logit - shift) * factor;
    return i == target ? softmax - scale : softmax;
  };
  for (int64_t begin = 0; begin < pieces; begin += stretch) {
    Packed<float, n> kept[kPiecesOfThread];
#pragma unroll
    for (int k = 0; k < kPiecesOfThread; ++k) {
      const int64_t piece = begin + thread + k * threads;
      if (piece < pieces) kept[k] = load<n>(logits + piece * n);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kPiecesOfThread; ++k) {
      const int64_t piece = begin + thread + k * threads;
      if (piece < pieces) {
        Floats<n> out = unpack(kept[k]);
#pragma unroll
        for (int j = 0; j < n; ++j) out[j] = gradient(out[j], piece * n + j);
        store_floats(dlogits + piece * n, out);
      }
    }
  }
  const float last_logit = last < args.vocabulary ? logits[last] : 0;
  __syncthreads();
  if (last < args.vocabulary) store_floats(dlogits + last, Floats<1>{gradient(last_logit, last)});
}

constexpr unsigned kSumThreads = 256;

/// *loss_sum += the losses in order, by one thread; the others fetch them.
__global__ void __launch_bounds__(kSumThreads)
    add_losses(const double* losses, int64_t rows, double* loss_sum) {
  auto* tile = reinterpret_cast<double*>(shared_memory());
  double sum = 0;
  if (threadIdx.x == 0) sum = *loss_sum;
  for (int64_t begin = 0; begin < rows; begin += kSumThreads) {
    const int64_t row = begin + threadIdx.x;
    tile[threadIdx.x] = row < rows ? losses[row] : 0;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 8
      for (unsigned i = 0; i < kSumThreads; ++i) sum += tile[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss_sum = sum;
}

/// The end of the wave that begins at row `begin`: the rows up to there write nothing but their own
/// row's logits and those of rows before `begin`.
int64_t end_of_wave(const CrossEntropyArgs& args, DlogitsPlace place, int64_t begin) {
  if (place != DlogitsPlace::kPacked) return args.rows;
  const auto size = static_cast<int64_t>(size_of(args.dtype));
  const int64_t logits_bytes = args.logits_stride * int64_t{sizeof(float)};
  const int64_t dlogits_bytes = args.dlogits_stride * size;
  const int64_t free_bytes = begin * logits_bytes - args.vocabulary * size;
  if (free_bytes < 0) return begin + 1;
  return std::clamp(free_bytes / dlogits_bytes + 1, begin + 1, args.rows);
}

template <class T, int n>
void launch_rows(const CrossEntropyArgs& args, DlogitsPlace place, StreamHandle stream) {
  const unsigned threads =
      threads_for((args.vocabulary / n + kPiecesOfThread - 1) / kPiecesOfThread, kMaxThreads);
  for (int64_t begin = 0; begin < args.rows;) {
    const int64_t end = end_of_wave(args, place, begin);
    launch("cross_entropy", cross_entropy_rows<T, n>, grid_size(end - begin, 1), threads,
           kSharedBytes, stream, args, begin, static_cast<double*>(args.scratch));
    begin = end;
  }
  launch("cross_entropy", add_losses, 1, kSumThreads, kSumThreads * sizeof(double), stream,
         static_cast<const double*>(args.scratch), args.rows, args.loss_sum);
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args, StreamHandle stream) {
  STRATA_CHECK(args.rows >= 0 && args.vocabulary >= 0, "sizes of an operator must not be negative");
  STRATA_CHECK(
      args.rows == 0 || (args.logits_stride >= args.vocabulary &&
                         (args.dlogits == nullptr || args.dlogits_stride >= args.vocabulary)),
      "a row stride must be at least the row's length");
  const DlogitsPlace place = dlogits_place(args);
  if (args.rows == 0) return;
  const bool pieces = args.logits_stride % 4 == 0 && args.dlogits_stride % 4 == 0 &&
                      are_aligned(args.logits, args.dlogits);
  if (args.dtype == DType::kBf16) {
    return pieces ? launch_rows<Bf16, 4>(args, place, stream)
                  : launch_rows<Bf16, 1>(args, place, stream);
  }
  return pieces ? launch_rows<float, 4>(args, place, stream)
                : launch_rows<float, 1>(args, place, stream);
}

}  // namespace strata::gpu::cuda
