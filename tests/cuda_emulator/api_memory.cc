// The CUDA runtime API: memory, copies and fills.
#include <cstring>

#include "cuda_emulator/api.h"

namespace strata::gpu::cuda::emulator {

namespace {

using Overlap = RangeMap::Overlap;

struct Copy {
  void* to;
  const void* from;
  size_t size_bytes;
  cudaMemcpyKind kind;
};

const char* name(cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return "from host to host";
    case cudaMemcpyHostToDevice:
      return "from host to device";
    case cudaMemcpyDeviceToHost:
      return "from device to host";
    case cudaMemcpyDeviceToDevice:
      return "within the device";
    case cudaMemcpyDefault:
      break;
  }
  return "of a direction by address";
}

/// Whether one end of a copy is where the copy's kind says; `pageable` is set when it is host
/// memory that is not page-locked.
bool check_end(const void* pointer, size_t size_bytes, bool device, bool either, bool* pageable) {
  Runtime& runtime = Runtime::instance();
  const Overlap in_device = runtime.device_overlap(pointer, size_bytes);
  if (either) device = in_device != Overlap::kNone;
  if (device) return in_device == Overlap::kInside;
  if (in_device != Overlap::kNone) return false;
  const Overlap in_pinned = runtime.pinned_overlap(pointer, size_bytes);
  *pageable = *pageable || in_pinned == Overlap::kNone;
  return in_pinned != Overlap::kPartial;
}

cudaError_t copy(const Copy& request, cudaStream_t stream, bool blocking) {
  Runtime& runtime = Runtime::instance();
  if (const cudaError_t error = runtime.begin(Call::kMemcpy); error != cudaSuccess) return error;
  if (request.size_bytes == 0) return cudaSuccess;
  const cudaMemcpyKind kind = request.kind;
  const bool either = kind == cudaMemcpyDefault;
  bool pageable = false;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const char* wrong = nullptr;
  if (!check_end(request.to, request.size_bytes, to_device, either, &pageable)) {
    wrong = "destination";
  } else if (!check_end(request.from, request.size_bytes, from_device, either, &pageable)) {
    wrong = "source";
  }
  if (wrong != nullptr) {
    diagnose("a copy of " + std::to_string(request.size_bytes) + " bytes " + name(kind) + ": its " +
             wrong + " is not within one allocation there");
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = runtime.enqueue(stream, [request] {
    std::memmove(request.to, request.from, request.size_bytes);
    return cudaSuccess;
  });
  if (error != cudaSuccess) return error;
  runtime.count_copy(pageable && !blocking);
  return blocking || pageable ? runtime.synchronize(stream) : cudaSuccess;
}

cudaError_t fill(void* pointer, int value, size_t size_bytes, cudaStream_t stream, bool blocking) {
  Runtime& runtime = Runtime::instance();
  if (const cudaError_t error = runtime.begin(Call::kMemset); error != cudaSuccess) return error;
  if (size_bytes == 0) return cudaSuccess;
  if (!accessible(pointer, size_bytes)) {
    diagnose("a fill of " + std::to_string(size_bytes) +
             " bytes is not within one allocation of device memory");
    return cudaErrorInvalidValue;
  }
  const cudaError_t error = runtime.enqueue(stream, [=] {
    std::memset(pointer, value, size_bytes);
    return cudaSuccess;
  });
  return error == cudaSuccess && blocking ? runtime.synchronize(stream) : error;
}

}  // namespace

}  // namespace strata::gpu::cuda::emulator

using strata::gpu::cuda::emulator::Call;
using strata::gpu::cuda::emulator::finish;
using strata::gpu::cuda::emulator::Runtime;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t size_bytes) {
  const cudaError_t error = Runtime::instance().begin(Call::kMalloc);
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().allocate_device(pointer, size_bytes));
}

cudaError_t cudaFree(void* pointer) {
  // The memory goes even when the call tells of an error: the process could do nothing else with
  // it.
  const cudaError_t error = Runtime::instance().begin(Call::kFree);
  const cudaError_t freed = Runtime::instance().free_device(pointer);
  return finish(error != cudaSuccess ? error : freed);
}

cudaError_t cudaMallocHost(void** pointer, size_t size_bytes) {
  const cudaError_t error = Runtime::instance().begin(Call::kHostAlloc);
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().allocate_pinned(pointer, size_bytes));
}

cudaError_t cudaHostAlloc(void** pointer, size_t size_bytes, unsigned /*flags*/) {
  return cudaMallocHost(pointer, size_bytes);
}

cudaError_t cudaFreeHost(void* pointer) { return finish(Runtime::instance().free_pinned(pointer)); }

cudaError_t cudaHostRegister(void* pointer, size_t size_bytes, unsigned /*flags*/) {
  const cudaError_t error = Runtime::instance().begin(Call::kHostRegister);
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().register_pinned(pointer, size_bytes));
}

cudaError_t cudaHostUnregister(void* pointer) {
  const cudaError_t error = Runtime::instance().unregister_pinned(pointer);
  const cudaError_t ready = Runtime::instance().ready();
  return finish(ready != cudaSuccess ? ready : error);
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = 0;
  const cudaError_t error = Runtime::instance().ready();
  if (error != cudaSuccess) return finish(error);
  *free_bytes = Runtime::instance().free_bytes();
  *total_bytes = Runtime::instance().settings().memory_bytes;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  using Overlap = strata::gpu::cuda::emulator::RangeMap::Overlap;
  const cudaError_t error = Runtime::instance().ready();
  if (error != cudaSuccess) return finish(error);
  const bool device = Runtime::instance().device_overlap(pointer, 1) == Overlap::kInside;
  const bool pinned = Runtime::instance().pinned_overlap(pointer, 1) == Overlap::kInside;
  *attributes = {};
  attributes->type = device   ? cudaMemoryTypeDevice
                     : pinned ? cudaMemoryTypeHost
                              : cudaMemoryTypeUnregistered;
  attributes->devicePointer = device || pinned ? const_cast<void*>(pointer) : nullptr;
  attributes->hostPointer = pinned ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind) {
  return finish(strata::gpu::cuda::emulator::copy({to, from, size_bytes, kind}, nullptr, true));
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return finish(strata::gpu::cuda::emulator::copy({to, from, size_bytes, kind}, stream, false));
}

cudaError_t cudaMemset(void* pointer, int value, size_t size_bytes) {
  return finish(strata::gpu::cuda::emulator::fill(pointer, value, size_bytes, nullptr, true));
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t size_bytes, cudaStream_t stream) {
  return finish(strata::gpu::cuda::emulator::fill(pointer, value, size_bytes, stream, false));
}

}  // extern "C"
