// What the sources of Llama share: memory cut into pieces, and a linear layer's three products.
// Private to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/bytes.h"
#include "base/dtype.h"
#include "gpu/operators.h"
#include "pipeline/unit_model.h"

namespace strata::model {

inline constexpr size_t kPieceAlignment = 64;

/// Cuts a workspace into aligned pieces; with a null base it only adds up their sizes.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::byte*>(base)) {}

  void* take(size_t size_bytes) {
    std::byte* piece = base_ ? base_ + used_ : nullptr;
    used_ += align_up(size_bytes, kPieceAlignment);
    return piece;
  }
  float* take_floats(int64_t count) {
    return static_cast<float*>(take(static_cast<size_t>(count) * sizeof(float)));
  }
  [[nodiscard]] size_t used_bytes() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

/// `pointer` moved by `elements` of `dtype`; null stays null.
template <class T>
T* advance(T* pointer, int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  if (pointer == nullptr) return nullptr;
  return static_cast<Byte*>(pointer) + elements * static_cast<int64_t>(size_of(dtype));
}

/// y[rows, outputs] = x[rows, inputs] * w[outputs, inputs]^T
inline gpu::MatmulArgs linear(int64_t rows, int64_t inputs, int64_t outputs, DType dtype) {
  return {.m = rows,
          .n = outputs,
          .k = inputs,
          .dtype = dtype,
          .c_dtype = dtype,
          .transpose_b = true,
          .a_stride = inputs,
          .b_stride = inputs,
          .c_stride = outputs};
}

/// dx[rows, inputs] = dy[rows, outputs] * w[outputs, inputs]
inline gpu::MatmulArgs linear_input_gradient(int64_t rows, int64_t inputs, int64_t outputs,
                                             DType dtype) {
  return {.m = rows,
          .n = inputs,
          .k = outputs,
          .dtype = dtype,
          .c_dtype = dtype,
          .a_stride = outputs,
          .b_stride = inputs,
          .c_stride = inputs};
}

/// dw[outputs, inputs] fp32 (+)= dy[rows, outputs]^T * x[rows, inputs]
inline gpu::MatmulArgs linear_weight_gradient(int64_t rows, int64_t inputs, int64_t outputs,
                                              DType dtype, bool accumulate) {
  return {.m = outputs,
          .n = inputs,
          .k = rows,
          .dtype = dtype,
          .c_dtype = DType::kF32,
          .transpose_a = true,
          .accumulate = accumulate,
          .a_stride = outputs,
          .b_stride = inputs,
          .c_stride = inputs};
}

inline void multiply(const pipeline::UnitCall& call, gpu::MatmulArgs args, const void* a,
                     const void* b, void* c, void* scratch) {
  args.a = a;
  args.b = b;
  args.c = c;
  args.scratch = scratch;
  call.device.operators().matmul(args, call.stream);
}

}  // namespace strata::model
