// The state of the emulated device, behind the CUDA runtime API. One for the process, as the API
// wants it; never destroyed, so that streams may outlive static objects.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cuda_emulator/block.h"
#include "cuda_emulator/emulator.h"
#include "cuda_emulator/memory.h"
#include "cuda_emulator/stream.h"

namespace strata::gpu::cuda::emulator {

class Runtime {
 public:
  static Runtime& instance();

  // The functions of emulator.h.
  void reset(const Settings& settings);
  void set_lane_order(Order order, uint64_t seed);
  void fail_next(Call call, int after, cudaError_t error);
  void lose_device(cudaError_t error);
  void diagnose(std::string_view message);
  [[nodiscard]] std::vector<std::string> diagnoses() const;
  [[nodiscard]] Counts counts() const;
  [[nodiscard]] Settings settings() const;

  /// What every call on a device begins with: driver, lost device.
  [[nodiscard]] cudaError_t ready() const;
  /// ready(), then the faults to come.
  [[nodiscard]] cudaError_t begin(Call call);

  cudaError_t allocate_device(void** pointer, size_t size_bytes);
  cudaError_t free_device(void* pointer);
  cudaError_t allocate_pinned(void** pointer, size_t size_bytes);
  cudaError_t free_pinned(void* pointer);
  cudaError_t register_pinned(void* pointer, size_t size_bytes);
  cudaError_t unregister_pinned(void* pointer);
  [[nodiscard]] size_t free_bytes() const;
  [[nodiscard]] RangeMap::Overlap device_overlap(const void* pointer, size_t size_bytes) const;
  [[nodiscard]] RangeMap::Overlap pinned_overlap(const void* pointer, size_t size_bytes) const;
  [[nodiscard]] std::shared_ptr<const AccessibleRanges> accessible_ranges();

  cudaError_t create_stream(cudaStream_t* stream, bool blocking, int priority);
  cudaError_t destroy_stream(cudaStream_t stream);
  cudaError_t create_event(cudaEvent_t* event, bool timing);
  cudaError_t destroy_event(cudaEvent_t event);
  [[nodiscard]] bool is_stream(cudaStream_t stream) const;

  /// Adds work that can fail; not done once the device is lost.
  cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);
  cudaError_t enqueue_kernel(cudaStream_t stream, KernelLaunch launch);
  cudaError_t wait_event(cudaStream_t stream, cudaEvent_t event);
  cudaError_t record(cudaEvent_t event, cudaStream_t stream);
  /// The ticket of the event's latest recording, null before the first.
  cudaError_t event_ticket(cudaEvent_t event, TicketPtr* ticket) const;
  /// Waits for the work of one stream, then gives the device's error if there is one.
  cudaError_t synchronize(cudaStream_t stream);
  cudaError_t synchronize_all();
  cudaError_t query(cudaStream_t stream);
  void count_copy(bool pageable);
  /// Frees all device memory and makes the device healthy.
  void reset_device();

 private:
  struct Fault {
    Call call;
    int after;
    cudaError_t error;
  };

  Runtime() = default;
  // With mutex_ held.
  [[nodiscard]] CUstream_st* find(cudaStream_t stream);
  void push(CUstream_st* stream, std::function<void()> work);
  void push(CUstream_st* stream, TicketPtr ticket);
  void order_with_default_stream(CUstream_st* stream);
  [[nodiscard]] cudaError_t take_fault(Call call);
  [[nodiscard]] size_t pinned_bytes() const;
  void run(const std::function<cudaError_t()>& work);
  void delay();

  mutable std::mutex mutex_;
  Settings settings_;
  Order order_ = Order::kForward;
  Dice dice_{0};
  std::vector<Fault> faults_;
  std::atomic<cudaError_t> lost_ = cudaSuccess;
  std::vector<std::string> diagnoses_;
  Counts counts_;

  std::map<const void*, std::unique_ptr<GuardedMemory>> device_;
  std::map<const void*, std::unique_ptr<GuardedMemory>> host_;
  RangeMap device_ranges_;
  RangeMap pinned_ranges_;
  std::shared_ptr<const AccessibleRanges> accessible_;  // Null when out of date.

  std::set<CUstream_st*> streams_;
  std::set<CUevent_st*> events_;
  std::unique_ptr<CUstream_st> default_stream_;
};

}  // namespace strata::gpu::cuda::emulator
