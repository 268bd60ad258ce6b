#include "gpu/cuda/cublaslt.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <string>

#include "base/error.h"

namespace strata::gpu::cuda {
namespace {

constexpr const char* kName = "libcublasLt.so." STRATA_CUDA_MAJOR;

void* open_library() {
  // Local, for nothing but these functions to be found by others.
  if (void* library = dlopen(kName, RTLD_NOW | RTLD_LOCAL); library != nullptr) return library;
  const std::string first = dlerror();
  const std::string in_toolkit = std::string(STRATA_CUDA_LIBRARY_DIR "/") + kName;
  if (void* library = dlopen(in_toolkit.c_str(), RTLD_NOW | RTLD_LOCAL); library != nullptr) {
    return library;
  }
  throw failure(
      fmt::format("cannot load {} for matrix products: {}; install the CUDA toolkit's libraries, "
                  "or name their folder in LD_LIBRARY_PATH",
                  kName, first));
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw failure(fmt::format("{} has no function {}", kName, name));
}

CublasLt load() {
  void* library = open_library();
  CublasLt result{};
  find(library, "cublasLtCreate", result.create);
  find(library, "cublasLtDestroy", result.destroy);
  find(library, "cublasLtMatmul", result.matmul);
  find(library, "cublasLtMatmulAlgoGetHeuristic", result.get_heuristic);
  find(library, "cublasLtMatmulDescCreate", result.desc_create);
  find(library, "cublasLtMatmulDescDestroy", result.desc_destroy);
  find(library, "cublasLtMatmulDescSetAttribute", result.desc_set);
  find(library, "cublasLtMatrixLayoutCreate", result.layout_create);
  find(library, "cublasLtMatrixLayoutDestroy", result.layout_destroy);
  find(library, "cublasLtMatmulPreferenceCreate", result.preference_create);
  find(library, "cublasLtMatmulPreferenceDestroy", result.preference_destroy);
  find(library, "cublasLtMatmulPreferenceSetAttribute", result.preference_set);
  return result;
}

}  // namespace

const CublasLt& cublaslt() {
  static const CublasLt loaded = load();
  return loaded;
}

}  // namespace strata::gpu::cuda
