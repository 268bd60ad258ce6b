#include "gpu/cuda/cuda_operators.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <exception>

#include "gpu/cuda/cuda_error.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/kernels.h"

namespace strata::gpu::cuda {

template <class Launch>
void CudaOperators::run(Stream& stream, const Launch& launch) noexcept {
  if (error_.is_set()) return;
  StreamHandle handle = static_cast<CudaStream&>(stream).handle();
  try {
    check(cudaSetDevice(ordinal_), "make the device current");
    launch(handle);
  } catch (...) {
    // A launch that is refused because the device is lost says nothing of what was the matter.
    if (const cudaError_t status = cudaStreamQuery(handle); is_lost(status)) {
      error_.keep(std::make_exception_ptr(
          cuda_error(status, fmt::format("finish the work of stream '{}'", stream.name()))));
    } else {
      error_.keep(std::current_exception());
    }
  }
}

size_t CudaOperators::matmul_scratch_bytes(const MatmulArgs& /*args*/) const {
  return matmul_.scratch_bytes();
}

void CudaOperators::matmul(const MatmulArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { matmul_.run(args, handle); });
}

void CudaOperators::rms_norm(const RmsNormArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::rms_norm(args, handle); });
}

void CudaOperators::residual_rms_norm(const ResidualRmsNormArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::residual_rms_norm(args, handle); });
}

size_t CudaOperators::rms_norm_backward_scratch_bytes(const RmsNormBackwardArgs& args) const {
  return cuda::rms_norm_backward_scratch_bytes(args);
}

void CudaOperators::rms_norm_backward(const RmsNormBackwardArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::rms_norm_backward(args, handle); });
}

void CudaOperators::rotary(const RotaryArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::rotary(args, handle); });
}

size_t CudaOperators::attention_scratch_bytes(const AttentionArgs& args) const {
  return cuda::attention_scratch_bytes(args);
}

void CudaOperators::attention(const AttentionArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::attention(args, handle); });
}

size_t CudaOperators::attention_backward_scratch_bytes(const AttentionBackwardArgs& args) const {
  return cuda::attention_backward_scratch_bytes(args);
}

void CudaOperators::attention_backward(const AttentionBackwardArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::attention_backward(args, handle); });
}

void CudaOperators::swiglu(const SwigluArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::swiglu(args, handle); });
}

void CudaOperators::swiglu_backward(const SwigluBackwardArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::swiglu_backward(args, handle); });
}

void CudaOperators::embedding(const EmbeddingArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::embedding(args, handle); });
}

size_t CudaOperators::embedding_backward_scratch_bytes(const EmbeddingBackwardArgs& args) const {
  return cuda::embedding_backward_scratch_bytes(args);
}

void CudaOperators::embedding_backward(const EmbeddingBackwardArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::embedding_backward(args, handle); });
}

size_t CudaOperators::cross_entropy_scratch_bytes(const CrossEntropyArgs& args) const {
  return cuda::cross_entropy_scratch_bytes(args);
}

void CudaOperators::cross_entropy(const CrossEntropyArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::cross_entropy(args, handle); });
}

void CudaOperators::add(const AddArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::add(args, handle); });
}

void CudaOperators::cast(const CastArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::cast(args, handle); });
}

size_t CudaOperators::finish_gradient_scratch_bytes(const FinishGradientArgs& args) const {
  return cuda::finish_gradient_scratch_bytes(args);
}

void CudaOperators::finish_gradient(const FinishGradientArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::finish_gradient(args, handle); });
}

void CudaOperators::adam(const AdamArgs& args, Stream& stream) {
  run(stream, [&](StreamHandle handle) { cuda::adam(args, handle); });
}

}  // namespace strata::gpu::cuda
