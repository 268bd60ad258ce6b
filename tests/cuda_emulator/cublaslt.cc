// A stand-in for the part of cuBLASLt that is used: checks what it is told as the library would,
// and more, and multiplies in double.
#include <cublasLt.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "cuda_emulator/emulator.h"
#include "gpu/cuda/cublaslt.h"

namespace strata::gpu::cuda {
namespace {

using emulator::accessible;
using emulator::Call;

constexpr uint32_t kDefaultAlignment = 256;
constexpr size_t kWorkspaceAlignment = 256;

/// What the library's opaque handles point to. `kind` tells them apart, and from freed ones.
enum class Kind : uint32_t { kFreed, kLibrary = 0xCB0001, kDesc, kLayout, kPreference };

struct Object {
  explicit Object(Kind its_kind) : kind(its_kind) {}
  Kind kind;
};

struct Library : Object {
  Library() : Object(Kind::kLibrary) {}
};

struct Desc : Object {
  Desc() : Object(Kind::kDesc) {}
  cublasOperation_t first = CUBLAS_OP_N;
  cublasOperation_t second = CUBLAS_OP_N;
};

struct Layout : Object {
  Layout() : Object(Kind::kLayout) {}
  cudaDataType type = CUDA_R_32F;
  uint64_t rows = 0, columns = 0;
  int64_t leading = 0;
};

struct Preference : Object {
  Preference() : Object(Kind::kPreference) {}
  uint64_t workspace_bytes = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {kDefaultAlignment, kDefaultAlignment, kDefaultAlignment,
                           kDefaultAlignment};
};

/// What an algorithm was found for; it fits nothing else.
struct Algorithm {
  uint64_t shape;  // a hash of all that describes the product
  uint64_t workspace_bytes;
  uint32_t alignment[4];
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

cublasStatus_t refuse(cublasStatus_t status, const std::string& message) {
  emulator::diagnose("cuBLASLt: " + message);
  return status;
}

template <class T, class Handle>
T* as(Handle handle, Kind kind) {
  auto* object = reinterpret_cast<T*>(handle);
  return object != nullptr && object->kind == kind ? object : nullptr;
}

template <class T, class Handle>
cublasStatus_t destroy(Handle handle, Kind kind) {
  std::unique_ptr<T> object(as<T>(handle, kind));
  if (!object) return refuse(CUBLAS_STATUS_INVALID_VALUE, "an object that is none is destroyed");
  object->kind = Kind::kFreed;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
bool read_value(const void* buffer, size_t size_bytes, T& value) {
  if (buffer == nullptr || size_bytes != sizeof value) return false;
  std::memcpy(&value, buffer, sizeof value);
  return true;
}

size_t size_of(cudaDataType type) { return type == CUDA_R_16BF ? 2 : 4; }

/// A column-major matrix in memory.
struct Matrix {
  const std::byte* data = nullptr;
  Layout layout;

  [[nodiscard]] size_t extent_bytes() const {
    return layout.columns == 0
               ? 0
               : (static_cast<size_t>(layout.leading) * (layout.columns - 1) + layout.rows) *
                     size_of(layout.type);
  }
  [[nodiscard]] size_t offset_bytes(uint64_t row, uint64_t column) const {
    return (row + static_cast<size_t>(layout.leading) * column) * size_of(layout.type);
  }
  [[nodiscard]] double at(uint64_t row, uint64_t column) const {
    const std::byte* from = data + offset_bytes(row, column);
    if (layout.type == CUDA_R_16BF) {
      Bf16 value{};
      std::memcpy(&value, from, sizeof value);
      return static_cast<double>(to_float(value));
    }
    float value = 0;
    std::memcpy(&value, from, sizeof value);
    return static_cast<double>(value);
  }
};

void store(const Matrix& matrix, std::byte* data, uint64_t row, uint64_t column, double value) {
  std::byte* to = data + matrix.offset_bytes(row, column);
  const auto single = static_cast<float>(value);
  if (matrix.layout.type == CUDA_R_16BF) {
    const Bf16 rounded = to_bf16(single);
    std::memcpy(to, &rounded, sizeof rounded);
  } else {
    std::memcpy(to, &single, sizeof single);
  }
}

struct Product {
  Desc desc;
  Matrix first, second, result;
  std::byte* out = nullptr;
  float alpha = 1, beta = 0;

  [[nodiscard]] uint64_t rows() const { return result.layout.rows; }
  [[nodiscard]] uint64_t columns() const { return result.layout.columns; }
  [[nodiscard]] uint64_t depth() const {
    return desc.first == CUBLAS_OP_N ? first.layout.columns : first.layout.rows;
  }
};

/// Empty where the library can do it.
std::string objection(const Product& product) {
  const auto& [desc, first, second, result, out, alpha, beta] = product;
  for (const Matrix* matrix : {&first, &second, &result}) {
    const Layout& layout = matrix->layout;
    if (layout.rows == 0 || layout.columns == 0) return "a matrix without elements";
    if (layout.leading < static_cast<int64_t>(layout.rows)) {
      return "a leading dimension of " + std::to_string(layout.leading) + " for " +
             std::to_string(layout.rows) + " rows";
    }
    if (layout.type != CUDA_R_16BF && layout.type != CUDA_R_32F) return "an unknown type";
  }
  if (first.layout.type != second.layout.type ||
      (first.layout.type == CUDA_R_32F && result.layout.type != CUDA_R_32F)) {
    return "types that do not go together";
  }
  const bool first_turned = desc.first != CUBLAS_OP_N;
  const bool second_turned = desc.second != CUBLAS_OP_N;
  if ((first_turned ? first.layout.columns : first.layout.rows) != product.rows() ||
      (second_turned ? second.layout.rows : second.layout.columns) != product.columns() ||
      (second_turned ? second.layout.columns : second.layout.rows) != product.depth()) {
    return "sizes that do not go together";
  }
  return "";
}

uint64_t hash_of(const Product& product) {
  uint64_t hash = 14695981039346656037U;
  const auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 1099511628211U; };
  mix(product.desc.first);
  mix(product.desc.second);
  for (const Matrix* matrix : {&product.first, &product.second, &product.result}) {
    mix(matrix->layout.type);
    mix(matrix->layout.rows);
    mix(matrix->layout.columns);
    mix(static_cast<uint64_t>(matrix->layout.leading));
  }
  return hash;
}

cudaError_t multiply(const Product& product) {
  const auto may_use = [](const Matrix& matrix) {
    return accessible(matrix.data, matrix.extent_bytes());
  };
  Matrix result = product.result;
  result.data = product.out;
  if (!may_use(product.first) || !may_use(product.second) || !may_use(result)) {
    emulator::diagnose("cuBLASLt: a matrix reaches beyond its memory");
    return cudaErrorIllegalAddress;
  }
  const uint64_t rows = product.rows();
  const uint64_t columns = product.columns();
  const uint64_t depth = product.depth();
  std::vector<double> first(rows * depth);  // by columns
  for (uint64_t k = 0; k < depth; ++k) {
    for (uint64_t i = 0; i < rows; ++i) {
      first[k * rows + i] =
          product.desc.first == CUBLAS_OP_N ? product.first.at(i, k) : product.first.at(k, i);
    }
  }
  std::vector<double> sums(rows);
  for (uint64_t j = 0; j < columns; ++j) {
    for (double& sum : sums) sum = 0;
    for (uint64_t k = 0; k < depth; ++k) {
      const double factor =
          product.desc.second == CUBLAS_OP_N ? product.second.at(k, j) : product.second.at(j, k);
      const double* column = first.data() + k * rows;
      for (uint64_t i = 0; i < rows; ++i) sums[i] += column[i] * factor;
    }
    for (uint64_t i = 0; i < rows; ++i) {
      double value = static_cast<double>(product.alpha) * sums[i];
      // With beta 0 the old values do not count, NaNs among them.
      if (product.beta != 0) value += static_cast<double>(product.beta) * result.at(i, j);
      store(result, product.out, i, j, value);
    }
  }
  return cudaSuccess;
}

bool is_aligned(const void* pointer, size_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt functions{.create = &cublasLtCreate,
                                  .destroy = &cublasLtDestroy,
                                  .matmul = &cublasLtMatmul,
                                  .get_heuristic = &cublasLtMatmulAlgoGetHeuristic,
                                  .desc_create = &cublasLtMatmulDescCreate,
                                  .desc_destroy = &cublasLtMatmulDescDestroy,
                                  .desc_set = &cublasLtMatmulDescSetAttribute,
                                  .layout_create = &cublasLtMatrixLayoutCreate,
                                  .layout_destroy = &cublasLtMatrixLayoutDestroy,
                                  .preference_create = &cublasLtMatmulPreferenceCreate,
                                  .preference_destroy = &cublasLtMatmulPreferenceDestroy,
                                  .preference_set = &cublasLtMatmulPreferenceSetAttribute};
  return functions;
}

}  // namespace strata::gpu::cuda

using namespace strata::gpu::cuda;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(std::make_unique<Library>().release());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  return destroy<Library>(handle, Kind::kLibrary);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc,
                                        cublasComputeType_t compute_type,
                                        cudaDataType_t scale_type) {
  if (compute_type != CUBLAS_COMPUTE_32F || scale_type != CUDA_R_32F) {
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "products are computed in fp32");
  }
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(std::make_unique<Desc>().release());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return destroy<Desc>(desc, Kind::kDesc);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* buffer, size_t size_bytes) {
  auto* desc = as<Desc>(handle, Kind::kDesc);
  int32_t operation = 0;
  const bool known =
      attribute == CUBLASLT_MATMUL_DESC_TRANSA || attribute == CUBLASLT_MATMUL_DESC_TRANSB;
  if (desc == nullptr || !known || !read_value(buffer, size_bytes, operation) ||
      (operation != CUBLAS_OP_N && operation != CUBLAS_OP_T)) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE,
                  "attribute " + std::to_string(attribute) + " of a product is not taken");
  }
  (attribute == CUBLASLT_MATMUL_DESC_TRANSA ? desc->first : desc->second) =
      static_cast<cublasOperation_t>(operation);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* handle, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t leading) {
  auto layout = std::make_unique<Layout>();
  layout->type = type;
  layout->rows = rows;
  layout->columns = columns;
  layout->leading = leading;
  *handle = reinterpret_cast<cublasLtMatrixLayout_t>(layout.release());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy<Layout>(layout, Kind::kLayout);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference =
      reinterpret_cast<cublasLtMatmulPreference_t>(std::make_unique<Preference>().release());
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy<Preference>(preference, Kind::kPreference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* buffer, size_t size_bytes) {
  auto* preference = as<Preference>(handle, Kind::kPreference);
  bool taken = false;
  if (preference != nullptr) {
    switch (attribute) {
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        taken = read_value(buffer, size_bytes, preference->workspace_bytes);
        break;
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        taken = read_value(buffer, size_bytes, preference->reductions);
        break;
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        taken = read_value(
            buffer, size_bytes,
            preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES]);
        break;
      default:
        break;
    }
  }
  if (taken) return CUBLAS_STATUS_SUCCESS;
  return refuse(CUBLAS_STATUS_INVALID_VALUE,
                "preference " + std::to_string(attribute) + " is not taken");
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t first,
    cublasLtMatrixLayout_t second, cublasLtMatrixLayout_t addend, cublasLtMatrixLayout_t result,
    cublasLtMatmulPreference_t preference_handle, int wanted,
    cublasLtMatmulHeuristicResult_t results[], int* found) {
  *found = 0;
  const auto* preference = as<Preference>(preference_handle, Kind::kPreference);
  if (as<Library>(handle, Kind::kLibrary) == nullptr || preference == nullptr || wanted < 1 ||
      as<Desc>(desc, Kind::kDesc) == nullptr || as<Layout>(first, Kind::kLayout) == nullptr ||
      as<Layout>(second, Kind::kLayout) == nullptr ||
      as<Layout>(result, Kind::kLayout) == nullptr || addend != result) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a heuristic for objects that are none");
  }
  if ((preference->reductions & ~static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) !=
      0) {
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED,
                  "reductions are allowed whose order or rounding is left open");
  }
  const Product product{.desc = *as<Desc>(desc, Kind::kDesc),
                        .first = {.layout = *as<Layout>(first, Kind::kLayout)},
                        .second = {.layout = *as<Layout>(second, Kind::kLayout)},
                        .result = {.layout = *as<Layout>(result, Kind::kLayout)}};
  if (const std::string why = objection(product); !why.empty()) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, why);
  }
  Algorithm algorithm{};
  algorithm.shape = hash_of(product);
  algorithm.workspace_bytes =
      std::min<uint64_t>(preference->workspace_bytes, product.rows() * product.columns() * 8);
  std::memcpy(algorithm.alignment, preference->alignment, sizeof algorithm.alignment);
  results[0] = {};
  std::memcpy(&results[0].algo, &algorithm, sizeof algorithm);
  results[0].workspaceSize = algorithm.workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* chosen,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  if (emulator::begin_call(Call::kMatmul) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
  if (as<Library>(handle, Kind::kLibrary) == nullptr || as<Desc>(desc, Kind::kDesc) == nullptr ||
      as<Layout>(a_layout, Kind::kLayout) == nullptr ||
      as<Layout>(b_layout, Kind::kLayout) == nullptr ||
      as<Layout>(d_layout, Kind::kLayout) == nullptr || c_layout != d_layout || c != d ||
      alpha == nullptr || beta == nullptr || chosen == nullptr) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a product of objects that are none");
  }
  const auto matrix = [](const void* data, cublasLtMatrixLayout_t layout) {
    return Matrix{.data = static_cast<const std::byte*>(data),
                  .layout = *as<Layout>(layout, Kind::kLayout)};
  };
  Product product{.desc = *as<Desc>(desc, Kind::kDesc),
                  .first = matrix(a, a_layout),
                  .second = matrix(b, b_layout),
                  .result = matrix(d, d_layout),
                  .out = static_cast<std::byte*>(d)};
  std::memcpy(&product.alpha, alpha, sizeof product.alpha);
  std::memcpy(&product.beta, beta, sizeof product.beta);
  if (const std::string why = objection(product); !why.empty()) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, why);
  }
  Algorithm algorithm{};
  std::memcpy(&algorithm, chosen, sizeof algorithm);
  if (algorithm.shape != hash_of(product)) {
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "the algorithm was found for another product");
  }
  if (workspace_bytes < algorithm.workspace_bytes || !is_aligned(workspace, kWorkspaceAlignment)) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "the workspace is too small or not aligned");
  }
  if (!is_aligned(a, algorithm.alignment[0]) || !is_aligned(b, algorithm.alignment[1]) ||
      !is_aligned(c, algorithm.alignment[2]) || !is_aligned(d, algorithm.alignment[3])) {
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "a matrix is less aligned than was said");
  }
  const cudaError_t status =
      emulator::enqueue(stream, [product, workspace, used = algorithm.workspace_bytes] {
        if (!accessible(workspace, used)) {
          emulator::diagnose("cuBLASLt: the workspace reaches beyond its memory");
          return cudaErrorIllegalAddress;
        }
        std::memset(workspace, 0xff, used);  // NaNs: nobody else may count on what it holds
        return multiply(product);
      });
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}
