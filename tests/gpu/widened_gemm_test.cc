// Products of bf16 as they are computed where the CPU has none; such CPUs run all other tests by
// them.
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "base/bf16.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/host/gemm_product.h"
#include "gpu/matmul_reference.h"

namespace strata::gpu {
namespace {

using namespace matmul_reference;

std::unique_ptr<const host::GemmProduct> product_of(const Case& test, const Operands& operands) {
  return host::create_widened_gemm({.m = test.m,
                                    .n = test.n,
                                    .k = test.k,
                                    .dtype = test.dtype,
                                    .c_dtype = test.c_dtype,
                                    .transpose_a = test.transpose_a,
                                    .transpose_b = test.transpose_b,
                                    .accumulate = test.accumulate,
                                    .a_stride = operands.a.stride(),
                                    .b_stride = operands.b.stride(),
                                    .c_stride = operands.c.stride()},
                                   host::SerialGemm::find);
}

void check(const Case& test) {
  INFO(test);
  Operands operands(test);
  const Matrix old_c = operands.c;
  const auto product = product_of(test, operands);
  product->run(operands.a.data(), operands.b.data(), operands.c.data());
  CHECK(wrong_elements(test, operands, old_c) == 0);
  CHECK(operands.c.gaps_are_intact());
}

TEST_CASE("widened products agree with double precision in every form", "[matmul]") {
  for (const DType c_dtype : {DType::kBf16, DType::kF32}) {
    for (int form = 0; form < 8; ++form) {
      check({.m = 37,
             .n = 131,
             .k = 65,
             .c_dtype = c_dtype,
             .transpose_a = (form & 1) != 0,
             .transpose_b = (form & 2) != 0,
             .accumulate = (form & 4) != 0,
             .a_gap = form % 3,
             .b_gap = form % 2,
             .c_gap = form % 5});
    }
  }
}

TEST_CASE("widened products agree with double precision at the edges of their blocks", "[matmul]") {
  for (const int64_t edge : {int64_t{-1}, int64_t{0}, int64_t{1}}) {
    for (const DType c_dtype : {DType::kBf16, DType::kF32}) {
      for (const bool accumulate : {false, true}) {
        check({.m = 384 + edge, .n = 3, .k = 5, .c_dtype = c_dtype, .accumulate = accumulate});
        check({.m = 2, .n = 512 + edge, .k = 9, .c_dtype = c_dtype, .accumulate = accumulate});
        check({.m = 7, .n = 2, .k = 512 + edge, .c_dtype = c_dtype, .accumulate = accumulate});
        check({.m = 385,
               .n = 513,
               .k = 1024 + edge,
               .c_dtype = c_dtype,
               .transpose_b = true,
               .accumulate = accumulate});
      }
    }
  }
}

TEST_CASE("widened products are rounded once, however k is cut", "[matmul]") {
  // As for matmul: 256 + 1 + 2^-8 is 258 in bf16, and 256 where the product is rounded before.
  Case test{.m = 1, .n = 1, .k = 1025, .accumulate = true};
  Operands operands(test);
  auto* a = static_cast<Bf16*>(operands.a.data());
  auto* b = static_cast<Bf16*>(operands.b.data());
  for (int i = 0; i < 1025; ++i) a[i] = b[i] = to_bf16(0.0F);
  for (const int i : {0, 1024}) b[i] = to_bf16(1.0F);
  a[0] = to_bf16(1.0F);
  a[1024] = to_bf16(0x1p-8F);
  *static_cast<Bf16*>(operands.c.data()) = to_bf16(256.0F);
  const auto product = product_of(test, operands);
  product->run(a, b, operands.c.data());
  CHECK(operands.c.at(0, 0) == 258.0);
  a[512] = to_bf16(std::numeric_limits<float>::infinity());
  b[512] = to_bf16(1.0F);
  product->run(a, b, operands.c.data());
  CHECK(std::isinf(operands.c.at(0, 0)));
  b[512] = to_bf16(0.0F);
  product->run(a, b, operands.c.data());
  CHECK(std::isnan(operands.c.at(0, 0)));
}

TEST_CASE("oneDNN can be kept from what this CPU has more than AVX2", "[matmul]") {
  const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (most == nullptr || std::string_view(most) != "AVX2") return;
  CHECK_FALSE(host::has_bf16_gemm());
}

}  // namespace
}  // namespace strata::gpu
