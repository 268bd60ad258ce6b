// The gradients of attention for what the tensor core kernels do not take; see
// attention_plain_forward.cuh. A warp a query and head for dq, a warp a key and key head for dk and
// dv: 32 of the others at a time, a lane computing the probability of one and its gradient, then,
// for the sums, having every 32nd column.
#pragma once

#include "gpu/cuda/attention_plain.cuh"
#include "gpu/cuda/attention_tasks.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"

namespace strata::gpu::cuda::flash {

/// sum(dout * out) of each query and head: [heads, tokens].
__device__ __forceinline__ float* deltas(const AttentionBackwardArgs& args) {
  return static_cast<float*>(args.forward.scratch);
}

/// If a row of dout, [tokens, heads], is of an unused token: zeros its dq, and dk and dv of the key
/// head of the same number. Lane `lane` of `lanes` does its part.
template <class T>
__device__ __forceinline__ bool zero_unused_gradients(const AttentionBackwardArgs& args, int row,
                                                      int lane, int lanes) {
  const AttentionArgs& forward = args.forward;
  const int heads = static_cast<int>(forward.heads);
  if (row / heads < tokens_used(forward)) return false;
  const int64_t offset = row / heads * args.dqkv_stride + row % heads * forward.head_dim;
  for (int64_t c = lane; c < forward.head_dim; c += lanes) {
    static_cast<T*>(args.dq)[offset + c] = T{};
    if (row % heads < forward.kv_heads) {
      static_cast<T*>(args.dk)[offset + c] = T{};
      static_cast<T*>(args.dv)[offset + c] = T{};
    }
  }
  return true;
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_delta_kernel(const AttentionBackwardArgs args) {
  const AttentionArgs& forward = args.forward;
  const int row = static_cast<int>(blockIdx.x * kPlainWarps + threadIdx.x / kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int heads = static_cast<int>(forward.heads);
  if (row >= forward.tokens * heads || zero_unused_gradients<T>(args, row, lane, kWarp)) return;
  const T* out = static_cast<const T*>(forward.out) + row * forward.head_dim;
  const T* dout = static_cast<const T*>(args.dout) + row * forward.head_dim;
  float delta = 0;
  for (int64_t c = lane; c < forward.head_dim; c += kWarp) {
    delta += element(out + c) * element(dout + c);
  }
  delta = warp_sum(delta);
  if (lane == 0) deltas(args)[row % heads * forward.tokens + row / heads] = delta;
}

/// A query's probability for a key, and the gradient of their score before scaling.
struct Pair {
  float probability = 0;
  float gradient = 0;
};

template <class T>
__device__ __forceinline__ Pair recompute(const AttentionArgs& args, float log_sum_exp, float delta,
                                          const T* q, const T* k, const T* v, const T* dout) {
  const int dim = static_cast<int>(args.head_dim);
  const float probability = expf(dot(q, k, dim) * args.scale - log_sum_exp);
  return {probability, probability * (dot(dout, v, dim) - delta)};
}

/// sums[c] += the sum over `count` lanes i of weight_i * rows[i * stride + c], in order, for this
/// lane's columns. All lanes of the warp call it.
template <class T>
__device__ __forceinline__ void add_rows(float weight, int count, const T* rows, int64_t stride,
                                         int dim, float* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  weight = rounded<T>(weight);
  for (int first = 0; first < dim; first += kWarp) {
    const int c = first + lane;
    float sum = c < dim ? sums[c] : 0;
    for (int i = 0; i < count; ++i) {
      const float row_weight = ptx::shuffle(weight, i);
      if (c < dim) sum += row_weight * element(rows + i * stride + c);
    }
    if (c < dim) sums[c] = sum;
  }
}

/// A warp's sums in shared memory. A lane touches its own columns only: no barriers.
__device__ __forceinline__ float* zeroed_sums(int index, int dim) {
  float* sums = reinterpret_cast<float*>(shared_memory()) + static_cast<int64_t>(index) * dim;
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < dim; c += kWarp) sums[c] = 0;
  return sums;
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_query_kernel(const AttentionBackwardArgs args) {
  const AttentionArgs& forward = args.forward;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Task task(forward, static_cast<unsigned>(forward.heads), blockIdx.x, kPlainWarps);
  const int position = task.first_row + warp;
  if (position >= task.length) return;

  const int dim = static_cast<int>(forward.head_dim);
  const int64_t stride = forward.qkv_stride;
  const int64_t token = task.first_token + position;
  const int64_t key_offset =
      task.first_token * stride + task.head / group_of(forward) * forward.head_dim;
  const T* q = static_cast<const T*>(forward.q) + token * stride + task.head * forward.head_dim;
  const T* dout = static_cast<const T*>(args.dout) + (token * forward.heads + task.head) * dim;
  const T* k = static_cast<const T*>(forward.k) + key_offset;
  const T* v = static_cast<const T*>(forward.v) + key_offset;
  const float log_sum_exp = forward.log_sum_exp[task.head * forward.tokens + token];
  const float delta = deltas(args)[task.head * forward.tokens + token];
  float* sums = zeroed_sums(warp, dim);

  for (int first = 0; first <= position; first += kWarp) {
    const int key = first + lane;
    Pair pair;
    if (key <= position) {
      pair = recompute(forward, log_sum_exp, delta, q, k + key * stride, v + key * stride, dout);
    }
    add_rows(pair.gradient * forward.scale, busy_lanes(position + 1 - first), k + first * stride,
             stride, dim, sums);
  }
  T* dq = static_cast<T*>(args.dq) + token * args.dqkv_stride + task.head * forward.head_dim;
  for (int c = lane; c < dim; c += kWarp) set_element(dq + c, sums[c]);
}

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_key_kernel(const AttentionBackwardArgs args) {
  const AttentionArgs& forward = args.forward;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const Task task(forward, static_cast<unsigned>(forward.kv_heads), blockIdx.x, kPlainWarps);
  const int position = task.first_row + warp;
  if (position >= task.length) return;

  const int dim = static_cast<int>(forward.head_dim);
  const int64_t stride = forward.qkv_stride;
  const int64_t dout_stride = forward.heads * forward.head_dim;
  const int64_t token = task.first_token + position;
  const T* k = static_cast<const T*>(forward.k) + token * stride + task.head * forward.head_dim;
  const T* v = static_cast<const T*>(forward.v) + token * stride + task.head * forward.head_dim;
  float* dk_sums = zeroed_sums(2 * warp, dim);
  float* dv_sums = zeroed_sums(2 * warp + 1, dim);

  const int group = group_of(forward);
  for (int64_t head = task.head * group; head < (task.head + 1) * group; ++head) {
    const T* q = static_cast<const T*>(forward.q) + task.first_token * stride + head * dim;
    const T* dout = static_cast<const T*>(args.dout) + task.first_token * dout_stride + head * dim;
    const int64_t row_sums = head * forward.tokens + task.first_token;
    for (int first = position; first < task.length; first += kWarp) {
      const int query = first + lane;
      Pair pair;
      if (query < task.length) {
        pair = recompute(forward, forward.log_sum_exp[row_sums + query],
                         deltas(args)[row_sums + query], q + query * stride, k, v,
                         dout + query * dout_stride);
      }
      const int queries = busy_lanes(task.length - first);
      add_rows(pair.gradient * forward.scale, queries, q + first * stride, stride, dim, dk_sums);
      add_rows(pair.probability, queries, dout + first * dout_stride, dout_stride, dim, dv_sums);
    }
  }
  const int64_t offset = token * args.dqkv_stride + task.head * forward.head_dim;
  for (int c = lane; c < dim; c += kWarp) {
    set_element(static_cast<T*>(args.dk) + offset + c, dk_sums[c]);
    set_element(static_cast<T*>(args.dv) + offset + c, dv_sums[c]);
  }
}

template <class T>
void plain_attention_backward_of(const AttentionBackwardArgs& args, StreamHandle stream) {
  const AttentionArgs& forward = args.forward;
  launch("attention backward (delta)", plain_delta_kernel<T>,
         grid_size(forward.tokens * forward.heads, kPlainWarps), kPlainThreads, 0, stream, args);
  launch("attention backward (queries)", plain_query_kernel<T>, plain_tasks(forward, forward.heads),
         kPlainThreads, plain_shared_bytes(forward, kPlainWarps), stream, args);
  launch("attention backward (keys)", plain_key_kernel<T>, plain_tasks(forward, forward.kv_heads),
         kPlainThreads, plain_shared_bytes(forward, 2 * kPlainWarps), stream, args);
}

inline void plain_attention_backward(const AttentionBackwardArgs& args, StreamHandle stream) {
  if (args.forward.dtype == DType::kBf16) {
    plain_attention_backward_of<Bf16>(args, stream);
  } else {
    plain_attention_backward_of<float>(args, stream);
  }
}

}  // namespace strata::gpu::cuda::flash
