#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/host/widened_gemm.cc"
#include <hwy/foreach_target.h>
// After foreach_target.h, which includes this file again for each target.
#include "gpu/host/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace strata::gpu::host::HWY_NAMESPACE {
namespace {

void widen(const Bf16* from, float* to, int64_t count) {
  for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR { store(d, load(d, from + i), to + i); });
}

void narrow(const float* from, Bf16* to, int64_t count) {
  for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR { store(d, load(d, from + i), to + i); });
}

void add_narrow(const float* from, Bf16* to, int64_t count) {
  for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
    store(d, hn::Add(load(d, to + i), load(d, from + i)), to + i);
  });
}

}  // namespace
}  // namespace strata::gpu::host::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

#include <algorithm>
#include <utility>
#include <vector>

#include "gpu/host/gemm_product.h"

namespace strata::gpu::host {
namespace {

HWY_EXPORT(widen);
HWY_EXPORT(narrow);
HWY_EXPORT(add_narrow);

/// Of the product: two blocks of it and one of each operand stay in a core's caches. A part of a
/// model's product has no more rows (matmul.cc).
constexpr int64_t kRows = 384, kColumns = 512, kDepth = 512;

struct Scratch {
  std::vector<float> a, b, c;
  static Scratch& of_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }
};

float* at_least(std::vector<float>& memory, int64_t elements) {
  if (memory.size() < static_cast<size_t>(elements)) memory.resize(static_cast<size_t>(elements));
  return memory.data();
}

/// A run of one dimension: [begin, begin + size).
struct Piece {
  int64_t begin, size;
};

std::vector<Piece> pieces(int64_t length, int64_t most) {
  std::vector<Piece> all;
  for (int64_t begin = 0; begin < length; begin += most) {
    all.push_back({begin, std::min(most, length - begin)});
  }
  return all;
}

/// The block of a matrix stored as rows, without gaps.
void widen_block(const Bf16* matrix, int64_t stride, Piece rows, Piece columns, float* to) {
  for (int64_t row = 0; row < rows.size; ++row) {
    HWY_DYNAMIC_DISPATCH(widen)
    (matrix + (rows.begin + row) * stride + columns.begin, to + row * columns.size, columns.size);
  }
}

class WidenedGemm final : public GemmProduct {
 public:
  WidenedGemm(const GemmShape& shape, const std::function<SerialGemm(const GemmShape&)>& find)
      : shape_(shape),
        rows_(pieces(shape.m, kRows)),
        columns_(pieces(shape.n, kColumns)),
        depths_(pieces(shape.k, kDepth)) {
    for (const Piece& rows : rows_) {
      for (const Piece& columns : columns_) {
        for (const Piece& depth : depths_) parts_.push_back(find(part(rows, columns, depth)));
      }
    }
  }

  void run(const void* a, const void* b, void* c) const override {
    size_t next = 0;
    for (const Piece& rows : rows_) {
      for (const Piece& columns : columns_) {
        for (const Piece& depth : depths_) {
          multiply(parts_[next++], {rows, columns, depth}, static_cast<const Bf16*>(a),
                   static_cast<const Bf16*>(b), c);
        }
        if (is_narrow()) keep(rows, columns, static_cast<Bf16*>(c));
      }
    }
  }

 private:
  struct Block {
    Piece rows, columns, depth;
  };

  [[nodiscard]] bool is_narrow() const { return shape_.c_dtype == DType::kBf16; }

  [[nodiscard]] GemmShape part(const Piece& rows, const Piece& columns, const Piece& depth) const {
    GemmShape part = shape_;
    part.m = rows.size;
    part.n = columns.size;
    part.k = depth.size;
    part.dtype = part.c_dtype = DType::kF32;
    part.a_stride = shape_.transpose_a ? rows.size : depth.size;
    part.b_stride = shape_.transpose_b ? depth.size : columns.size;
    if (is_narrow()) part.c_stride = columns.size;
    part.accumulate = depth.begin > 0 || (shape_.accumulate && !is_narrow());
    return part;
  }

  void multiply(const SerialGemm& gemm, const Block& block, const Bf16* a, const Bf16* b,
                void* c) const {
    const auto& [rows, columns, depth] = block;
    Scratch& scratch = Scratch::of_thread();
    float* wide_a = at_least(scratch.a, rows.size * depth.size);
    float* wide_b = at_least(scratch.b, depth.size * columns.size);
    if (shape_.transpose_a) {
      widen_block(a, shape_.a_stride, depth, rows, wide_a);
    } else {
      widen_block(a, shape_.a_stride, rows, depth, wide_a);
    }
    if (shape_.transpose_b) {
      widen_block(b, shape_.b_stride, columns, depth, wide_b);
    } else {
      widen_block(b, shape_.b_stride, depth, columns, wide_b);
    }
    float* wide_c = is_narrow()
                        ? at_least(scratch.c, rows.size * columns.size)
                        : static_cast<float*>(c) + rows.begin * shape_.c_stride + columns.begin;
    gemm.run(wide_a, wide_b, wide_c);
  }

  /// Rounds the thread's block of C to where it belongs.
  void keep(const Piece& rows, const Piece& columns, Bf16* c) const {
    const float* from = Scratch::of_thread().c.data();
    for (int64_t row = 0; row < rows.size; ++row, from += columns.size) {
      Bf16* to = c + (rows.begin + row) * shape_.c_stride + columns.begin;
      if (shape_.accumulate) {
        HWY_DYNAMIC_DISPATCH(add_narrow)(from, to, columns.size);
      } else {
        HWY_DYNAMIC_DISPATCH(narrow)(from, to, columns.size);
      }
    }
  }

  GemmShape shape_;
  std::vector<Piece> rows_, columns_, depths_;
  std::vector<SerialGemm> parts_;  // of each block, in the order in which they are multiplied
};

}  // namespace

std::unique_ptr<const GemmProduct> create_widened_gemm(
    const GemmShape& shape, const std::function<SerialGemm(const GemmShape&)>& find) {
  return std::make_unique<WidenedGemm>(shape, find);
}

}  // namespace strata::gpu::host
#endif  // HWY_ONCE
