#include "gpu/cuda/matmul.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/unique_handle.h"
#include "gpu/cuda/cublaslt.h"
#include "gpu/cuda/cuda_error.h"

namespace strata::gpu::cuda {
namespace {

constexpr uint32_t kPointerAlignment = 16;

std::string_view words_of(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED: no context, or too little device memory for one";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED: out of memory";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE: arguments that contradict each other";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH: not for this device";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED: the device refused the launch or failed before it";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED: no such product on this device";
    default:
      return "";
  }
}

void check_cublas(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string_view words = words_of(status);
  throw failure(fmt::format("cannot {}: cuBLASLt answered {}", what,
                            words.empty() ? std::to_string(status) : std::string(words)));
}

/// An owned object of cuBLASLt.
template <class Handle, auto CublasLt::*destroy>
struct Traits {
  using Type = Handle;
  static constexpr Type invalid() noexcept { return nullptr; }
  static void close(Type handle) noexcept { static_cast<void>((cublaslt().*destroy)(handle)); }
};
using UniqueLt = UniqueHandle<Traits<cublasLtHandle_t, &CublasLt::destroy>>;
using UniqueDesc = UniqueHandle<Traits<cublasLtMatmulDesc_t, &CublasLt::desc_destroy>>;
using UniqueLayout = UniqueHandle<Traits<cublasLtMatrixLayout_t, &CublasLt::layout_destroy>>;
using UniquePreference =
    UniqueHandle<Traits<cublasLtMatmulPreference_t, &CublasLt::preference_destroy>>;

cudaDataType_t data_type(DType dtype) { return dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F; }

UniqueLayout create_layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check_cublas(cublaslt().layout_create(&layout, data_type(dtype), static_cast<uint64_t>(rows),
                                        static_cast<uint64_t>(columns), stride),
               "describe a matrix");
  return UniqueLayout::adopt(layout);
}

template <class Value>
void set(const UniqueDesc& desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
  check_cublas(cublaslt().desc_set(desc.get(), attribute, &value, sizeof value),
               "describe a matrix product");
}

template <class Value>
void set(const UniquePreference& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         Value value) {
  check_cublas(cublaslt().preference_set(preference.get(), attribute, &value, sizeof value),
               "say what matters in a matrix product");
}

std::string describe(const MatmulArgs& args) {
  return fmt::format("multiply {} x {} x {} ({} to {}, transpose {}{}, {}, strides {}, {}, {})",
                     args.m, args.n, args.k, name_of(args.dtype), name_of(args.c_dtype),
                     args.transpose_a ? 'A' : '-', args.transpose_b ? 'B' : '-',
                     args.accumulate ? "accumulated" : "written", args.a_stride, args.b_stride,
                     args.c_stride);
}

void check_cublas(cublasStatus_t status, const MatmulArgs& args) {
  if (status != CUBLAS_STATUS_SUCCESS) check_cublas(status, describe(args));
}

/// All that a choice of algorithm depends on.
auto key_of(const MatmulArgs& args) {
  return std::tuple(args.m, args.n, args.k, args.dtype, args.c_dtype, args.transpose_a,
                    args.transpose_b, args.accumulate, args.a_stride, args.b_stride, args.c_stride);
}
using Key = decltype(key_of(MatmulArgs{}));

/// cuBLASLt reads matrices by columns, in which a row-major matrix is its transpose. So the product
/// asked of it is C^T = op(B)^T * op(A)^T: B stands first, rows of C are columns.
struct Product {
  UniqueDesc desc;
  UniqueLayout first, second, result;
  cublasLtMatmulAlgo_t algorithm{};
};

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kPointerAlignment == 0;
}

void check(const MatmulArgs& args) {
  STRATA_CHECK(args.m >= 0 && args.n >= 0 && args.k >= 0, "sizes must not be negative");
  STRATA_CHECK(args.c_dtype == args.dtype || args.c_dtype == DType::kF32,
               "a product is of its operands' type or fp32");
  const int64_t a_rows = args.transpose_a ? args.k : args.m;
  const int64_t b_rows = args.transpose_b ? args.n : args.k;
  STRATA_CHECK((a_rows == 0 || args.a_stride >= (args.transpose_a ? args.m : args.k)) &&
                   (b_rows == 0 || args.b_stride >= (args.transpose_b ? args.k : args.n)) &&
                   (args.m == 0 || args.c_stride >= args.n),
               "a row stride must be at least the row's length");
  STRATA_CHECK(is_aligned(args.a) && is_aligned(args.b) && is_aligned(args.c),
               "matrices must be aligned to 16 bytes");
}

/// C of a product without terms.
void zero(const MatmulArgs& args, StreamHandle stream) {
  const size_t size = size_of(args.c_dtype);
  for (int64_t row = 0; row < args.m; ++row) {
    cuda::check(cudaMemsetAsync(static_cast<std::byte*>(args.c) +
                                    static_cast<size_t>(row * args.c_stride) * size,
                                0, static_cast<size_t>(args.n) * size, stream),
                "clear a matrix");
  }
}

}  // namespace

class Matmul::Impl {
 public:
  explicit Impl(size_t workspace_bytes) : workspace_bytes_(workspace_bytes) {
    cublasLtHandle_t handle = nullptr;
    check_cublas(cublaslt().create(&handle), "set up cuBLASLt");
    handle_.reset(handle);
  }

  [[nodiscard]] size_t workspace_bytes() const noexcept { return workspace_bytes_; }

  void run(const MatmulArgs& args, StreamHandle stream) {
    check(args);
    if (args.m == 0 || args.n == 0) return;
    if (args.k == 0) {
      if (!args.accumulate) zero(args, stream);
      return;
    }
    const auto key = key_of(args);
    auto found = products_.find(key);
    if (found == products_.end()) found = products_.emplace(key, find(args)).first;
    const Product& product = found->second;
    const float alpha = 1;
    const float beta = args.accumulate ? 1 : 0;
    check_cublas(
        cublaslt().matmul(handle_.get(), product.desc.get(), &alpha, args.b, product.first.get(),
                          args.a, product.second.get(), &beta, args.c, product.result.get(), args.c,
                          product.result.get(), &product.algorithm, workspace(args.scratch),
                          workspace_bytes_, stream),
        args);
  }

 private:
  static void* workspace(void* scratch) {
    STRATA_CHECK(scratch != nullptr, "a product needs its scratch");
    return reinterpret_cast<void*>(
        align_up(reinterpret_cast<uintptr_t>(scratch), kMatmulWorkspaceAlignment));
  }

  [[nodiscard]] Product find(const MatmulArgs& args) const {
    Product product;
    cublasLtMatmulDesc_t desc = nullptr;
    check_cublas(cublaslt().desc_create(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F), args);
    product.desc.reset(desc);
    set(product.desc, CUBLASLT_MATMUL_DESC_TRANSA, args.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(product.desc, CUBLASLT_MATMUL_DESC_TRANSB, args.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    // Rows as they lie in memory are columns here.
    product.first = create_layout(args.dtype, args.transpose_b ? args.k : args.n,
                                  args.transpose_b ? args.n : args.k, args.b_stride);
    product.second = create_layout(args.dtype, args.transpose_a ? args.m : args.k,
                                   args.transpose_a ? args.k : args.m, args.a_stride);
    product.result = create_layout(args.c_dtype, args.n, args.m, args.c_stride);

    cublasLtMatmulPreference_t created = nullptr;
    check_cublas(cublaslt().preference_create(&created), args);
    const auto preference = UniquePreference::adopt(created);
    set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(workspace_bytes_));
    set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(preference, attribute, kPointerAlignment);
    }
    cublasLtMatmulHeuristicResult_t best{};
    int results = 0;
    check_cublas(
        cublaslt().get_heuristic(handle_.get(), product.desc.get(), product.first.get(),
                                 product.second.get(), product.result.get(), product.result.get(),
                                 preference.get(), 1, &best, &results),
        args);
    if (results < 1) check_cublas(CUBLAS_STATUS_NOT_SUPPORTED, args);
    check_cublas(best.state, args);
    product.algorithm = best.algo;
    return product;
  }

  size_t workspace_bytes_;
  UniqueLt handle_;
  std::map<Key, Product> products_;
};

Matmul::Matmul(size_t workspace_bytes) : impl_(std::make_unique<Impl>(workspace_bytes)) {}
Matmul::~Matmul() = default;

size_t Matmul::scratch_bytes() const noexcept {
  return matmul_scratch_bytes(impl_->workspace_bytes());
}

void Matmul::run(const MatmulArgs& args, StreamHandle stream) { impl_->run(args, stream); }

}  // namespace strata::gpu::cuda
