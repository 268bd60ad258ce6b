#include "gpu/cuda/cuda_stream.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <utility>

#include "gpu/cuda/cuda_error.h"

namespace strata::gpu::cuda {

// What fails here has failed before in a call that could say so.

void StreamTraits::close(Type stream) noexcept {
  static_cast<void>(cudaStreamSynchronize(stream));
  static_cast<void>(cudaStreamDestroy(stream));
}

void EventTraits::close(Type event) noexcept { static_cast<void>(cudaEventDestroy(event)); }

CudaEvent::CudaEvent() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
        "create an event");
  event_.reset(event);
}

CudaStream::CudaStream(std::string name) : Stream(std::move(name)) {
  StreamHandle stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
        fmt::format("create stream '{}'", this->name()));
  stream_.reset(stream);
  nvtxNameCudaStreamA(stream, this->name().c_str());
}

int CudaStream::wait() noexcept {
  const cudaError_t recorded = cudaEventRecord(ended_.handle(), handle());
  if (recorded == cudaSuccess) return cudaEventSynchronize(ended_.handle());
  static_cast<void>(cudaStreamSynchronize(handle()));
  return recorded;
}

}  // namespace strata::gpu::cuda
