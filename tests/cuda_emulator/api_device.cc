// The CUDA runtime API: devices, versions, errors.
#include <cstring>
#include <utility>

#include "cuda_emulator/api.h"

namespace strata::gpu::cuda::emulator {

namespace {

constinit thread_local cudaError_t last_error = cudaSuccess;

constexpr size_t kSharedBytesByDefault = 48 * 1024;

struct ErrorName {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorName kErrorNames[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection",
     "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
     "no kernel image is available for execution on the device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorName& find(cudaError_t error) {
  static constexpr ErrorName kUnrecognized{cudaErrorUnknown, "unrecognized error code",
                                           "unrecognized error code"};
  for (const ErrorName& entry : kErrorNames) {
    if (entry.error == error) return entry;
  }
  return kUnrecognized;
}

cudaError_t check_device(int device) {
  Runtime& runtime = Runtime::instance();
  if (const cudaError_t error = runtime.ready(); error != cudaSuccess) return error;
  return device >= 0 && device < runtime.settings().device_count ? cudaSuccess
                                                                 : cudaErrorInvalidDevice;
}

constinit thread_local int current_device = 0;

}  // namespace

cudaError_t finish(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

size_t shared_bytes_limit(const Settings& settings) {
  // CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
  const int capability = settings.compute_major * 10 + settings.compute_minor;
  if (capability == 80 || capability == 87) return 163 * 1024;
  if (capability == 90 || capability == 100 || capability == 103) return 227 * 1024;
  return 99 * 1024;
}

}  // namespace strata::gpu::cuda::emulator

using strata::gpu::cuda::emulator::finish;
using strata::gpu::cuda::emulator::Runtime;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t lost = Runtime::instance().ready();
  const cudaError_t last = std::exchange(strata::gpu::cuda::emulator::last_error, cudaSuccess);
  return lost != cudaSuccess ? lost : last;
}

cudaError_t cudaPeekAtLastError() {
  const cudaError_t lost = Runtime::instance().ready();
  return lost != cudaSuccess ? lost : strata::gpu::cuda::emulator::last_error;
}

const char* cudaGetErrorName(cudaError_t error) {
  return strata::gpu::cuda::emulator::find(error).name;
}

const char* cudaGetErrorString(cudaError_t error) {
  return strata::gpu::cuda::emulator::find(error).text;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const auto settings = Runtime::instance().settings();
  *version = settings.driver_present ? settings.driver_version : 0;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  const cudaError_t error = Runtime::instance().ready();
  *count = error == cudaSuccess ? Runtime::instance().settings().device_count : 0;
  return finish(error);
}

cudaError_t cudaSetDevice(int device) {
  const cudaError_t error = strata::gpu::cuda::emulator::check_device(device);
  if (error == cudaSuccess) strata::gpu::cuda::emulator::current_device = device;
  return finish(error);
}

cudaError_t cudaGetDevice(int* device) {
  *device = strata::gpu::cuda::emulator::current_device;
  return finish(Runtime::instance().ready());
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const cudaError_t error = strata::gpu::cuda::emulator::check_device(device);
  if (error != cudaSuccess) return finish(error);
  const auto settings = Runtime::instance().settings();
  *properties = {};
  std::strncpy(properties->name, settings.name.c_str(), sizeof(properties->name) - 1);
  properties->totalGlobalMem = settings.memory_bytes;
  properties->sharedMemPerBlock = strata::gpu::cuda::emulator::kSharedBytesByDefault;
  properties->sharedMemPerBlockOptin = strata::gpu::cuda::emulator::shared_bytes_limit(settings);
  properties->sharedMemPerMultiprocessor = properties->sharedMemPerBlockOptin + 1024;
  properties->reservedSharedMemPerBlock = 1024;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 1536;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = INT32_MAX;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->major = settings.compute_major;
  properties->minor = settings.compute_minor;
  properties->multiProcessorCount = settings.multiprocessors;
  properties->l2CacheSize = 4 << 20;
  properties->memoryBusWidth = 256;
  properties->asyncEngineCount = 2;
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  properties->hostRegisterSupported = 1;
  properties->concurrentKernels = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  const cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = properties.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      break;
    case cudaDevAttrAsyncEngineCount:
      *value = properties.asyncEngineCount;
      break;
    case cudaDevAttrL2CacheSize:
      *value = properties.l2CacheSize;
      break;
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
      *value = 1;
      break;
    case cudaDevAttrIntegrated:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrCooperativeLaunch:
      *value = 0;
      break;
    default:
      return finish(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return finish(Runtime::instance().ready());
}

cudaError_t cudaDeviceReset() {
  Runtime::instance().reset_device();
  strata::gpu::cuda::emulator::last_error = cudaSuccess;
  return Runtime::instance().ready();
}

}  // extern "C"
