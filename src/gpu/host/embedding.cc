#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/embedding.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

template <class T>
HWY_INLINE void embedding_backward_columns_of(const EmbeddingBackwardArgs& args, int64_t begin,
                                              int64_t end) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const T* dout = static_cast<const T*>(args.dout) + row * args.width + begin;
    float* dweight = args.dweight + args.tokens[row] * args.width + begin;
    for_each_vector(end - begin, [&](auto d, int64_t i) HWY_ATTR {
      hn::StoreU(hn::Add(hn::LoadU(d, dweight + i), load(d, dout + i)), d, dweight + i);
    });
  }
}

void embedding_backward_columns(const EmbeddingBackwardArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return embedding_backward_columns_of<Bf16>(args, begin, end);
  return embedding_backward_columns_of<float>(args, begin, end);
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(embedding_backward_columns);

/// A task of the backward pass owns so many columns of all tokens: few enough for a balance between
/// threads, and whole cache lines.
int64_t columns_of_task(int64_t width) {
  constexpr int64_t kLine = 16;
  constexpr int64_t kSmallest = 64;
  constexpr int64_t kTasks = 16;
  return std::max(kSmallest, ceil_div(ceil_div(width, kTasks), kLine) * kLine);
}

void check_token(int32_t token, int64_t vocabulary) {
  STRATA_CHECK(token >= 0 && token < vocabulary, "a token lies outside the vocabulary");
}

}  // namespace

void embedding(const EmbeddingArgs& args, tbb::task_arena& arena) {
  const auto row_bytes = static_cast<size_t>(args.width) * size_of(args.dtype);
  const auto* weight = static_cast<const std::byte*>(args.weight);
  auto* out = static_cast<std::byte*>(args.out);
  if (row_bytes == 0) return;
  for_each_chunk(arena, args.rows, rows_of_chunk(args.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      check_token(args.tokens[row], args.vocabulary);
      std::memcpy(out + static_cast<size_t>(row) * row_bytes,
                  weight + static_cast<size_t>(args.tokens[row]) * row_bytes, row_bytes);
    }
  });
}

size_t embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& /*args*/) { return 0; }

void embedding_backward(const EmbeddingBackwardArgs& args, tbb::task_arena& arena) {
  for (int64_t row = 0; row < args.rows; ++row) check_token(args.tokens[row], args.vocabulary);
  if (!args.accumulate) {
    for_each_chunk(arena, args.vocabulary * args.width, kChunkElements,
                   [&](int64_t begin, int64_t end) {
                     std::fill(args.dweight + begin, args.dweight + end, 0.0F);
                   });
  }
  if (args.rows == 0) return;
  for_each_chunk(arena, args.width, columns_of_task(args.width), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(embedding_backward_columns)(args, begin, end);
  });
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
