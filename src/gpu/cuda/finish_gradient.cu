// The end of a gradient's accumulation. Bytes an element in bf16: 6 (accumulated read, gradient
// written); a thread has 4 loads of 16 bytes in flight.
//
// The sum of squares is that of cpu_adam::sum_of_squares to the bit: at most 256 parts, in each 16
// lanes that add every 16th element in order. A block takes a part. Its warps 1 to 8 fetch, round
// and store the next 4096 elements and leave the rounded values in shared memory while 16 lanes of
// warp 0 add up the last ones: one fused multiply-add in double for each 16 elements, whose latency
// bounds the kernel. Estimated: at 256 parts and 16 cycles 450 G elements/s on a device of 1.75
// GHz, at 50 cycles (where double is slow) 200 G; memory of 1 TB/s brings 170 G, of 4.8 TB/s 800 G.
#include "base/error.h"
#include "cpu_adam/reduction.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr int kLanes = static_cast<int>(cpu_adam::kSumLanes);
constexpr int kParts = static_cast<int>(cpu_adam::kMaxSumParts);
constexpr int kWorkers = 256;
constexpr int kThreads = kWorkers + kWarp;
constexpr int kGroupsOfThread = 2;
constexpr int kTile = kWorkers * kGroupsOfThread * kGroup;
constexpr size_t kSharedBytes = 2 * kTile * sizeof(float);

/// Rounds and stores elements [begin, begin + kTile) of the gradient as far as `end`, and leaves
/// their values in `tile`.
template <class T>
__device__ __forceinline__ void finish_tile(const FinishGradientArgs& args, bool aligned,
                                            int64_t begin, int64_t end, int worker, float* tile) {
  T* gradient = static_cast<T*>(args.gradient);
  if (aligned && begin + kTile <= end) {
    Packed<float, kGroup> kept[kGroupsOfThread];
#pragma unroll
    for (int k = 0; k < kGroupsOfThread; ++k) {
      kept[k] = load<kGroup>(args.accumulated + begin + (k * kWorkers + worker) * kGroup);
    }
#pragma unroll
    for (int k = 0; k < kGroupsOfThread; ++k) {
      const int at = (k * kWorkers + worker) * kGroup;
      const Packed<T, kGroup> rounded = pack<T>(unpack(kept[k]));
      store(gradient + begin + at, rounded);
      const Floats<kGroup> values = unpack(rounded);
      auto* to = reinterpret_cast<float4*>(tile + at);
      to[0] = float4{values[0], values[1], values[2], values[3]};
      to[1] = float4{values[4], values[5], values[6], values[7]};
    }
    return;
  }
  for (int at = worker; at < kTile && begin + at < end; at += kWorkers) {
    const Packed<T, 1> rounded = pack<T>(load_floats<1>(args.accumulated + begin + at));
    store(gradient + begin + at, rounded);
    tile[at] = unpack(rounded)[0];
  }
}

/// A block a part of `part` elements (the last may be shorter).
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_parts(FinishGradientArgs args, int64_t part, bool aligned) {
  auto* tiles = reinterpret_cast<float*>(shared_memory());
  const int64_t begin = blockIdx.x * part;
  const int64_t end = begin + part < args.count ? begin + part : args.count;
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t count = (end - begin + kTile - 1) / kTile;

  double sum = 0;
  for (int64_t i = 0; i <= count; ++i) {
    if (thread >= kWarp && i < count) {
      finish_tile<T>(args, aligned, begin + i * kTile, end, thread - kWarp, tiles + i % 2 * kTile);
    }
    if (thread < kLanes && i > 0) {
      const float* tile = tiles + (i - 1) % 2 * kTile;
      const int64_t left = end - begin - (i - 1) * kTile;
      const int elements = left < kTile ? static_cast<int>(left) : kTile;
#pragma unroll 16
      for (int at = thread; at < elements; at += kLanes) {
        const auto x = static_cast<double>(tile[at]);
        // The square of a float is exact in double, so fused or not this is the same.
        sum = fma(x, x, sum);
      }
    }
    __syncthreads();
  }
  if (thread >= kWarp) return;
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) sum += ptx::shuffle_down(sum, half);
  if (thread == 0) static_cast<double*>(args.scratch)[blockIdx.x] = sum;
}

/// The parts' sums by halves, zero for those that there are not.
__global__ void __launch_bounds__(kParts)
    add_parts(const double* sums, int64_t parts, double* sum_of_squares) {
  auto* values = reinterpret_cast<double*>(shared_memory());
  const int thread = static_cast<int>(threadIdx.x);
  values[thread] = thread < parts ? sums[thread] : 0;
  __syncthreads();
  for (int half = kParts / 2; half > 0; half /= 2) {
    if (thread < half) values[thread] += values[thread + half];
    __syncthreads();
  }
  if (thread == 0) *sum_of_squares = values[0];
}

}  // namespace

void finish_gradient(const FinishGradientArgs& args, StreamHandle stream) {
  STRATA_CHECK(args.count >= 0, "sizes of an operator must not be negative");
  constexpr const char* kName = "finish_gradient";
  const int64_t part = cpu_adam::sum_part_elements(args.count);
  const unsigned parts = grid_size(args.count, part);
  launch(kName, args.gradient_dtype == DType::kBf16 ? finish_parts<Bf16> : finish_parts<float>,
         parts, kThreads, kSharedBytes, stream, args, part,
         part % kGroup == 0 && are_aligned(args.accumulated, args.gradient));
  launch(kName, add_parts, 1, kParts, kParts * sizeof(double), stream,
         static_cast<const double*>(args.scratch), parts, args.sum_of_squares);
}

}  // namespace strata::gpu::cuda
