// One matrix product on the calling thread, by oneDNN. Our tasks are oneTBB's: a library that
// starts threads of its own inside them, as oneDNN does with OpenMP, takes the cores from each
// other.
//
// Products of bf16 need AVX-512. On other CPUs they are computed in fp32 (gemm_product.h).
//
// Rates differ with the layout: oneDNN 2.6 has its faster kernels for matrices without gaps between
// the rows only ("dense"), and others need a temporary of m * n fp32 where C is of bf16. They also
// copy a transposed A. Measured on a Zen 4 core, of 220 GFLOP/s in bf16: dense 205 to 215, strided
// 180 to 200.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/dtype.h"

namespace strata::gpu::host {

/// C[m,n] = op(A)[m,k] * op(B)[k,n] (+ C), as in MatmulArgs; m, n and k are positive.
struct GemmShape {
  int64_t m = 0, n = 0, k = 0;
  DType dtype = DType::kBf16;
  DType c_dtype = DType::kBf16;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  friend bool operator==(const GemmShape&, const GemmShape&) = default;
};

/// Whether oneDNN has products of bf16 for this CPU.
[[nodiscard]] bool has_bf16_gemm();

class GemmProduct;

/// The compiled product of one shape. Copies are cheap and share it; thread-safe.
class SerialGemm {
 public:
  SerialGemm() = default;

  /// Looks the shape up among the last few hundred compiled, else compiles it, which takes a
  /// millisecond or two and 70 KiB. Thread-safe. Throws dnnl::error where oneDNN has no kernel.
  [[nodiscard]] static SerialGemm find(const GemmShape& shape);

  /// Blocks. Each thread that comes here keeps scratch memory for its largest product so far: some
  /// 200 KiB for a dense one, plus m * n fp32 with a transposed A, and m * n fp32 for a strided one
  /// to bf16. In fp32, 2.5 MiB more.
  void run(const void* a, const void* b, void* c) const;

 private:
  explicit SerialGemm(std::shared_ptr<const GemmProduct> product) : product_(std::move(product)) {}

  std::shared_ptr<const GemmProduct> product_;
};

}  // namespace strata::gpu::host
