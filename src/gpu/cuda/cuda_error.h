// What the CUDA runtime answers, as errors of Strata. A status is a cudaError_t; it is an int here
// so that this header needs no toolkit.
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace strata::gpu::cuda {

/// Whether the process has lost its device: after such an error every call fails, and what was in
/// device memory is gone. Only a new process can use the device again.
[[nodiscard]] bool is_lost(int status) noexcept;

/// The error of a call that answered `status`: "cannot WHAT: the runtime's words; what to do". Of
/// kind kDoesNotFit where memory was lacking, else kFailed. WHAT: "copy 16 bytes to the device".
[[nodiscard]] Error cuda_error(int status, std::string_view what);

/// Throws cuda_error() unless `status` is success. Takes the error out of the runtime's memory of
/// the last one, so that no later call is blamed for it.
void check(int status, std::string_view what);

}  // namespace strata::gpu::cuda
