// The emulated runtime API: memory, streams, events, faults.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "catch.h"
#include "cuda_emulator/test_kernels.h"
#include "cuda_emulator/test_support.h"

namespace strata::gpu::cuda::emulator::test {
namespace {

/// Holds a stream back until it is opened.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    check(cudaLaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }, this));
  }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void open() {
    if (!std::exchange(open_, true)) opened_.set_value();
  }

 private:
  std::promise<void> opened_;
  bool open_ = false;
};

/// Page-locked host memory.
class PinnedArray {
 public:
  explicit PinnedArray(size_t count) : values_(count) {
    check(cudaHostRegister(values_.data(), size_bytes(), cudaHostRegisterDefault));
  }
  ~PinnedArray() { cudaHostUnregister(values_.data()); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;
  [[nodiscard]] std::vector<unsigned>& values() { return values_; }
  [[nodiscard]] size_t size_bytes() const { return values_.size() * sizeof(unsigned); }

 private:
  std::vector<unsigned> values_;
};

TEST_CASE("Streams run apart from the host and from each other") {
  const FreshDevice device;
  const TestStream blocked;
  const TestStream other;
  const DeviceArray<unsigned> x(std::vector<unsigned>(100, 1));
  const DeviceArray<unsigned> y(std::vector<unsigned>(100, 1));
  Gate gate(blocked.get());
  step(x.data(), 100, blocked.get());
  CHECK(cudaStreamQuery(blocked.get()) == cudaErrorNotReady);
  step(y.data(), 100, other.get());
  check(other.synchronize());
  CHECK(y.download() == std::vector<unsigned>(100, 4));
  CHECK(cudaStreamQuery(blocked.get()) == cudaErrorNotReady);
  gate.open();
  check(blocked.synchronize());
  CHECK(cudaStreamQuery(blocked.get()) == cudaSuccess);
  CHECK(x.download() == std::vector<unsigned>(100, 4));
  CHECK(cudaGetLastError() == cudaSuccess);  // "Not ready" is no error.
}

TEST_CASE("Events order streams") {
  const FreshDevice device({.stream_delay_us = 200});
  set_lane_order(Order::kForward, 9);
  const TestStream first;
  const TestStream second;
  const TestEvent ready;
  const TestEvent taken;
  for (int round = 0; round < 5; ++round) {
    const DeviceArray<unsigned> x(std::vector<unsigned>(64, 0));
    unsigned expected = 0;
    for (int i = 0; i < 6; ++i) {
      const TestStream& stream = i % 2 == 0 ? first : second;
      const TestStream& next = i % 2 == 0 ? second : first;
      const TestEvent& event = i % 2 == 0 ? ready : taken;
      step(x.data(), 64, stream.get());
      check(cudaEventRecord(event.get(), stream.get()));
      check(cudaStreamWaitEvent(next.get(), event.get()));
      expected = expected * 3 + 1;
    }
    check(first.synchronize());
    CHECK(x.download() == std::vector<unsigned>(64, expected));
  }
}

TEST_CASE("An event is the latest recording when the call is made") {
  const FreshDevice device;
  const TestStream first;
  const TestStream second;
  const TestEvent event;
  CHECK(cudaEventQuery(event.get()) == cudaSuccess);  // Never recorded.
  check(cudaEventSynchronize(event.get()));
  check(cudaStreamWaitEvent(second.get(), event.get()));
  check(second.synchronize());

  Gate gate(first.get());
  check(cudaEventRecord(event.get(), second.get()));
  check(cudaStreamWaitEvent(second.get(), event.get()));  // On the recording in `second`.
  check(cudaEventRecord(event.get(), first.get()));
  CHECK(cudaEventQuery(event.get()) == cudaErrorNotReady);
  check(second.synchronize());
  gate.open();
  check(cudaEventSynchronize(event.get()));
  CHECK(cudaEventQuery(event.get()) == cudaSuccess);
}

TEST_CASE("Events measure time") {
  const FreshDevice device;
  const TestStream stream;
  const TestEvent begin;
  const TestEvent end;
  const TestEvent untimed(cudaEventDisableTiming);
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()) ==
        cudaErrorInvalidResourceHandle);
  check(cudaEventRecord(begin.get(), stream.get()));
  Gate gate(stream.get());
  check(cudaEventRecord(end.get(), stream.get()));
  CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()) == cudaErrorNotReady);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  gate.open();
  check(cudaEventSynchronize(end.get()));
  check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
  CHECK(milliseconds >= 10);
  check(cudaEventRecord(untimed.get(), stream.get()));
  check(stream.synchronize());
  CHECK(cudaEventElapsedTime(&milliseconds, begin.get(), untimed.get()) ==
        cudaErrorInvalidResourceHandle);
}

TEST_CASE("The default stream is ordered with blocking streams only") {
  const FreshDevice device;
  const TestStream blocking(cudaStreamDefault);
  const TestStream apart(cudaStreamNonBlocking);
  const DeviceArray<unsigned> x(std::vector<unsigned>(64, 1));
  std::atomic<bool> done = false;
  Gate gate(blocking.get());
  step(x.data(), 64, blocking.get());
  step(x.data(), 64, nullptr);
  step(x.data(), 64, blocking.get());
  check(cudaLaunchHostFunc(
      blocking.get(), [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; }, &done));
  check(apart.synchronize());
  CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
  CHECK_FALSE(done);
  gate.open();
  check(cudaDeviceSynchronize());
  CHECK(done);
  CHECK(x.download() == std::vector<unsigned>(64, 40));
}

TEST_CASE("Copies of page-locked memory return at once, others block") {
  const FreshDevice device;
  const TestStream stream;
  PinnedArray pinned(100);
  const DeviceArray<unsigned> x(100);
  {
    Gate gate(stream.get());
    pinned.values().assign(100, 5);
    check(cudaMemcpyAsync(x.data(), pinned.values().data(), 400, cudaMemcpyHostToDevice,
                          stream.get()));
    pinned.values()[7] = 6;  // Read when the copy runs, not when it is asked for.
    CHECK(cudaStreamQuery(stream.get()) == cudaErrorNotReady);
    gate.open();
    check(stream.synchronize());
    CHECK(x.download()[7] == 6);
  }
  CHECK(counts().pageable_copies == 0);
  std::vector<unsigned> pageable(100);
  step(x.data(), 100, stream.get());
  check(cudaMemcpyAsync(pageable.data(), x.data(), 400, cudaMemcpyDeviceToHost, stream.get()));
  CHECK(pageable[7] == 19);
  CHECK(cudaStreamQuery(stream.get()) == cudaSuccess);
  CHECK(counts().pageable_copies == 1);
  check(cudaMemsetAsync(x.data() + 1, 0, 4, stream.get()));
  check(cudaMemcpyAsync(pinned.values().data(), x.data(), 400, cudaMemcpyDefault, stream.get()));
  check(cudaMemcpyAsync(x.data() + 50, x.data(), 200, cudaMemcpyDeviceToDevice, stream.get()));
  check(stream.synchronize());
  CHECK(pinned.values()[0] == 16);
  CHECK(pinned.values()[1] == 0);
  CHECK(x.download()[51] == 0);
  CHECK(x.download()[57] == 19);
  CHECK(counts().pageable_copies == 1);
}

TEST_CASE("Copies between the wrong sides are refused and diagnosed") {
  const FreshDevice device;
  const TestStream stream;
  const DeviceArray<unsigned> x(100);
  std::vector<unsigned> host(200);
  const auto copy = [&](void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, size_bytes, kind, stream.get());
  };
  CHECK(copy(host.data(), host.data() + 100, 400, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(contains(only_diagnosis(), "a copy of 400 bytes from host to device: its destination"));
  CHECK(copy(x.data(), x.data(), 400, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(x.data(), host.data(), 400, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(copy(x.data(), host.data(), 404, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(x.data() + 1, host.data(), 400, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(copy(x.data(), x.data() + 51, 200, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue);
  CHECK(copy(x.data(), x.data() + 50, 200, cudaMemcpyDeviceToDevice) == cudaSuccess);
  CHECK(copy(x.data(), x.data() + 51, 200, cudaMemcpyDefault) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(host.data(), 0, 4, stream.get()) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(x.data(), 0, 401, stream.get()) == cudaErrorInvalidValue);
  // Half of it page-locked.
  check(cudaHostRegister(host.data(), 400, cudaHostRegisterDefault));
  CHECK(copy(x.data(), host.data() + 50, 400, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  check(cudaHostUnregister(host.data()));
  CHECK(cudaPeekAtLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
  check(stream.synchronize());
}

TEST_CASE("Memory is bounded on the device and for page-locking") {
  const FreshDevice device(
      {.memory_bytes = 10000, .occupied_bytes = 1000, .pinned_limit_bytes = 5000});
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  void* first = nullptr;
  void* second = nullptr;
  check(cudaMalloc(&first, 4000));
  check(cudaMemGetInfo(&free_bytes, &total_bytes));
  CHECK(free_bytes == 5000);
  CHECK(total_bytes == 10000);
  CHECK(cudaMalloc(&second, 5001) == cudaErrorMemoryAllocation);
  check(cudaMalloc(&second, 5000));
  CHECK(counts().device_allocations == 2);
  CHECK(counts().device_bytes == 9000);
  CHECK(cudaFree(static_cast<char*>(first) + 1) == cudaErrorInvalidValue);
  check(cudaFree(first));
  CHECK(cudaFree(first) == cudaErrorInvalidValue);
  check(cudaFree(second));
  check(cudaFree(nullptr));
  CHECK(counts().device_allocations == 0);

  std::vector<char> host(8000);
  CHECK(cudaHostRegister(host.data(), 5001, 0) == cudaErrorMemoryAllocation);
  check(cudaHostRegister(host.data(), 3000, 0));
  CHECK(cudaHostRegister(host.data() + 2999, 100, 0) == cudaErrorHostMemoryAlreadyRegistered);
  CHECK(cudaHostRegister(host.data() + 3000, 2001, 0) == cudaErrorMemoryAllocation);
  check(cudaHostRegister(host.data() + 3000, 2000, 0));
  CHECK(counts().pinned_bytes == 5000);
  CHECK(cudaMallocHost(&first, 1) == cudaErrorMemoryAllocation);
  CHECK(cudaHostUnregister(host.data() + 1) == cudaErrorHostMemoryNotRegistered);
  check(cudaHostUnregister(host.data()));
  check(cudaHostUnregister(host.data() + 3000));
  check(cudaMallocHost(&first, 5000));
  CHECK(cudaHostUnregister(first) == cudaErrorHostMemoryNotRegistered);
  check(cudaFreeHost(first));
  CHECK(counts().pinned_ranges == 0);
  cudaGetLastError();
}

TEST_CASE("Without a driver, with an old one or without a device every call says so") {
  const auto device_count = [](int* version) {
    int count = -1;
    const cudaError_t error = cudaGetDeviceCount(&count);
    CHECK(count == 0);
    CHECK(cudaDriverGetVersion(version) == cudaSuccess);
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, 1) == error);
    cudaStream_t stream = nullptr;
    CHECK(cudaStreamCreate(&stream) == error);
    return error;
  };
  int version = -1;
  {
    const FreshDevice device({.driver_present = false});
    CHECK(device_count(&version) == cudaErrorInsufficientDriver);
    CHECK(version == 0);
  }
  {
    const FreshDevice device({.driver_version = 12090});
    CHECK(device_count(&version) == cudaErrorInsufficientDriver);
    CHECK(version == 12090);
  }
  const FreshDevice device({.device_count = 0});
  CHECK(device_count(&version) == cudaErrorNoDevice);
  CHECK(version == CUDART_VERSION);
}

TEST_CASE("The device is what the settings say") {
  const FreshDevice device({.name = "Some GPU",
                            .device_count = 2,
                            .compute_major = 12,
                            .compute_minor = 0,
                            .multiprocessors = 170,
                            .memory_bytes = size_t{32} << 30});
  int count = 0;
  check(cudaGetDeviceCount(&count));
  CHECK(count == 2);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 1));
  CHECK(std::string(properties.name) == "Some GPU");
  CHECK(properties.totalGlobalMem == size_t{32} << 30);
  CHECK(properties.sharedMemPerBlockOptin == 99 * 1024);
  int value = 0;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
  CHECK(value == 170);
  check(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
  CHECK(value == 12);
  CHECK(cudaGetDeviceProperties(&properties, 2) == cudaErrorInvalidDevice);
  CHECK(cudaSetDevice(2) == cudaErrorInvalidDevice);
  check(cudaSetDevice(1));
  check(cudaGetDevice(&value));
  CHECK(value == 1);
  check(cudaSetDevice(0));
  CHECK(std::string(cudaGetErrorName(cudaErrorInvalidDevice)) == "cudaErrorInvalidDevice");
  CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  CHECK(std::string(cudaGetErrorName(static_cast<cudaError_t>(12345))) ==
        "unrecognized error code");
  cudaGetLastError();
}

TEST_CASE("A call fails when told to, once") {
  const FreshDevice device;
  const TestStream stream;
  const DeviceArray<unsigned> x(std::vector<unsigned>(64, 1));
  void* memory = nullptr;
  fail_next(Call::kMalloc, 1, cudaErrorMemoryAllocation);
  check(cudaMalloc(&memory, 16));
  check(cudaFree(memory));
  CHECK(cudaMalloc(&memory, 16) == cudaErrorMemoryAllocation);
  check(cudaMalloc(&memory, 16));
  check(cudaFree(memory));

  fail_next(Call::kLaunch, 0, cudaErrorNoKernelImageForDevice);
  CHECK_THROWS_WITH(step(x.data(), 64, stream.get()),
                    Catch::Matchers::Contains("step: cannot launch") &&
                        Catch::Matchers::Contains("no kernel image"));
  fail_next(Call::kMemcpy, 0, cudaErrorUnknown);
  CHECK(cudaMemcpyAsync(x.data(), x.data(), 4, cudaMemcpyDeviceToDevice, stream.get()) ==
        cudaErrorUnknown);
  fail_next(Call::kMemset, 0, cudaErrorUnknown);
  CHECK(cudaMemsetAsync(x.data(), 0, 4, stream.get()) == cudaErrorUnknown);
  std::vector<char> host(100);
  fail_next(Call::kHostRegister, 0, cudaErrorNotSupported);
  CHECK(cudaHostRegister(host.data(), 100, 0) == cudaErrorNotSupported);
  fail_next(Call::kHostAlloc, 0, cudaErrorMemoryAllocation);
  CHECK(cudaMallocHost(&memory, 16) == cudaErrorMemoryAllocation);
  cudaStream_t another = nullptr;
  fail_next(Call::kStreamCreate, 0, cudaErrorUnknown);
  CHECK(cudaStreamCreate(&another) == cudaErrorUnknown);
  cudaEvent_t event = nullptr;
  fail_next(Call::kEventCreate, 0, cudaErrorUnknown);
  CHECK(cudaEventCreate(&event) == cudaErrorUnknown);
  const TestEvent recorded;
  fail_next(Call::kEventRecord, 0, cudaErrorUnknown);
  CHECK(cudaEventRecord(recorded.get(), stream.get()) == cudaErrorUnknown);
  fail_next(Call::kSynchronize, 0, cudaErrorUnknown);
  CHECK(stream.synchronize() == cudaErrorUnknown);
  fail_next(Call::kMatmul, 0, cudaErrorUnknown);
  CHECK(begin_call(Call::kMatmul) == cudaErrorUnknown);
  check(stream.synchronize());
  CHECK(x.download() == std::vector<unsigned>(64, 1));  // Nothing of it was done.
  cudaGetLastError();
}

TEST_CASE("A lost device fails every call and does no more work") {
  const FreshDevice device;
  const TestStream stream;
  const TestEvent event;
  {
    const DeviceArray<unsigned> x(std::vector<unsigned>(64, 1));
    fail_next(Call::kExecution, 1, cudaErrorIllegalAddress);
    step(x.data(), 64, stream.get());
    step(x.data(), 64, stream.get());  // Fails while it runs.
    check(cudaEventRecord(event.get(), nullptr));
    CHECK(stream.synchronize() == cudaErrorIllegalAddress);
    CHECK(cudaEventSynchronize(event.get()) == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    CHECK(cudaGetLastError() == cudaErrorIllegalAddress);
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, 16) == cudaErrorIllegalAddress);
    CHECK_THROWS_WITH(step(x.data(), 64, stream.get()),
                      Catch::Matchers::Contains("an illegal memory access was encountered"));
    lose_device(cudaErrorLaunchFailure);  // The first error stays.
    CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    reset({.print_diagnoses = false});
    CHECK(x.download() == std::vector<unsigned>(64, 4));
  }
  {
    const DeviceArray<unsigned> x(std::vector<unsigned>(64, 1));
    Gate gate(stream.get());
    step(x.data(), 64, stream.get());
    lose_device(cudaErrorLaunchFailure);
    gate.open();
    CHECK(stream.synchronize() == cudaErrorLaunchFailure);
    reset({.print_diagnoses = false});
    CHECK(x.download() == std::vector<unsigned>(64, 1));
  }
  const DeviceArray<unsigned> freed(64);
  lose_device(cudaErrorLaunchFailure);
  CHECK(stream.synchronize() == cudaErrorLaunchFailure);
  check(cudaDeviceReset());
  CHECK(counts().device_allocations == 0);
  CHECK(stream.synchronize() == cudaSuccess);
}

TEST_CASE("Handles that are none are refused") {
  const FreshDevice device;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event));
  CHECK(counts().streams == 1);
  CHECK(counts().events == 1);
  check(cudaStreamDestroy(stream));
  check(cudaEventDestroy(event));
  CHECK(counts().streams == 0);
  CHECK(counts().events == 0);
  CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamDestroy(stream) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventRecord(event, nullptr) == cudaErrorInvalidResourceHandle);
  CHECK(cudaStreamWaitEvent(nullptr, event) == cudaErrorInvalidResourceHandle);
  CHECK(cudaEventDestroy(event) == cudaErrorInvalidResourceHandle);
  CHECK_THROWS_WITH(nothing(1, 1, 0, stream), Catch::Matchers::Contains("invalid resource handle"));
  cudaGetLastError();
}

TEST_CASE("Work still in a stream is done when the stream is destroyed") {
  const FreshDevice device({.stream_delay_us = 500});
  const DeviceArray<unsigned> x(std::vector<unsigned>(64, 0));
  {
    const TestStream stream;
    for (int i = 0; i < 4; ++i) step(x.data(), 64, stream.get());
  }
  CHECK(x.download() == std::vector<unsigned>(64, 40));
}

}  // namespace
}  // namespace strata::gpu::cuda::emulator::test
