// Rotary embedding in place. Bytes an element in bf16: 4 (read and written); the row's cosines and
// sines (4 bytes an element of one head) are read once for 4 heads, from the L1 cache but for the
// first. A thread has 8 loads of 16 bytes in flight: both halves of the pairs of 4 heads.
#include "base/error.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kMaxThreads = 256;
constexpr int kHeadsOfThread = 4;

/// A block a row; a thread takes n pairs of up to 4 heads, which share their angles.
template <class T, int n>
__global__ void __launch_bounds__(kMaxThreads) rotary_rows(RotaryArgs args) {
  const int64_t row = blockIdx.x;
  const int heads = static_cast<int>(args.heads);
  const int half = static_cast<int>(args.head_dim / 2);
  const int pieces = half / n;
  const int head_step = (heads + kHeadsOfThread - 1) / kHeadsOfThread;
  const float* cosines = args.cos_sin + args.positions[row] * args.head_dim;
  T* x = static_cast<T*>(args.x) + row * args.x_stride;

  for (int item = static_cast<int>(threadIdx.x); item < pieces * head_step;
       item += static_cast<int>(blockDim.x)) {
    const int first = item % pieces * n;
    const int first_head = item / pieces;
    Packed<T, n> low[kHeadsOfThread] = {};
    Packed<T, n> high[kHeadsOfThread] = {};
#pragma unroll
    for (int k = 0; k < kHeadsOfThread; ++k) {
      const int head = first_head + k * head_step;
      if (head < heads) {
        low[k] = load<n>(x + int64_t{head} * args.head_dim + first);
        high[k] = load<n>(x + int64_t{head} * args.head_dim + half + first);
      }
    }
    const Floats<n> c = load_floats<n>(cosines + first);
    Floats<n> s = load_floats<n>(cosines + half + first);
#pragma unroll
    for (int j = 0; j < n; ++j) s[j] = args.inverse ? -s[j] : s[j];
#pragma unroll
    for (int k = 0; k < kHeadsOfThread; ++k) {
      const int head = first_head + k * head_step;
      if (head < heads) {
        const Floats<n> a = unpack(low[k]);
        const Floats<n> b = unpack(high[k]);
        Floats<n> turned_a;
        Floats<n> turned_b;
#pragma unroll
        for (int j = 0; j < n; ++j) {
          turned_a[j] = a[j] * c[j] - b[j] * s[j];
          turned_b[j] = b[j] * c[j] + a[j] * s[j];
        }
        store_floats(x + int64_t{head} * args.head_dim + first, turned_a);
        store_floats(x + int64_t{head} * args.head_dim + half + first, turned_b);
      }
    }
  }
}

template <class T, int n>
void launch_rotary(const RotaryArgs& args, StreamHandle stream) {
  const int64_t items =
      args.head_dim / 2 / n * ((args.heads + kHeadsOfThread - 1) / kHeadsOfThread);
  launch("rotary", rotary_rows<T, n>, grid_size(args.rows, 1), threads_for(items, kMaxThreads), 0,
         stream, args);
}

}  // namespace

void rotary(const RotaryArgs& args, StreamHandle stream) {
  STRATA_CHECK(args.rows >= 0 && args.heads >= 0 && args.head_dim >= 0,
               "sizes of an operator must not be negative");
  STRATA_CHECK(args.head_dim % 2 == 0, "rotary embedding needs an even head_dim");
  STRATA_CHECK(args.rows == 0 || args.x_stride >= args.heads * args.head_dim,
               "a row stride must be at least the row's length");
  STRATA_CHECK(args.heads * args.head_dim <= INT32_MAX, "a row of heads is too long");
  if (args.heads == 0 || args.head_dim == 0) return;
  const bool grouped = args.head_dim / 2 % kGroup == 0 && args.x_stride % kGroup == 0 &&
                       are_aligned(args.x, args.cos_sin);
  if (args.dtype == DType::kBf16) {
    return grouped ? launch_rotary<Bf16, kGroup>(args, stream)
                   : launch_rotary<Bf16, 1>(args, stream);
  }
  return grouped ? launch_rotary<float, kGroup>(args, stream)
                 : launch_rotary<float, 1>(args, stream);
}

}  // namespace strata::gpu::cuda
