#include "gpu/host/host_operators.h"

#include <algorithm>
#include <initializer_list>
#include <span>

#include "base/error.h"
#include "cpu_adam/adam.h"
#include "gpu/cross_entropy_place.h"
#include "gpu/host/host_stream.h"
#include "gpu/host/kernels.h"

namespace strata::gpu::host {
namespace {

void check_sizes(std::initializer_list<int64_t> sizes) {
  STRATA_CHECK(std::all_of(sizes.begin(), sizes.end(), [](int64_t size) { return size >= 0; }),
               "sizes of an operator must not be negative");
}

void check_stride(int64_t rows, int64_t stride, int64_t row_length) {
  STRATA_CHECK(rows == 0 || stride >= row_length, "a row stride must be at least the row's length");
}

void check(const MatmulArgs& args) {
  check_sizes({args.m, args.n, args.k});
  check_stride(args.transpose_a ? args.k : args.m, args.a_stride,
               args.transpose_a ? args.m : args.k);
  check_stride(args.transpose_b ? args.n : args.k, args.b_stride,
               args.transpose_b ? args.k : args.n);
  check_stride(args.m, args.c_stride, args.n);
}

void check(const AttentionArgs& args) {
  check_sizes(
      {args.tokens, args.heads, args.kv_heads, args.head_dim, args.sequences, args.max_sequence});
  STRATA_CHECK(args.heads == 0 || (args.kv_heads > 0 && args.heads % args.kv_heads == 0),
               "heads must be a multiple of kv_heads");
  check_stride(args.tokens, args.qkv_stride, args.heads * args.head_dim);
}

/// `kernel` runs on the stream with its own copy of `args`.
template <auto kernel, class Args>
void enqueue_kernel(const Args& args, tbb::task_arena& arena, Stream& stream) {
  static_cast<HostStream&>(stream).enqueue([args, &arena] { kernel(args, arena); });
}

}  // namespace

size_t HostOperators::matmul_scratch_bytes(const MatmulArgs& args) const {
  return host::matmul_scratch_bytes(args);
}

void HostOperators::matmul(const MatmulArgs& args, Stream& stream) {
  check(args);
  enqueue_kernel<host::matmul>(args, arena_, stream);
}

void HostOperators::rms_norm(const RmsNormArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width});
  enqueue_kernel<host::rms_norm>(args, arena_, stream);
}

void HostOperators::residual_rms_norm(const ResidualRmsNormArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width});
  enqueue_kernel<host::residual_rms_norm>(args, arena_, stream);
}

size_t HostOperators::rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args) const {
  return host::rms_norm_backward_scratch_bytes(args);
}

void HostOperators::rms_norm_backward(const RmsNormBackwardArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width});
  enqueue_kernel<host::rms_norm_backward>(args, arena_, stream);
}

void HostOperators::rotary(const RotaryArgs& args, Stream& stream) {
  check_sizes({args.rows, args.heads, args.head_dim});
  check_stride(args.rows, args.x_stride, args.heads * args.head_dim);
  enqueue_kernel<host::rotary>(args, arena_, stream);
}

size_t HostOperators::attention_scratch_bytes(const AttentionArgs& args) const {
  return host::attention_scratch_bytes(args, threads_);
}

void HostOperators::attention(const AttentionArgs& args, Stream& stream) {
  check(args);
  enqueue_kernel<host::attention>(args, arena_, stream);
}

size_t HostOperators::attention_backward_scratch_bytes(const AttentionBackwardArgs& args) const {
  return host::attention_backward_scratch_bytes(args, threads_);
}

void HostOperators::attention_backward(const AttentionBackwardArgs& args, Stream& stream) {
  check(args.forward);
  check_stride(args.forward.tokens, args.dqkv_stride, args.forward.heads * args.forward.head_dim);
  enqueue_kernel<host::attention_backward>(args, arena_, stream);
}

void HostOperators::swiglu(const SwigluArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width});
  enqueue_kernel<host::swiglu>(args, arena_, stream);
}

void HostOperators::swiglu_backward(const SwigluBackwardArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width});
  enqueue_kernel<host::swiglu_backward>(args, arena_, stream);
}

void HostOperators::embedding(const EmbeddingArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width, args.vocabulary});
  enqueue_kernel<host::embedding>(args, arena_, stream);
}

size_t HostOperators::embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args) const {
  return host::embedding_backward_scratch_bytes(args);
}

void HostOperators::embedding_backward(const EmbeddingBackwardArgs& args, Stream& stream) {
  check_sizes({args.rows, args.width, args.vocabulary});
  enqueue_kernel<host::embedding_backward>(args, arena_, stream);
}

size_t HostOperators::cross_entropy_scratch_bytes(const CrossEntropyArgs& args) const {
  return host::cross_entropy_scratch_bytes(args);
}

void HostOperators::cross_entropy(const CrossEntropyArgs& args, Stream& stream) {
  check_sizes({args.rows, args.vocabulary});
  check_stride(args.rows, args.logits_stride, args.vocabulary);
  if (args.dlogits != nullptr) check_stride(args.rows, args.dlogits_stride, args.vocabulary);
  static_cast<void>(dlogits_place(args));  // here, where the caller can be seen
  enqueue_kernel<host::cross_entropy>(args, arena_, stream);
}

void HostOperators::add(const AddArgs& args, Stream& stream) {
  check_sizes({args.count});
  enqueue_kernel<host::add>(args, arena_, stream);
}

void HostOperators::cast(const CastArgs& args, Stream& stream) {
  check_sizes({args.count});
  enqueue_kernel<host::cast>(args, arena_, stream);
}

size_t HostOperators::finish_gradient_scratch_bytes(const FinishGradientArgs& args) const {
  return host::finish_gradient_scratch_bytes(args);
}

void HostOperators::finish_gradient(const FinishGradientArgs& args, Stream& stream) {
  check_sizes({args.count});
  enqueue_kernel<host::finish_gradient>(args, arena_, stream);
}

void HostOperators::adam(const AdamArgs& args, Stream& stream) {
  check_sizes({args.shard.count, args.segment_count});
  static_cast<HostStream&>(stream).enqueue([args, &arena = arena_] {
    cpu_adam::update(arena, args.shard, {args.segments, static_cast<size_t>(args.segment_count)},
                     args.constants);
  });
}

}  // namespace strata::gpu::host
