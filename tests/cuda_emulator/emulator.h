// What a test can ask of the emulated CUDA device: which device it is, in what order its threads
// run, which of its calls fail, and what it found wrong. The device itself is used through the CUDA
// runtime API and launch(). All functions are safe from any thread.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace strata::gpu::cuda::emulator {

struct Settings {
  std::string name = "Emulated GPU";
  int device_count = 1;
  int compute_major = 8;
  int compute_minor = 0;
  int multiprocessors = 8;
  size_t memory_bytes = size_t{1} << 30;
  /// What other programs are to occupy of it.
  size_t occupied_bytes = 0;
  /// The most host memory that can be registered or allocated page-locked.
  size_t pinned_limit_bytes = SIZE_MAX;
  /// False: every call gives cudaErrorInsufficientDriver, the driver's version is 0.
  bool driver_present = true;
  /// One of a smaller major version than the toolkit's gives cudaErrorInsufficientDriver too.
  int driver_version = CUDART_VERSION;
  /// Each piece of a stream's work begins after a random delay of up to this.
  unsigned stream_delay_us = 0;
  /// Whether diagnoses also go to standard error.
  bool print_diagnoses = true;
};

/// Waits for all streams; then a healthy device with these settings, forward order, no faults to
/// come, no diagnoses, counts at zero. Memory, streams and events stay.
void reset(const Settings& settings = {});

enum class Order : uint8_t { kForward, kBackward, kRandom };

/// The order in which blocks, warps and lanes run, for launches from now on. A warp runs until all
/// its lanes wait for the block; in random order it also yields to others where its lanes meet.
/// cp_async lands as late as it may in forward order, at once in backward order, and at a random
/// moment in between in random order; until then its destination is NaN.
void set_lane_order(Order order, uint64_t seed = 0);

enum class Call : uint8_t {
  kMalloc,
  kFree,
  kHostRegister,
  kHostAlloc,
  kMemcpy,
  kMemset,
  kLaunch,
  kMatmul,
  kStreamCreate,
  kEventCreate,
  kEventRecord,
  kSynchronize,
  /// A stream's work (kernel, copy or fill) when it runs: the device is lost with that error.
  kExecution,
};

/// The call after the next `after` of this kind fails with `error`, once.
void fail_next(Call call, int after, cudaError_t error);

/// Every call from now on fails with `error` and no further work is done, until reset or
/// cudaDeviceReset.
void lose_device(cudaError_t error);

/// What was found wrong since the last reset, oldest first: each a sentence that names kernel,
/// block, thread and source line where known. What a kernel did wrong also loses the device.
[[nodiscard]] std::vector<std::string> diagnoses();

struct Counts {
  // Alive now.
  size_t device_allocations = 0;
  size_t device_bytes = 0;
  size_t pinned_ranges = 0;
  size_t pinned_bytes = 0;
  size_t streams = 0;
  size_t events = 0;
  // Since the last reset.
  size_t launches = 0;
  size_t copies = 0;
  /// Asynchronous copies from or to host memory that is not page-locked: each blocks its caller.
  size_t pageable_copies = 0;
  size_t device_synchronizations = 0;
};
[[nodiscard]] Counts counts();

// For stand-ins of other libraries.

/// Whether a kernel may read and write these bytes: device or page-locked memory of one allocation.
[[nodiscard]] bool accessible(const void* pointer, size_t size_bytes);
/// As an API call of this kind begins: the error it must return.
[[nodiscard]] cudaError_t begin_call(Call call);
/// Adds work to a stream; the error it returns when it runs, if any, loses the device.
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);
/// Records a diagnosis.
void diagnose(std::string_view message);

}  // namespace strata::gpu::cuda::emulator
