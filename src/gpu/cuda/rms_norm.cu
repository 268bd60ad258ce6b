// RMSNorm. Bytes an element in bf16, with the weight and the partial sums in the L2 cache:
// forward 4 (x read, y written), with the residual's addition 8 (a, b read, sum, y written; add and
// rms_norm are 10), backward 6 or 8 (x, dy, the residual's gradient; dx written).
// A row of up to 8192 elements stays in its block's registers between the sum and the scaling: a
// thread has 4 loads of 16 bytes in flight (with the addition 8, backward 12), a block of 128
// threads at width 4096 8 KiB (16, 24). Wider rows, and those that 16-byte accesses do not fit, are
// read twice: of a residual's addition the sum.
//
// The backward pass of dweight is a tree of two stages: each block adds up a range of rows in
// registers and leaves its sum in scratch, then sum_partials adds the blocks' sums. Ranges depend
// on the shape: as many blocks as 8 MiB of scratch allow, 64 to 1024.
#include <algorithm>

#include "base/error.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"
#include "gpu/cuda/scratch.h"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kMaxThreads = 256;
constexpr int kGroupsOfThread = 4;
constexpr int64_t kMaxWidthInRegisters = kMaxThreads * kGroupsOfThread * kGroup;
/// One value a warp, twice: successive reductions take turns.
constexpr int kSlots = kMaxThreads / kWarp;
constexpr size_t kSharedBytes = 2 * kSlots * sizeof(float);

__device__ __forceinline__ float reciprocal_std(float squares, int64_t width, float epsilon) {
  const float mean = ptx::div_rn(squares, static_cast<float>(width));
  return ptx::div_rn(1.0F, ptx::sqrt_rn(mean + epsilon));
}

template <int n>
__device__ __forceinline__ float sum_of_squares(const Floats<n>& x) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < n; ++j) sum += x[j] * x[j];
  return sum;
}

template <class T, int n>
__device__ __forceinline__ void store_normal(T* y, const Floats<n>& x, const Floats<n>& weight,
                                             float rstd) {
  Floats<n> normal;
#pragma unroll
  for (int j = 0; j < n; ++j) normal[j] = x[j] * rstd * weight[j];
  store_floats(y, normal);
}

/// The sum as it is stored.
template <class T, int n>
__device__ __forceinline__ Packed<T, n> add_packed(const Packed<T, n>& a, const Packed<T, n>& b) {
  Floats<n> sum = unpack(a);
  const Floats<n> added = unpack(b);
#pragma unroll
  for (int j = 0; j < n; ++j) sum[j] += added[j];
  return pack<T>(sum);
}

// Where a row comes from: x, or the sum of a and b, which is stored too. What follows is the same
// code for both, so that the results are the same bits.

/// As many groups of the row as a thread keeps.
template <class T>
using Kept = Packed<T, kGroup>[kGroupsOfThread];

template <class T>
__device__ __forceinline__ void load_row(const RmsNormArgs& args, int64_t offset, int groups,
                                         Kept<T>& kept) {
  const T* x = static_cast<const T*>(args.x) + offset;
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) {
    const int group = k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (group < groups) kept[k] = load<kGroup>(x + group * kGroup);
  }
}

template <class T>
__device__ __forceinline__ void load_row(const ResidualRmsNormArgs& args, int64_t offset,
                                         int groups, Kept<T>& kept) {
  const T* a = static_cast<const T*>(args.a) + offset;
  const T* b = static_cast<const T*>(args.b) + offset;
  T* sum = static_cast<T*>(args.sum) + offset;
  Kept<T> added = {};
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) {
    const int group = k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (group < groups) {
      kept[k] = load<kGroup>(a + group * kGroup);
      added[k] = load<kGroup>(b + group * kGroup);
    }
  }
  // After all loads: the compiler cannot know that a store to sum changes no later a or b.
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) {
    const int group = k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (group < groups) {
      kept[k] = add_packed(kept[k], added[k]);
      store(sum + group * kGroup, kept[k]);
    }
  }
}

template <class T, int n>
__device__ __forceinline__ Floats<n> load_first(const RmsNormArgs& args, int64_t at) {
  return load_floats<n>(static_cast<const T*>(args.x) + at);
}

template <class T, int n>
__device__ __forceinline__ Floats<n> load_first(const ResidualRmsNormArgs& args, int64_t at) {
  const auto sum = add_packed(load<n>(static_cast<const T*>(args.a) + at),
                              load<n>(static_cast<const T*>(args.b) + at));
  store(static_cast<T*>(args.sum) + at, sum);
  return unpack(sum);
}

template <class T>
__device__ __forceinline__ const T* stored_row(const RmsNormArgs& args, int64_t offset) {
  return static_cast<const T*>(args.x) + offset;
}

template <class T>
__device__ __forceinline__ const T* stored_row(const ResidualRmsNormArgs& args, int64_t offset) {
  return static_cast<const T*>(args.sum) + offset;
}

/// A block a row, which it keeps in registers.
template <class T, class Args>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_rows(Args args) {
  const int64_t offset = blockIdx.x * args.width;
  const auto* weight = static_cast<const T*>(args.weight);
  T* y = static_cast<T*>(args.y) + offset;
  const int groups = static_cast<int>(args.width / kGroup);

  Kept<T> kept = {};
  load_row<T>(args, offset, groups, kept);
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) squares += sum_of_squares(unpack(kept[k]));
  squares = block_sum(squares, reinterpret_cast<float*>(shared_memory()));
  const float rstd = reciprocal_std(squares, args.width, args.epsilon);
  if (threadIdx.x == 0) args.rstd[blockIdx.x] = rstd;
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) {
    const int group = k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
    if (group < groups) {
      store_normal(y + group * kGroup, unpack(kept[k]),
                   load_floats<kGroup>(weight + group * kGroup), rstd);
    }
  }
}

/// A block a row of any width, n elements at a time. A thread reads again what it read or stored.
template <class T, int n, class Args>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_wide_rows(Args args) {
  const int64_t offset = blockIdx.x * args.width;
  const auto* weight = static_cast<const T*>(args.weight);
  T* y = static_cast<T*>(args.y) + offset;
  const int64_t first = int64_t{threadIdx.x} * n;
  const int64_t step = int64_t{blockDim.x} * n;

  float squares = 0;
  for (int64_t i = first; i < args.width; i += step) {
    squares += sum_of_squares(load_first<T, n>(args, offset + i));
  }
  squares = block_sum(squares, reinterpret_cast<float*>(shared_memory()));
  const float rstd = reciprocal_std(squares, args.width, args.epsilon);
  if (threadIdx.x == 0) args.rstd[blockIdx.x] = rstd;
  const T* x = stored_row<T>(args, offset);
  for (int64_t i = first; i < args.width; i += step) {
    store_normal(y + i, load_floats<n>(x + i), load_floats<n>(weight + i), rstd);
  }
}

/// Of one row, or as far as a thread has it. With normal = x * rstd and g = dy * weight:
/// dx = rstd * (g - normal * mean(g * normal)) + residual, and dweight = dy * normal.
template <int n>
__device__ __forceinline__ float sum_of_products(const Floats<n>& x, const Floats<n>& weight,
                                                 const Floats<n>& dy) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < n; ++j) sum += dy[j] * weight[j] * x[j];
  return sum;
}

template <int n>
__device__ __forceinline__ Floats<n> gradient(const Floats<n>& x, const Floats<n>& weight,
                                              const Floats<n>& dy, const Floats<n>& residual,
                                              float rstd, float mean, Floats<n>& dweight) {
  Floats<n> dx;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float normal = x[j] * rstd;
    dweight[j] += dy[j] * normal;
    dx[j] = rstd * (dy[j] * weight[j] - normal * mean) + residual[j];
  }
  return dx;
}

/// A block adds up rows [block * block_rows, ...), one after the other, in registers. In bf16 two
/// blocks of 256 threads must fit on a multiprocessor to hide the reductions; for that the weight
/// is read from the L1 cache for each row rather than kept.
template <class T>
__global__ void __launch_bounds__(kMaxThreads, sizeof(T) == 2 ? 2 : 1)
    rms_norm_backward_rows(RmsNormBackwardArgs args, int64_t block_rows) {
  auto* slots = reinterpret_cast<float*>(shared_memory());
  const auto* weight = static_cast<const T*>(args.weight);
  const int groups = static_cast<int>(args.width / kGroup);
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);

  Floats<kGroup> dweight[kGroupsOfThread] = {};
  const int64_t begin = blockIdx.x * block_rows;
  const int64_t end = begin + block_rows < args.rows ? begin + block_rows : args.rows;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    const T* x = static_cast<const T*>(args.x) + offset;
    const T* dy = static_cast<const T*>(args.dy) + offset;
    const auto* residual = static_cast<const T*>(args.residual_gradient);
    T* dx = static_cast<T*>(args.dx) + offset;
    const float rstd = args.rstd[row];

    Packed<T, kGroup> xs[kGroupsOfThread] = {};
    Packed<T, kGroup> dys[kGroupsOfThread] = {};
    Packed<T, kGroup> residuals[kGroupsOfThread] = {};
#pragma unroll
    for (int k = 0; k < kGroupsOfThread; ++k) {
      const int group = k * threads + thread;
      if (group < groups) {
        xs[k] = load<kGroup>(x + group * kGroup);
        dys[k] = load<kGroup>(dy + group * kGroup);
        if (residual != nullptr) residuals[k] = load<kGroup>(residual + offset + group * kGroup);
      }
    }
    float products = 0;
#pragma unroll
    for (int k = 0; k < kGroupsOfThread; ++k) {
      const int group = k * threads + thread;
      if (group < groups) {
        products += sum_of_products(unpack(xs[k]), load_floats<kGroup>(weight + group * kGroup),
                                    unpack(dys[k]));
      }
    }
    products = block_sum(products, slots + (row - begin) % 2 * kSlots);
    const float mean = products * rstd / static_cast<float>(args.width);
#pragma unroll
    for (int k = 0; k < kGroupsOfThread; ++k) {
      const int group = k * threads + thread;
      if (group < groups) {
        store_floats(dx + group * kGroup,
                     gradient(unpack(xs[k]), load_floats<kGroup>(weight + group * kGroup),
                              unpack(dys[k]), unpack(residuals[k]), rstd, mean, dweight[k]));
      }
    }
  }

  float* partial = static_cast<float*>(args.scratch) + blockIdx.x * partial_stride(args.width);
#pragma unroll
  for (int k = 0; k < kGroupsOfThread; ++k) {
    const int group = k * threads + thread;
    if (group < groups) store_floats(partial + group * kGroup, dweight[k]);
  }
}

/// As above for rows of any width; the block's sums lie in its part of the scratch.
template <class T, int n>
__global__ void __launch_bounds__(kMaxThreads)
    rms_norm_backward_wide_rows(RmsNormBackwardArgs args, int64_t block_rows) {
  auto* slots = reinterpret_cast<float*>(shared_memory());
  const auto* weight = static_cast<const T*>(args.weight);
  float* partial = static_cast<float*>(args.scratch) + blockIdx.x * partial_stride(args.width);
  const int64_t first = int64_t{threadIdx.x} * n;
  const int64_t step = int64_t{blockDim.x} * n;

  const int64_t begin = blockIdx.x * block_rows;
  const int64_t end = begin + block_rows < args.rows ? begin + block_rows : args.rows;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    const T* x = static_cast<const T*>(args.x) + offset;
    const T* dy = static_cast<const T*>(args.dy) + offset;
    const auto* residual = static_cast<const T*>(args.residual_gradient);
    T* dx = static_cast<T*>(args.dx) + offset;
    const float rstd = args.rstd[row];

    float products = 0;
    for (int64_t i = first; i < args.width; i += step) {
      products += sum_of_products(load_floats<n>(x + i), load_floats<n>(weight + i),
                                  load_floats<n>(dy + i));
    }
    products = block_sum(products, slots + (row - begin) % 2 * kSlots);
    const float mean = products * rstd / static_cast<float>(args.width);
    for (int64_t i = first; i < args.width; i += step) {
      Floats<n> dweight = {};
      if (row > begin) dweight = load_floats<n>(partial + i);
      Floats<n> old = {};
      if (residual != nullptr) old = load_floats<n>(residual + offset + i);
      store_floats(dx + i, gradient(load_floats<n>(x + i), load_floats<n>(weight + i),
                                    load_floats<n>(dy + i), old, rstd, mean, dweight));
      store_floats(partial + i, dweight);
    }
  }
}

constexpr int kSumColumns = kWarp;
constexpr int kSumRows = 8;

/// dweight[i] (+)= the sum over the blocks of partial[block, i]: a block takes 32 columns, its warp
/// r the rows r, r + 8, ..., and the warps' sums are added in order.
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    sum_partials(const float* partial, int64_t blocks, int64_t width, bool accumulate,
                 float* dweight) {
  auto* sums = reinterpret_cast<float*>(shared_memory());
  const int lane = static_cast<int>(threadIdx.x) % kSumColumns;
  const int warp = static_cast<int>(threadIdx.x) / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + lane;
  const int64_t stride = partial_stride(width);

  float sum = 0;
  if (column < width) {
#pragma unroll 8
    for (int64_t block = warp; block < blocks; block += kSumRows) {
      sum += partial[block * stride + column];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || column >= width) return;
#pragma unroll
  for (int row = 1; row < kSumRows; ++row) sum += sums[row * kSumColumns + lane];
  dweight[column] = accumulate ? dweight[column] + sum : sum;
}

void check(int64_t rows, int64_t width) {
  STRATA_CHECK(rows >= 0 && width >= 0, "sizes of an operator must not be negative");
}

/// The order of a row's sum follows from its width and from `aligned`.
template <class T, class Args>
void launch_forward(const char* name, const Args& args, bool aligned, StreamHandle stream) {
  const bool grouped = args.width % kGroup == 0 && aligned;
  const auto run = [&](auto kernel, int64_t items) {
    launch(name, kernel, grid_size(args.rows, 1), threads_for(items, kMaxThreads), kSharedBytes,
           stream, args);
  };
  if (!grouped) return run(rms_norm_wide_rows<T, 1, Args>, args.width);
  const int64_t groups = args.width / kGroup;
  if (args.width > kMaxWidthInRegisters) return run(rms_norm_wide_rows<T, kGroup, Args>, groups);
  run(rms_norm_rows<T, Args>, ceil_div(groups, kGroupsOfThread));
}

template <class T>
void launch_backward(const RmsNormBackwardArgs& args, StreamHandle stream) {
  const bool grouped = args.width % kGroup == 0 &&
                       are_aligned(args.x, args.weight, args.dy, args.residual_gradient, args.dx);
  const int64_t block_rows = rows_of_block(args);
  const int64_t blocks = ceil_div(args.rows, block_rows);
  if (blocks > 0) {
    const auto run = [&](auto kernel, int64_t items) {
      launch("rms_norm_backward", kernel, grid_size(blocks, 1), threads_for(items, kMaxThreads),
             kSharedBytes, stream, args, block_rows);
    };
    const int64_t groups = args.width / kGroup;
    if (!grouped) {
      run(rms_norm_backward_wide_rows<T, 1>, args.width);
    } else if (args.width > kMaxWidthInRegisters) {
      run(rms_norm_backward_wide_rows<T, kGroup>, groups);
    } else {
      run(rms_norm_backward_rows<T>, ceil_div(groups, kGroupsOfThread));
    }
  }
  launch("rms_norm_backward", sum_partials, grid_size(args.width, kSumColumns),
         kSumColumns * kSumRows, kSumColumns * kSumRows * sizeof(float), stream,
         static_cast<const float*>(args.scratch), blocks, args.width, args.accumulate,
         args.dweight);
}

}  // namespace

void rms_norm(const RmsNormArgs& args, StreamHandle stream) {
  check(args.rows, args.width);
  if (args.width == 0) return;
  const bool aligned = are_aligned(args.x, args.weight, args.y);
  if (args.dtype == DType::kBf16) return launch_forward<Bf16>("rms_norm", args, aligned, stream);
  launch_forward<float>("rms_norm", args, aligned, stream);
}

void residual_rms_norm(const ResidualRmsNormArgs& args, StreamHandle stream) {
  check(args.rows, args.width);
  if (args.width == 0) return;
  // Of the pointers that rms_norm has not, misaligned ones must not change the order of its sum.
  if (!are_aligned(args.a, args.b)) {
    add({.count = args.rows * args.width,
         .dtype = args.dtype,
         .a = args.a,
         .b = args.b,
         .out = args.sum},
        stream);
    return rms_norm({.rows = args.rows,
                     .width = args.width,
                     .dtype = args.dtype,
                     .epsilon = args.epsilon,
                     .x = args.sum,
                     .weight = args.weight,
                     .y = args.y,
                     .rstd = args.rstd},
                    stream);
  }
  const char* name = "residual_rms_norm";
  const bool aligned = are_aligned(args.sum, args.weight, args.y);
  if (args.dtype == DType::kBf16) return launch_forward<Bf16>(name, args, aligned, stream);
  launch_forward<float>(name, args, aligned, stream);
}

void rms_norm_backward(const RmsNormBackwardArgs& args, StreamHandle stream) {
  check(args.rows, args.width);
  if (args.width == 0) return;
  if (args.dtype == DType::kBf16) return launch_backward<Bf16>(args, stream);
  launch_backward<float>(args, stream);
}

}  // namespace strata::gpu::cuda
