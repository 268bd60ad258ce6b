// SwiGLU. Bytes an element of `out` in bf16: forward 6 (gate, up; out), backward 10 (gate, up,
// dout; dgate, dup). A thread has 4 loads of 16 bytes in flight (backward: 6): two groups of its
// row, a block's width apart.
#include "base/error.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kMaxThreads = 128;
constexpr int kPiecesOfThread = 2;

/// 0 where exp(-x) is infinite.
__device__ __forceinline__ float sigmoid(float x) { return ptx::div_rn(1.0F, 1.0F + expf(-x)); }

/// The block's row and its thread's first element there; `blocks` of them make up a row.
struct Place {
  int64_t row;
  int64_t column;
};

template <int n>
__device__ __forceinline__ Place place(unsigned blocks) {
  const unsigned block = blockIdx.x % blocks;
  return {blockIdx.x / blocks, (int64_t{block} * kPiecesOfThread * blockDim.x + threadIdx.x) * n};
}

template <class T, int n>
__global__ void __launch_bounds__(kMaxThreads) swiglu_rows(SwigluArgs args, unsigned blocks) {
  const auto [row, column] = place<n>(blocks);
  const int64_t step = int64_t{blockDim.x} * n;
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
  const T* up = gate + args.width;
  T* out = static_cast<T*>(args.out) + row * args.width;

  Packed<T, n> gates[kPiecesOfThread] = {};
  Packed<T, n> ups[kPiecesOfThread] = {};
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = column + k * step;
    if (i < args.width) {
      gates[k] = load<n>(gate + i);
      ups[k] = load<n>(up + i);
    }
  }
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = column + k * step;
    if (i < args.width) {
      const Floats<n> g = unpack(gates[k]);
      const Floats<n> u = unpack(ups[k]);
      Floats<n> y;
#pragma unroll
      for (int j = 0; j < n; ++j) y[j] = g[j] * sigmoid(g[j]) * u[j];
      store_floats(out + i, y);
    }
  }
}

template <class T, int n>
__global__ void __launch_bounds__(kMaxThreads)
    swiglu_backward_rows(SwigluBackwardArgs args, unsigned blocks) {
  const auto [row, column] = place<n>(blocks);
  const int64_t step = int64_t{blockDim.x} * n;
  const T* gate = static_cast<const T*>(args.gate_up) + row * 2 * args.width;
  const T* up = gate + args.width;
  const T* dout = static_cast<const T*>(args.dout) + row * args.width;
  T* dgate = static_cast<T*>(args.d_gate_up) + row * 2 * args.width;
  T* dup = dgate + args.width;

  Packed<T, n> gates[kPiecesOfThread] = {};
  Packed<T, n> ups[kPiecesOfThread] = {};
  Packed<T, n> douts[kPiecesOfThread] = {};
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = column + k * step;
    if (i < args.width) {
      gates[k] = load<n>(gate + i);
      ups[k] = load<n>(up + i);
      douts[k] = load<n>(dout + i);
    }
  }
#pragma unroll
  for (int k = 0; k < kPiecesOfThread; ++k) {
    const int64_t i = column + k * step;
    if (i < args.width) {
      const Floats<n> g = unpack(gates[k]);
      const Floats<n> u = unpack(ups[k]);
      const Floats<n> dy = unpack(douts[k]);
      Floats<n> dg;
      Floats<n> du;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        // silu'(g) = s + g * s * (1 - s), with s = sigmoid(g).
        const float s = sigmoid(g[j]);
        dg[j] = dy[j] * u[j] * (s * (1.0F + g[j] * (1.0F - s)));
        du[j] = dy[j] * (g[j] * s);
      }
      store_floats(dgate + i, dg);
      store_floats(dup + i, du);
    }
  }
}

/// Launches a kernel whose threads take n elements at a time.
template <int n, class Kernel, class Args>
void launch_rows(const char* name, Kernel kernel, const Args& args, StreamHandle stream) {
  const int64_t pieces = args.width / n;
  const unsigned threads =
      threads_for((pieces + kPiecesOfThread - 1) / kPiecesOfThread, kMaxThreads);
  const unsigned blocks = grid_size(pieces, int64_t{threads} * kPiecesOfThread);
  launch(name, kernel, grid_size(args.rows * blocks, 1), threads, 0, stream, args, blocks);
}

template <class T>
void launch_forward(const SwigluArgs& args, StreamHandle stream) {
  if (args.width % kGroup == 0 && are_aligned(args.gate_up, args.out)) {
    return launch_rows<kGroup>("swiglu", swiglu_rows<T, kGroup>, args, stream);
  }
  launch_rows<1>("swiglu", swiglu_rows<T, 1>, args, stream);
}

template <class T>
void launch_backward(const SwigluBackwardArgs& args, StreamHandle stream) {
  constexpr const char* kName = "swiglu_backward";
  if (args.width % kGroup == 0 && are_aligned(args.gate_up, args.dout, args.d_gate_up)) {
    return launch_rows<kGroup>(kName, swiglu_backward_rows<T, kGroup>, args, stream);
  }
  launch_rows<1>(kName, swiglu_backward_rows<T, 1>, args, stream);
}

void check(int64_t rows, int64_t width) {
  STRATA_CHECK(rows >= 0 && width >= 0, "sizes of an operator must not be negative");
}

}  // namespace

void swiglu(const SwigluArgs& args, StreamHandle stream) {
  check(args.rows, args.width);
  if (args.width == 0) return;
  if (args.dtype == DType::kBf16) return launch_forward<Bf16>(args, stream);
  launch_forward<float>(args, stream);
}

void swiglu_backward(const SwigluBackwardArgs& args, StreamHandle stream) {
  check(args.rows, args.width);
  if (args.width == 0) return;
  if (args.dtype == DType::kBf16) return launch_backward<Bf16>(args, stream);
  launch_backward<float>(args, stream);
}

}  // namespace strata::gpu::cuda
