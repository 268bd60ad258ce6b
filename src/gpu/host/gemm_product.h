// What carries out the matrix product of one shape: oneDNN, or oneDNN in fp32 where the CPU has no
// kernel of bf16. Behind SerialGemm, which finds and shares them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "gpu/host/serial_gemm.h"

namespace strata::gpu::host {

/// Immutable, so any number of threads may run it at once.
class GemmProduct {
 public:
  GemmProduct() = default;
  virtual ~GemmProduct() = default;
  GemmProduct(const GemmProduct&) = delete;
  GemmProduct& operator=(const GemmProduct&) = delete;
  virtual void run(const void* a, const void* b, void* c) const = 0;
};

/// The shape of bf16 as products of fp32, whose parts `find` looks up: blocks of A and B are
/// widened into scratch memory of the thread (2.5 MiB), and C is rounded once, when all its terms
/// are in. k is cut where the shape says, so bits do not depend on threads.
[[nodiscard]] std::unique_ptr<const GemmProduct> create_widened_gemm(
    const GemmShape& shape, const std::function<SerialGemm(const GemmShape&)>& find);

}  // namespace strata::gpu::host
