// cuBLASLt, loaded when a CUDA device is created. Linked, it would cost every start of the program
// 50 ms and 150 MB of resident memory (cuBLASLt 13.1), also where nothing computes on a GPU, and
// keep the program from starting where it is missing.
#pragma once

#include <cublasLt.h>

namespace strata::gpu::cuda {

/// The functions that are used, under their own names without the prefix.
struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) get_heuristic;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
};

/// Loads the library once for the whole process, which keeps it. Looks where the system does, then
/// in the toolkit that this was built with. Throws a failure that says what was looked for.
[[nodiscard]] const CublasLt& cublaslt();

}  // namespace strata::gpu::cuda
