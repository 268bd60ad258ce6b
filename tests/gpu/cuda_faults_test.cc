// What the CUDA device says when something is missing or fails. On the emulator, which alone can
// fail on demand.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "catch.h"
#include "cuda_emulator/emulator.h"
#include "gpu/cuda/cuda_device.h"
#include "gpu/open_device.h"
#include "gpu/operators.h"

namespace strata::gpu {
namespace {

namespace emulator = cuda::emulator;
using Catch::Matchers::Contains;
using emulator::Call;

struct Emulated {
  explicit Emulated(emulator::Settings settings = {}) {
    settings.print_diagnoses = false;
    emulator::reset(settings);
  }
  ~Emulated() { emulator::reset(); }
  Emulated(const Emulated&) = delete;
  Emulated& operator=(const Emulated&) = delete;
};

/// The error that `work` throws.
Error error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  FAIL("nothing was thrown");
  return failure("");
}

TEST_CASE("cuda availability: each thing that can be missing has its diagnosis", "[cuda]") {
  struct Case {
    emulator::Settings settings;
    CudaStatus status;
    std::vector<std::string> words;
  };
  for (const Case& test : {
           Case{{.driver_present = false}, CudaStatus::kNoDriver, {"no NVIDIA driver"}},
           Case{{.driver_version = 12080}, CudaStatus::kDriverTooOld, {"12.8", "13.0", "update"}},
           Case{{.device_count = 0}, CudaStatus::kNoDevice, {"no device"}},
           Case{{.name = "Old GPU", .compute_major = 7, .compute_minor = 5},
                CudaStatus::kDeviceTooOld,
                {"Old GPU", "7.5", "8.0"}},
       }) {
    const Emulated emulated(test.settings);
    const CudaAvailability found = cuda_availability();
    CHECK(found.status == test.status);
    CHECK(found.devices.empty());
    const Error refused = error_of([] { static_cast<void>(create_cuda_device({})); });
    CHECK(refused.kind() == ErrorKind::kUsage);
    const OpenedDevice fallback = open_device({.host = {.threads = 1}});
    CHECK(fallback.device->kind() == "host");
    CHECK(std::count(fallback.note.begin(), fallback.note.end(), '\n') == 0);
    const Error chosen =
        error_of([] { static_cast<void>(open_device({.choice = DeviceChoice::kCuda})); });
    CHECK(chosen.kind() == ErrorKind::kUsage);
    for (const std::string& word : test.words) {
      CHECK_THAT(found.diagnosis, Contains(word));
      CHECK_THAT(refused.what(), Contains(word));
      CHECK_THAT(fallback.note, Contains(word));
      CHECK_THAT(chosen.what(), Contains(word));
    }
  }
}

TEST_CASE("cuda availability: lists devices; auto takes the first", "[cuda]") {
  const Emulated emulated({.name = "New GPU",
                           .device_count = 2,
                           .compute_major = 12,
                           .compute_minor = 0,
                           .memory_bytes = kGiB});
  const CudaAvailability found = cuda_availability();
  REQUIRE(found.devices.size() == 2);
  CHECK(found.devices[1].ordinal == 1);
  CHECK(found.devices[1].name == "New GPU");
  CHECK(found.devices[1].major == 12);
  CHECK(found.devices[1].memory_bytes == kGiB);
  const OpenedDevice opened = open_device({});
  CHECK(opened.device->kind() == "cuda");
  CHECK(opened.note.empty());
  CHECK(open_device({.choice = DeviceChoice::kHost, .host = {.threads = 1}}).device->kind() ==
        "host");
  const Error none = error_of([] { static_cast<void>(create_cuda_device({.ordinal = 2})); });
  CHECK(none.kind() == ErrorKind::kUsage);
  CHECK_THAT(none.what(), Contains("New GPU"));
}

TEST_CASE("cuda availability: a lost device is a failure, not one that is missing", "[cuda]") {
  const Emulated emulated;
  emulator::lose_device(cudaErrorECCUncorrectable);
  const CudaAvailability found = cuda_availability();
  CHECK(found.status == CudaStatus::kFailed);
  CHECK_THAT(found.diagnosis, Contains("lost") && Contains("cudaErrorECCUncorrectable"));
}

TEST_CASE("cuda memory: what others hold counts", "[cuda]") {
  const Emulated emulated({.memory_bytes = kGiB, .occupied_bytes = 600 * kMiB});
  const auto device = create_cuda_device({});
  CHECK(device->free_memory_bytes() <= 424 * kMiB);
  CHECK(device->free_memory_bytes() >= 384 * kMiB);
  const Error error =
      error_of([&] { static_cast<void>(device->allocate_device_memory(500 * kMiB)); });
  CHECK(error.kind() == ErrorKind::kDoesNotFit);
  CHECK_THAT(error.what(), Contains("Emulated GPU") && Contains("424.0 MiB") &&
                               Contains("500.0 MiB") && Contains("1.0 GiB"));
  CHECK(emulator::counts().device_allocations == 0);
}

TEST_CASE("cuda memory: an allocation that the driver refuses takes nothing", "[cuda]") {
  const Emulated emulated;
  const auto device = create_cuda_device({.memory_bytes = 8 * kMiB});
  emulator::fail_next(Call::kMalloc, 0, cudaErrorMemoryAllocation);
  CHECK(error_of([&] { static_cast<void>(device->allocate_device_memory(kMiB)); }).kind() ==
        ErrorKind::kDoesNotFit);
  emulator::fail_next(Call::kMalloc, 0, cudaErrorUnknown);
  CHECK(error_of([&] { static_cast<void>(device->allocate_device_memory(kMiB)); }).kind() ==
        ErrorKind::kFailed);
  CHECK(device->free_memory_bytes() == 8 * kMiB);
  const auto arena = device->allocate_device_memory(8 * kMiB);
  CHECK(emulator::counts().device_allocations == 1);
  CHECK(emulator::counts().device_bytes == 8 * kMiB);
}

TEST_CASE("cuda memory: what cannot be pinned says how much can", "[cuda]") {
  const Emulated emulated({.pinned_limit_bytes = 40 * kMiB});
  const auto device = create_cuda_device({});
  const auto fits = device->allocate_host_memory(8 * kMiB);
  const Error error = error_of([&] { static_cast<void>(device->allocate_host_memory(64 * kMiB)); });
  CHECK(error.kind() == ErrorKind::kDoesNotFit);
  // The limit less what is pinned is 32 MiB, and the search stops within a sixteenth of 64.
  CHECK_THAT(error.what(), Contains("64.0 MiB") && (Contains("about 32.0 MiB can be pinned") ||
                                                    Contains("about 28.0 MiB can be pinned")));
  CHECK(emulator::counts().pinned_ranges == 1);
  CHECK(emulator::counts().pinned_bytes == 8 * kMiB);
  const auto rest = device->allocate_host_memory(32 * kMiB);
  CHECK(emulator::counts().pinned_bytes == 40 * kMiB);

  emulator::lose_device(cudaErrorUnknown);
  CHECK_THAT(error_of([&] { static_cast<void>(device->allocate_host_memory(kMiB)); }).what(),
             Contains("lost"));
}

/// A device with two streams, pinned and device memory.
struct Rig {
  std::unique_ptr<Device> device = create_cuda_device({});
  std::unique_ptr<Stream> first = device->create_stream("first");
  std::unique_ptr<Stream> other = device->create_stream("other");
  std::unique_ptr<Event> event = device->create_event();
  std::unique_ptr<Arena> memory = device->allocate_device_memory(kMiB);
  std::unique_ptr<Arena> host = device->allocate_host_memory(kMiB);
  std::unique_ptr<Arena> scratch =
      device->allocate_device_memory(device->operators().matmul_scratch_bytes({}));

  void upload(size_t size_bytes = 4096) {
    device->copy_async(memory->data(), host->data(), size_bytes, CopyDirection::kUpload, *first);
  }
  void add() {
    device->operators().add({.count = 1024,
                             .dtype = DType::kF32,
                             .a = memory->data(),
                             .b = memory->data(),
                             .out = memory->data()},
                            *first);
  }
  void multiply() {
    device->operators().matmul({.m = 8,
                                .n = 8,
                                .k = 8,
                                .a = memory->data(),
                                .b = memory->data() + 1024,
                                .c = memory->data() + 2048,
                                .a_stride = 8,
                                .b_stride = 8,
                                .c_stride = 8,
                                .scratch = scratch->data()},
                               *first);
  }
};

TEST_CASE("cuda errors: the first is kept, skips later work, and is thrown by each synchronize",
          "[cuda]") {
  struct Case {
    Call call;
    cudaError_t error;
    std::function<void(Rig&)> work;
    std::string word;
  };
  const Emulated emulated;
  for (const Case& test : {
           Case{Call::kMemcpy, cudaErrorInvalidValue, [](Rig& rig) { rig.upload(); },
                "copy 4096 bytes to the device"},
           Case{Call::kMemset, cudaErrorInvalidValue,
                [](Rig& rig) { rig.device->fill_zero_async(rig.memory->data(), 512, *rig.first); },
                "clear 512 bytes"},
           Case{Call::kLaunch, cudaErrorLaunchOutOfResources, [](Rig& rig) { rig.add(); },
                "too many resources"},
           Case{Call::kMatmul, cudaErrorLaunchFailure, [](Rig& rig) { rig.multiply(); },
                "multiply 8 x 8 x 8"},
           Case{Call::kEventRecord, cudaErrorInvalidResourceHandle,
                [](Rig& rig) { rig.device->record_async(*rig.event, *rig.first); },
                "record an event in stream 'first'"},
       }) {
    INFO(test.word);
    emulator::reset({.print_diagnoses = false});
    Rig rig;
    emulator::fail_next(test.call, 0, test.error);
    test.work(rig);
    const auto before = emulator::counts();
    emulator::fail_next(Call::kMemset, 0, cudaErrorNotSupported);  // a later error
    rig.device->fill_zero_async(rig.memory->data(), 64, *rig.other);
    rig.upload(16);
    rig.add();
    CHECK(emulator::counts().copies == before.copies);
    CHECK(emulator::counts().launches == before.launches);
    for (int i = 0; i < 2; ++i) {
      const Error error = error_of([&] { rig.device->synchronize(*rig.first); });
      CHECK(error.kind() == ErrorKind::kFailed);
      CHECK_THAT(error.what(), Contains(test.word) && !Contains("not supported"));
      CHECK_THAT(error_of([&] { rig.device->synchronize(*rig.other); }).what(),
                 Contains(test.word));
      CHECK_THAT(error_of([&] { rig.device->synchronize(*rig.event); }).what(),
                 Contains(test.word));
    }
  }
}

TEST_CASE("cuda errors: a device lost midway is told, with what to do", "[cuda]") {
  const Emulated emulated;
  for (const cudaError_t code :
       {cudaErrorIllegalAddress, cudaErrorECCUncorrectable, cudaErrorLaunchFailure}) {
    emulator::reset({.print_diagnoses = false});
    Rig rig;
    emulator::fail_next(Call::kExecution, 1, code);
    rig.upload();
    rig.add();  // fails when it runs
    rig.add();
    rig.device->record_async(*rig.event, *rig.first);
    rig.device->wait_async(*rig.other, *rig.event);
    const Error error = error_of([&] { rig.device->synchronize(*rig.other); });
    CHECK(error.kind() == ErrorKind::kFailed);
    CHECK_THAT(error.what(), Contains(cudaGetErrorName(code)) && Contains("lost") &&
                                 Contains("start again from the last checkpoint"));
    CHECK(error_of([&] { rig.device->synchronize(*rig.first); }).what() ==
          std::string(error.what()));
    rig.multiply();  // whatever else is asked of it does not crash
    CHECK_THROWS_AS(rig.device->synchronize(*rig.event), Error);
  }
}

TEST_CASE("cuda errors: a launch that finds the device lost does not take the blame", "[cuda]") {
  const Emulated emulated;
  Rig rig;
  emulator::lose_device(cudaErrorIllegalAddress);
  rig.add();
  const Error error = error_of([&] { rig.device->synchronize(*rig.first); });
  CHECK_THAT(error.what(), Contains("lost") && Contains("stream 'first'") && !Contains("launch"));
}

TEST_CASE("cuda device: gives everything back, and copies pinned memory without waiting",
          "[cuda]") {
  const Emulated emulated;
  {
    Rig rig;
    rig.upload();
    rig.add();
    rig.multiply();
    rig.device->synchronize(*rig.first);
    const auto counts = emulator::counts();
    CHECK(counts.copies == 1);
    CHECK(counts.pageable_copies == 0);
    CHECK(counts.device_synchronizations == 0);
  }
  const auto counts = emulator::counts();
  CHECK(counts.device_allocations == 0);
  CHECK(counts.pinned_ranges == 0);
  CHECK(counts.streams == 0);
  CHECK(counts.events == 0);
  CHECK(emulator::diagnoses().empty());
}

}  // namespace
}  // namespace strata::gpu
