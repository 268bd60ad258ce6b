#include "gpu/cuda/cuda_device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/unique_handle.h"
#include "gpu/cuda/cuda_error.h"
#include "gpu/cuda/cuda_operators.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/pinned_memory.h"
#include "gpu/sticky_error.h"

namespace strata::gpu {
namespace {

using cuda::cuda_error;
using cuda::CudaEvent;
using cuda::CudaOperators;
using cuda::CudaStream;
using cuda::StreamHandle;

/// "13.0" for 13000.
std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

CudaAvailability unavailable(CudaStatus status, std::string diagnosis) {
  return {.status = status, .diagnosis = std::move(diagnosis), .devices = {}};
}

/// What the failure to count devices means.
CudaAvailability diagnose(cudaError_t status) {
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  if (status == cudaErrorStubLibrary || (status == cudaErrorInsufficientDriver && driver == 0)) {
    return unavailable(CudaStatus::kNoDriver,
                       "no NVIDIA driver is loaded; install it, or give it to this container");
  }
  if (status == cudaErrorInsufficientDriver) {
    return unavailable(CudaStatus::kDriverTooOld,
                       fmt::format("the NVIDIA driver knows CUDA {}, and this build needs {}; "
                                   "update the driver",
                                   version_text(driver), version_text(CUDART_VERSION)));
  }
  if (status == cudaErrorNoDevice) {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    return unavailable(
        CudaStatus::kNoDevice,
        visible == nullptr
            ? std::string("the NVIDIA driver finds no device; see nvidia-smi")
            : fmt::format("no device is visible with CUDA_VISIBLE_DEVICES='{}'", visible));
  }
  return unavailable(CudaStatus::kFailed, cuda_error(status, "count CUDA devices").what());
}

/// What a device has beside its arenas is not all free for them: kernels are loaded when they are
/// first launched, and the driver gives memory in pieces of 2 MiB.
size_t reserve_bytes(size_t total_bytes) { return std::min(256 * kMiB, total_bytes / 32); }

struct DeviceMemoryTraits {
  using Type = void*;
  static constexpr Type invalid() noexcept { return nullptr; }
  static void close(Type memory) noexcept { static_cast<void>(cudaFree(memory)); }
};

class DeviceArena final : public Arena {
 public:
  DeviceArena(UniqueHandle<DeviceMemoryTraits> memory, size_t size_bytes,
              std::atomic<size_t>& used_bytes)
      : Arena(static_cast<std::byte*>(memory.get()), size_bytes),
        used_bytes_(used_bytes),
        memory_(std::move(memory)) {}
  ~DeviceArena() override { used_bytes_ -= size_bytes_; }
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

 private:
  std::atomic<size_t>& used_bytes_;
  UniqueHandle<DeviceMemoryTraits> memory_;
};

class PinnedArena final : public Arena {
 public:
  PinnedArena(cuda::PinnedMemory memory, size_t size_bytes)
      : Arena(static_cast<std::byte*>(memory.address()), size_bytes), memory_(std::move(memory)) {}

 private:
  cuda::PinnedMemory memory_;
};

cudaMemcpyKind kind_of(CopyDirection direction) {
  switch (direction) {
    case CopyDirection::kUpload:
      return cudaMemcpyHostToDevice;
    case CopyDirection::kDownload:
      return cudaMemcpyDeviceToHost;
    case CopyDirection::kWithinDevice:
      break;
  }
  return cudaMemcpyDeviceToDevice;
}

std::string_view words_of(CopyDirection direction) {
  switch (direction) {
    case CopyDirection::kUpload:
      return "to the device";
    case CopyDirection::kDownload:
      return "from the device";
    case CopyDirection::kWithinDevice:
      break;
  }
  return "within the device";
}

StreamHandle handle_of(Stream& stream) { return static_cast<CudaStream&>(stream).handle(); }
cudaEvent_t handle_of(Event& event) { return static_cast<CudaEvent&>(event).handle(); }

/// Makes the device current, which gives this process its context there. Returns the ordinal.
int initialize(int ordinal) {
  cuda::check(cudaSetDevice(ordinal), fmt::format("use CUDA device {}", ordinal));
  return ordinal;
}

class CudaDevice final : public Device {
 public:
  CudaDevice(CudaDeviceInfo info, size_t memory_bytes)
      : info_(std::move(info)),
        ordinal_(initialize(info_.ordinal)),
        limit_bytes_(memory_bytes > 0 ? memory_bytes : SIZE_MAX),
        operators_(ordinal_, cuda::matmul_workspace_bytes(info_.major), error_) {}

  ~CudaDevice() override {
    STRATA_CHECK(used_bytes_ == 0, "device memory must be given back before its device goes");
  }
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  [[nodiscard]] std::string_view kind() const noexcept override { return "cuda"; }
  [[nodiscard]] std::string description() const override { return info_.name; }

  [[nodiscard]] size_t free_memory_bytes() const override {
    const size_t reserved = reserve_bytes(info_.memory_bytes);
    const size_t free = free_on_device_bytes();
    return std::min(limit_bytes_ - used_bytes_, free > reserved ? free - reserved : 0);
  }

  [[nodiscard]] std::unique_ptr<Arena> allocate_device_memory(size_t size_bytes) override {
    const size_t free = std::min(limit_bytes_ - used_bytes_, free_on_device_bytes());
    UniqueHandle<DeviceMemoryTraits> memory;
    // Asked first: where the driver can page device memory out (WSL2), it would give more than
    // there is.
    if (size_bytes > free) throw does_not_fit(size_bytes, free);
    if (size_bytes > 0) {
      void* address = nullptr;
      const cudaError_t status = cudaMalloc(&address, size_bytes);
      if (status == cudaErrorMemoryAllocation) {
        static_cast<void>(cudaGetLastError());
        throw does_not_fit(size_bytes, free);
      }
      cuda::check(status, fmt::format("allocate {} bytes on {}", size_bytes, info_.name));
      memory.reset(address);
    }
    used_bytes_ += size_bytes;
    return std::make_unique<DeviceArena>(std::move(memory), size_bytes, used_bytes_);
  }

  [[nodiscard]] std::unique_ptr<Arena> allocate_host_memory(size_t size_bytes) override {
    cuda::check(cudaSetDevice(ordinal_), "make the device current");
    return std::make_unique<PinnedArena>(cuda::PinnedMemory::allocate(size_bytes), size_bytes);
  }

  [[nodiscard]] std::unique_ptr<Stream> create_stream(std::string name) override {
    cuda::check(cudaSetDevice(ordinal_), "make the device current");
    return std::make_unique<CudaStream>(std::move(name));
  }

  [[nodiscard]] std::unique_ptr<Event> create_event() override {
    cuda::check(cudaSetDevice(ordinal_), "make the device current");
    return std::make_unique<CudaEvent>();
  }

  // Events are recorded and waited for after an error as well: the memory of work ahead of them may
  // be given back only when it has ended.

  void record_async(Event& event, Stream& stream) override {
    keep(cudaEventRecord(handle_of(event), handle_of(stream)),
         [&] { return fmt::format("record an event in stream '{}'", stream.name()); });
  }

  void wait_async(Stream& stream, Event& event) override {
    keep(cudaStreamWaitEvent(handle_of(stream), handle_of(event), 0),
         [&] { return fmt::format("let stream '{}' wait for an event", stream.name()); });
  }

  void synchronize(Event& event) override {
    keep(cudaEventSynchronize(handle_of(event)),
         [] { return std::string("finish the work ahead of an event"); });
    error_.rethrow_if_set();
  }

  void synchronize(Stream& stream) override {
    keep(static_cast<CudaStream&>(stream).wait(),
         [&] { return fmt::format("finish the work of stream '{}'", stream.name()); });
    error_.rethrow_if_set();
  }

  void fail(std::exception_ptr error) noexcept override { error_.keep(std::move(error)); }

  void copy_async(void* destination, const void* source, size_t size_bytes, CopyDirection direction,
                  Stream& stream) override {
    if (size_bytes == 0 || error_.is_set()) return;
    keep(cudaMemcpyAsync(destination, source, size_bytes, kind_of(direction), handle_of(stream)),
         [&] { return fmt::format("copy {} bytes {}", size_bytes, words_of(direction)); });
  }

  void fill_zero_async(void* destination, size_t size_bytes, Stream& stream) override {
    if (size_bytes == 0 || error_.is_set()) return;
    keep(cudaMemsetAsync(destination, 0, size_bytes, handle_of(stream)),
         [&] { return fmt::format("clear {} bytes on the device", size_bytes); });
  }

  void stamp_async(int64_t* nanoseconds, Stream& stream) override {
    if (error_.is_set()) return;
    const auto stamp = [](void* out) {
      const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
      std::atomic_ref(*static_cast<int64_t*>(out)).store(now.count(), std::memory_order_relaxed);
    };
    keep(cudaLaunchHostFunc(handle_of(stream), stamp, nanoseconds),
         [] { return std::string("note the time"); });
  }

  [[nodiscard]] Operators& operators() noexcept override { return operators_; }

 private:
  [[nodiscard]] size_t free_on_device_bytes() const {
    cuda::check(cudaSetDevice(ordinal_), "make the device current");
    size_t free = 0;
    size_t total = 0;
    cuda::check(cudaMemGetInfo(&free, &total),
                fmt::format("ask {} how much memory is free", info_.name));
    return free;
  }

  [[nodiscard]] Error does_not_fit(size_t size_bytes, size_t free_bytes) const {
    return {ErrorKind::kDoesNotFit,
            fmt::format("{} has {} ({} bytes) of {} free, but {} ({} bytes) are needed in one "
                        "piece; end other programs on the device, give it more memory or plan for "
                        "less",
                        info_.name, format_bytes(free_bytes), free_bytes,
                        format_bytes(std::min(limit_bytes_, info_.memory_bytes)),
                        format_bytes(size_bytes), size_bytes)};
  }

  /// Keeps what a call answered, if that is an error, as that of the device.
  template <class What>
  void keep(int status, const What& what) noexcept {
    if (status == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    try {
      error_.keep(std::make_exception_ptr(cuda_error(status, what())));
    } catch (...) {  // no memory for the words
      error_.keep(std::current_exception());
    }
  }

  CudaDeviceInfo info_;
  int ordinal_;
  size_t limit_bytes_;
  std::atomic<size_t> used_bytes_ = 0;
  StickyError error_;
  CudaOperators operators_;
};

}  // namespace

CudaAvailability cuda_availability() {
  int count = 0;
  cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count == 0) status = cudaErrorNoDevice;
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return diagnose(status);
  }
  CudaAvailability result{.status = CudaStatus::kAvailable, .diagnosis = {}, .devices = {}};
  std::string too_old;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties{};
    status = cudaGetDeviceProperties(&properties, ordinal);
    if (status != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return unavailable(
          CudaStatus::kFailed,
          cuda_error(status, fmt::format("ask CUDA device {} what it is", ordinal)).what());
    }
    if (properties.major < kOldestMajor) {
      too_old += fmt::format("{}{} (compute capability {}.{})", too_old.empty() ? "" : ", ",
                             properties.name, properties.major, properties.minor);
      continue;
    }
    result.devices.push_back({.ordinal = ordinal,
                              .name = properties.name,
                              .major = properties.major,
                              .minor = properties.minor,
                              .memory_bytes = properties.totalGlobalMem});
  }
  if (result.devices.empty()) {
    return unavailable(
        CudaStatus::kDeviceTooOld,
        fmt::format("no device has compute capability {}.0 or newer: {}", kOldestMajor, too_old));
  }
  return result;
}

std::unique_ptr<Device> create_cuda_device(const CudaDeviceOptions& options) {
  CudaAvailability found = cuda_availability();
  if (found.status != CudaStatus::kAvailable) {
    throw usage_error(fmt::format("cannot use a CUDA device: {}", found.diagnosis));
  }
  const auto info =
      std::find_if(found.devices.begin(), found.devices.end(),
                   [&](const CudaDeviceInfo& device) { return device.ordinal == options.ordinal; });
  if (info == found.devices.end()) {
    std::string names;
    for (const CudaDeviceInfo& device : found.devices) {
      names += fmt::format("{}{} ({})", names.empty() ? "" : ", ", device.ordinal, device.name);
    }
    throw usage_error(
        fmt::format("there is no CUDA device {} to use; there are {}", options.ordinal, names));
  }
  return std::make_unique<CudaDevice>(std::move(*info), options.memory_bytes);
}

}  // namespace strata::gpu
