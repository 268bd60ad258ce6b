// The CUDA runtime API: streams, events, and what launch.cuh needs.
#include <chrono>

#include "cuda_emulator/api.h"
#include "cuda_emulator/kernel.h"

namespace strata::gpu::cuda::emulator {

cudaError_t launch_kernel(const LaunchRequest& request, std::function<void()> thread) {
  Runtime& runtime = Runtime::instance();
  if (const cudaError_t error = runtime.begin(Call::kLaunch); error != cudaSuccess) {
    return finish(error);
  }
  const dim3 block = request.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  constexpr unsigned kMostBlocksAside = 65535;  // In y and z.
  if (threads == 0 || threads > 1024 || block.z > 64 || request.grid.x > INT32_MAX ||
      request.grid.y > kMostBlocksAside || request.grid.z > kMostBlocksAside) {
    return finish(cudaErrorInvalidConfiguration);
  }
  if (request.shared_bytes > shared_bytes_limit(runtime.settings())) {
    return finish(cudaErrorInvalidValue);
  }
  KernelLaunch launch;
  launch.name = request.name;
  launch.grid = request.grid;
  launch.block = block;
  launch.shared_bytes = request.shared_bytes;
  launch.pointers.assign(request.pointers.begin(), request.pointers.end());
  launch.thread = std::move(thread);
  return finish(runtime.enqueue_kernel(request.stream, std::move(launch)));
}

}  // namespace strata::gpu::cuda::emulator

using strata::gpu::cuda::emulator::Call;
using strata::gpu::cuda::emulator::finish;
using strata::gpu::cuda::emulator::Runtime;
using strata::gpu::cuda::emulator::TicketPtr;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  const cudaError_t error = Runtime::instance().begin(Call::kStreamCreate);
  if (error != cudaSuccess) return finish(error);
  return finish(
      Runtime::instance().create_stream(stream, (flags & cudaStreamNonBlocking) == 0, priority));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = Runtime::instance().destroy_stream(stream);
  const cudaError_t ready = Runtime::instance().ready();
  return finish(ready != cudaSuccess ? ready : error);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const cudaError_t error = Runtime::instance().begin(Call::kSynchronize);
  // The wait comes first even on a lost device: its streams still drain.
  const cudaError_t ended = Runtime::instance().synchronize(stream);
  return finish(error != cudaSuccess ? error : ended);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return finish(Runtime::instance().query(stream));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned /*flags*/) {
  const cudaError_t error = Runtime::instance().ready();
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().wait_event(stream, event));
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  if (!Runtime::instance().is_stream(stream)) return finish(cudaErrorInvalidResourceHandle);
  *priority = stream == nullptr || stream == cudaStreamLegacy ? 0 : stream->priority;
  return finish(Runtime::instance().ready());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t error = Runtime::instance().ready();
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().enqueue(stream, [=] {
    function(data);
    return cudaSuccess;
  }));
}

cudaError_t cudaDeviceSynchronize() {
  const cudaError_t error = Runtime::instance().begin(Call::kSynchronize);
  const cudaError_t ended = Runtime::instance().synchronize_all();
  return finish(error != cudaSuccess ? error : ended);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const cudaError_t error = Runtime::instance().begin(Call::kEventCreate);
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().create_event(event, (flags & cudaEventDisableTiming) == 0));
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t error = Runtime::instance().destroy_event(event);
  const cudaError_t ready = Runtime::instance().ready();
  return finish(ready != cudaSuccess ? ready : error);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const cudaError_t error = Runtime::instance().begin(Call::kEventRecord);
  if (error != cudaSuccess) return finish(error);
  return finish(Runtime::instance().record(event, stream));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  TicketPtr ticket;
  const cudaError_t error = Runtime::instance().event_ticket(event, &ticket);
  if (error != cudaSuccess) return finish(error);
  if (ticket != nullptr && !ticket->reached()) return cudaErrorNotReady;
  return finish(Runtime::instance().ready());
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const cudaError_t fault = Runtime::instance().begin(Call::kSynchronize);
  TicketPtr ticket;
  const cudaError_t error = Runtime::instance().event_ticket(event, &ticket);
  if (error != cudaSuccess) return finish(error);
  if (ticket != nullptr) ticket->wait();
  return finish(fault != cudaSuccess ? fault : Runtime::instance().ready());
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  TicketPtr first;
  TicketPtr last;
  if (Runtime::instance().event_ticket(start, &first) != cudaSuccess ||
      Runtime::instance().event_ticket(end, &last) != cudaSuccess || !start->timing ||
      !end->timing || first == nullptr || last == nullptr) {
    return finish(cudaErrorInvalidResourceHandle);
  }
  if (!first->reached() || !last->reached()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(last->time() - first->time()).count();
  return finish(Runtime::instance().ready());
}

cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute attribute, int value) {
  using strata::gpu::cuda::emulator::shared_bytes_limit;
  const cudaError_t error = Runtime::instance().ready();
  if (error != cudaSuccess) return finish(error);
  const bool fits =
      attribute != cudaFuncAttributeMaxDynamicSharedMemorySize ||
      static_cast<size_t>(value) <= shared_bytes_limit(Runtime::instance().settings());
  return finish(fits ? cudaSuccess : cudaErrorInvalidValue);
}

}  // extern "C"
