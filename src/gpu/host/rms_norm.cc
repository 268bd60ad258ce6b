#include "gpu/host/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/rms_norm.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include <algorithm>
#include <cmath>

#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

/// y of the row x; returns its rstd.
template <class T>
HWY_INLINE float rms_norm_row(const T* x, const T* weight, T* y, int64_t width, float epsilon) {
  const float squares = sum_of(width, [&](auto d, int64_t i) HWY_ATTR {
    const auto v = load(d, x + i);
    return hn::Mul(v, v);
  });
  const double mean = static_cast<double>(squares) / static_cast<double>(width);
  const auto rstd = static_cast<float>(1 / std::sqrt(mean + static_cast<double>(epsilon)));
  for_each_vector(width, [&](auto d, int64_t i) HWY_ATTR {
    const auto normal = hn::Mul(load(d, x + i), hn::Set(d, rstd));
    store(d, hn::Mul(normal, load(d, weight + i)), y + i);
  });
  return rstd;
}

template <class T>
HWY_INLINE void rms_norm_rows_of(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    args.rstd[row] = rms_norm_row(static_cast<const T*>(args.x) + offset, weight,
                                  static_cast<T*>(args.y) + offset, args.width, args.epsilon);
  }
}

template <class T>
HWY_INLINE void residual_rms_norm_rows_of(const ResidualRmsNormArgs& args, int64_t begin,
                                          int64_t end) {
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    const T* a = static_cast<const T*>(args.a) + offset;
    const T* b = static_cast<const T*>(args.b) + offset;
    T* sum = static_cast<T*>(args.sum) + offset;
    for_each_vector(args.width, [&](auto d, int64_t i) HWY_ATTR {
      store(d, hn::Add(load(d, a + i), load(d, b + i)), sum + i);
    });
    args.rstd[row] = rms_norm_row(static_cast<const T*>(sum), weight,
                                  static_cast<T*>(args.y) + offset, args.width, args.epsilon);
  }
}

void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return rms_norm_rows_of<Bf16>(args, begin, end);
  return rms_norm_rows_of<float>(args, begin, end);
}

void residual_rms_norm_rows(const ResidualRmsNormArgs& args, int64_t begin, int64_t end) {
  if (args.dtype == DType::kBf16) return residual_rms_norm_rows_of<Bf16>(args, begin, end);
  return residual_rms_norm_rows_of<float>(args, begin, end);
}

/// Also writes the sum over these rows of dweight.
template <class T>
HWY_INLINE void rms_norm_backward_rows_of(const RmsNormBackwardArgs& args, int64_t begin,
                                          int64_t end, float* dweight) {
  const T* weight = static_cast<const T*>(args.weight);
  std::fill_n(dweight, args.width, 0.0F);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * args.width;
    const T* x = static_cast<const T*>(args.x) + offset;
    const T* dy = static_cast<const T*>(args.dy) + offset;
    T* dx = static_cast<T*>(args.dx) + offset;
    const T* residual = args.residual_gradient == nullptr
                            ? nullptr
                            : static_cast<const T*>(args.residual_gradient) + offset;
    const float rstd = args.rstd[row];
    // With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g * n)), dweight = dy * n.
    const float products = sum_of(args.width, [&](auto d, int64_t i) HWY_ATTR {
      return hn::Mul(hn::Mul(load(d, dy + i), load(d, weight + i)), load(d, x + i));
    });
    const float mean = products * rstd / static_cast<float>(args.width);
    const auto gradient = [&](auto d, int64_t i) HWY_ATTR {
      const auto dy_i = load(d, dy + i);
      const auto normal = hn::Mul(load(d, x + i), hn::Set(d, rstd));
      hn::StoreU(hn::MulAdd(dy_i, normal, hn::LoadU(d, dweight + i)), d, dweight + i);
      const auto g = hn::Mul(dy_i, load(d, weight + i));
      return hn::NegMulAdd(normal, hn::Set(d, mean), g);
    };
    if (residual == nullptr) {
      for_each_vector(args.width, [&](auto d, int64_t i) HWY_ATTR {
        store(d, hn::Mul(gradient(d, i), hn::Set(d, rstd)), dx + i);
      });
    } else {
      for_each_vector(args.width, [&](auto d, int64_t i) HWY_ATTR {
        store(d, hn::MulAdd(gradient(d, i), hn::Set(d, rstd), load(d, residual + i)), dx + i);
      });
    }
  }
}

void rms_norm_backward_rows(const RmsNormBackwardArgs& args, int64_t begin, int64_t end,
                            float* dweight) {
  if (args.dtype == DType::kBf16) {
    return rms_norm_backward_rows_of<Bf16>(args, begin, end, dweight);
  }
  return rms_norm_backward_rows_of<float>(args, begin, end, dweight);
}

/// dweight[i] (+)= the sum over the blocks, in order, of partial[block * stride + i].
void sum_blocks(const float* partial, int64_t blocks, int64_t stride, int64_t begin, int64_t end,
                bool accumulate, float* dweight) {
  for_each_vector(end - begin, [&](auto d, int64_t offset) HWY_ATTR {
    const int64_t i = begin + offset;
    auto sum = hn::Zero(d);
    for (int64_t block = 0; block < blocks; ++block) {
      sum = hn::Add(sum, hn::LoadU(d, partial + block * stride + i));
    }
    if (accumulate) sum = hn::Add(sum, hn::LoadU(d, dweight + i));
    hn::StoreU(sum, d, dweight + i);
  });
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include "gpu/host/chunks.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(rms_norm_rows);
HWY_EXPORT(residual_rms_norm_rows);
HWY_EXPORT(rms_norm_backward_rows);
HWY_EXPORT(sum_blocks);

/// Rows are cut into so many blocks at most, each with a row of partial sums in scratch.
constexpr int64_t kMaxRowBlocks = 64;

int64_t rows_of_block(int64_t rows, int64_t width) {
  return std::max(rows_of_chunk(width), ceil_div(rows, kMaxRowBlocks));
}

/// Blocks' sums begin on cache lines of their own.
int64_t partial_stride(int64_t width) { return ceil_div(width, 16) * 16; }

}  // namespace

void rms_norm(const RmsNormArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.rows, rows_of_chunk(args.width), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(rms_norm_rows)(args, begin, end);
  });
}

void residual_rms_norm(const ResidualRmsNormArgs& args, tbb::task_arena& arena) {
  for_each_chunk(arena, args.rows, rows_of_chunk(args.width), [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(residual_rms_norm_rows)(args, begin, end);
  });
}

size_t rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args) {
  const int64_t blocks = ceil_div(args.rows, rows_of_block(args.rows, args.width));
  return static_cast<size_t>(blocks * partial_stride(args.width)) * sizeof(float);
}

void rms_norm_backward(const RmsNormBackwardArgs& args, tbb::task_arena& arena) {
  const int64_t block_rows = rows_of_block(args.rows, args.width);
  const int64_t stride = partial_stride(args.width);
  auto* partial = static_cast<float*>(args.scratch);
  for_each_chunk(arena, args.rows, block_rows, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(rms_norm_backward_rows)
    (args, begin, end, partial + begin / block_rows * stride);
  });
  const int64_t blocks = ceil_div(args.rows, block_rows);
  const int64_t columns = std::max<int64_t>(64, kChunkElements / std::max<int64_t>(1, blocks));
  for_each_chunk(arena, args.width, columns, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(sum_blocks)
    (partial, blocks, stride, begin, end, args.accumulate, args.dweight);
  });
}

}  // namespace strata::gpu::host

#endif  // HWY_ONCE
