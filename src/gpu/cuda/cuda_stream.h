// A stream and an event of CUDA behind the device's interface.
#pragma once

#include <string>

#include "base/unique_handle.h"
#include "gpu/cuda/kernels.h"
#include "gpu/device.h"

struct CUevent_st;

namespace strata::gpu::cuda {

struct StreamTraits {
  using Type = StreamHandle;
  static constexpr Type invalid() noexcept { return nullptr; }
  static void close(Type stream) noexcept;  // blocks until its work has ended
};

struct EventTraits {
  using Type = CUevent_st*;
  static constexpr Type invalid() noexcept { return nullptr; }
  static void close(Type event) noexcept;
};

/// Without a time stamp; a thread that waits for it sleeps.
class CudaEvent final : public Event {
 public:
  CudaEvent();
  [[nodiscard]] CUevent_st* handle() const noexcept { return event_.get(); }

 private:
  UniqueHandle<EventTraits> event_;
};

/// Waits for no other stream, the legacy default one included. Its name is what profilers show.
class CudaStream final : public Stream {
 public:
  /// On the calling thread's current device.
  explicit CudaStream(std::string name);
  [[nodiscard]] StreamHandle handle() const noexcept { return stream_.get(); }

  /// Blocks, asleep, until all work now in the stream has ended; a cudaError_t. One thread at a
  /// time.
  [[nodiscard]] int wait() noexcept;

 private:
  UniqueHandle<StreamTraits> stream_;
  // cudaStreamSynchronize spins unless the whole process's context is told otherwise, and would
  // take a core from the optimizer.
  CudaEvent ended_;
};

}  // namespace strata::gpu::cuda
