// Attention, forward, for what the tensor core kernels do not take. A warp a query and head: 32
// keys at a time, a lane computing the score of one, then, for the sums of values, having every
// 32nd column.
#pragma once

#include <limits>

#include "gpu/cuda/attention_plain.cuh"
#include "gpu/cuda/attention_tasks.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"

namespace strata::gpu::cuda::flash {

template <class T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_attention_kernel(const AttentionArgs args, const unsigned tasks) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (blockIdx.x >= tasks) return zero_unused_results<T>(args, blockIdx.x - tasks);
  const Task task(args, static_cast<unsigned>(args.heads), blockIdx.x, kPlainWarps);
  const int position = task.first_row + warp;
  if (position >= task.length) return;

  const int dim = static_cast<int>(args.head_dim);
  const int64_t stride = args.qkv_stride;
  const int64_t kv_head = task.head / group_of(args);
  const int64_t token = task.first_token + position;
  const T* q = static_cast<const T*>(args.q) + token * stride + task.head * args.head_dim;
  const T* k = static_cast<const T*>(args.k) + task.first_token * stride + kv_head * dim;
  const T* v = static_cast<const T*>(args.v) + task.first_token * stride + kv_head * dim;
  // A lane touches its own columns only: no barriers.
  float* sums = reinterpret_cast<float*>(shared_memory()) + static_cast<int64_t>(warp) * dim;
  for (int c = lane; c < dim; c += kWarp) sums[c] = 0;

  float reference = -std::numeric_limits<float>::infinity();
  float sum = 0;
  for (int first_key = 0; first_key <= position; first_key += kWarp) {
    const int key = first_key + lane;
    const float score = key <= position ? dot(q, k + key * stride, dim) * args.scale
                                        : -std::numeric_limits<float>::infinity();
    const float max = fmaxf(reference, warp_max(score));
    const float factor = expf(reference - max);
    const float probability = expf(score - max);
    reference = max;
    sum = sum * factor + warp_sum(probability);
    const float weight = rounded<T>(probability);
    const int keys = busy_lanes(position + 1 - first_key);
    for (int c = lane; c - lane < dim; c += kWarp) {
      float value = c < dim ? sums[c] * factor : 0;
      for (int i = 0; i < keys; ++i) {
        const float key_weight = ptx::shuffle(weight, i);
        if (c < dim) value += key_weight * element(v + (first_key + i) * stride + c);
      }
      if (c < dim) sums[c] = value;
    }
  }

  T* out = static_cast<T*>(args.out) + (token * args.heads + task.head) * dim;
  for (int c = lane; c < dim; c += kWarp) set_element(out + c, sums[c] / sum);
  if (lane == 0) args.log_sum_exp[task.head * args.tokens + token] = reference + logf(sum);
}

inline void plain_attention(const AttentionArgs& args, StreamHandle stream) {
  const auto kernel =
      args.dtype == DType::kBf16 ? plain_attention_kernel<Bf16> : plain_attention_kernel<float>;
  const unsigned tasks = plain_tasks(args, args.heads);
  launch("attention", kernel, grid_size(int64_t{tasks} + kZeroBlocks, 1), kPlainThreads,
         plain_shared_bytes(args, kPlainWarps), stream, args, tasks);
}

}  // namespace strata::gpu::cuda::flash
