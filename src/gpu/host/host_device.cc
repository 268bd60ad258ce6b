#include "gpu/host/host_device.h"

#include <fmt/format.h>
#include <oneapi/tbb/info.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/unique_handle.h"
#include "gpu/host/host_link.h"
#include "gpu/host/host_operators.h"
#include "gpu/host/host_stream.h"
#include "gpu/mapped_memory.h"

namespace strata::gpu {
namespace {

using host::HostEvent;
using host::HostLink;
using host::HostOperators;
using host::HostStream;

/// The hard limit of the device's memory. Thread-safe.
class Capacity {
 public:
  explicit Capacity(size_t total_bytes) : total_bytes_(total_bytes) {}
  ~Capacity() {
    STRATA_CHECK(used_bytes_ == 0, "device memory must be given back before its device goes");
  }
  Capacity(const Capacity&) = delete;
  Capacity& operator=(const Capacity&) = delete;

  [[nodiscard]] size_t free_bytes() const {
    const std::lock_guard lock(mutex_);
    return total_bytes_ - used_bytes_;
  }

  void take(size_t size_bytes) {
    const std::lock_guard lock(mutex_);
    const size_t free_bytes = total_bytes_ - used_bytes_;
    if (size_bytes > free_bytes) {
      throw Error(ErrorKind::kDoesNotFit,
                  fmt::format("the host device has {} ({} bytes) of {} free, but {} ({} bytes) are "
                              "needed; give the device more memory or plan for less",
                              format_bytes(free_bytes), free_bytes, format_bytes(total_bytes_),
                              format_bytes(size_bytes), size_bytes));
    }
    used_bytes_ += size_bytes;
  }

  void give_back(size_t size_bytes) noexcept {
    const std::lock_guard lock(mutex_);
    used_bytes_ -= size_bytes;
  }

 private:
  const size_t total_bytes_;
  mutable std::mutex mutex_;
  size_t used_bytes_ = 0;
};

struct CapacityShare {
  Capacity* capacity = nullptr;
  size_t size_bytes = 0;
  friend bool operator==(const CapacityShare&, const CapacityShare&) = default;
};

struct CapacityShareTraits {
  using Type = CapacityShare;
  static constexpr CapacityShare invalid() noexcept { return {}; }
  static void close(const CapacityShare& share) noexcept {
    share.capacity->give_back(share.size_bytes);
  }
};
using UniqueCapacityShare = UniqueHandle<CapacityShareTraits>;

class HostArena final : public Arena {
 public:
  HostArena(UniqueMapping mapping, size_t size_bytes, UniqueCapacityShare share)
      : Arena(static_cast<std::byte*>(mapping.get().address), size_bytes),
        share_(std::move(share)),
        mapping_(std::move(mapping)) {}

 private:
  UniqueCapacityShare share_;  // given back after the memory; empty for host memory
  UniqueMapping mapping_;
};

size_t half_the_machines_memory_bytes() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)) /
         2;
}

int thread_count(int threads) {
  if (threads < 0) {
    throw usage_error(fmt::format(
        "the host device needs a positive number of threads, or 0 for one a core, not {}",
        threads));
  }
  return threads > 0 ? threads : tbb::info::default_concurrency();
}

HostStream& host_stream(Stream& stream) { return static_cast<HostStream&>(stream); }
HostEvent& host_event(Event& event) { return static_cast<HostEvent&>(event); }

class HostDevice final : public Device {
 public:
  explicit HostDevice(const HostDeviceOptions& options)
      : capacity_(options.memory_bytes > 0 ? options.memory_bytes
                                           : half_the_machines_memory_bytes()),
        upload_(options.upload_bytes_per_second),
        download_(options.download_bytes_per_second),
        within_device_(0),
        operators_(thread_count(options.threads)) {}

  [[nodiscard]] std::string_view kind() const noexcept override { return "host"; }

  [[nodiscard]] std::string description() const override {
    const int threads = operators_.threads();
    return fmt::format("CPU cores ({} thread{})", threads, threads == 1 ? "" : "s");
  }

  [[nodiscard]] size_t free_memory_bytes() const override { return capacity_.free_bytes(); }

  [[nodiscard]] std::unique_ptr<Arena> allocate_device_memory(size_t size_bytes) override {
    capacity_.take(size_bytes);
    auto share = UniqueCapacityShare::adopt({.capacity = &capacity_, .size_bytes = size_bytes});
    return std::make_unique<HostArena>(map_memory(size_bytes, "device"), size_bytes,
                                       std::move(share));
  }

  [[nodiscard]] std::unique_ptr<Arena> allocate_host_memory(size_t size_bytes) override {
    return std::make_unique<HostArena>(map_memory(size_bytes, "host"), size_bytes,
                                       UniqueCapacityShare());
  }

  [[nodiscard]] std::unique_ptr<Stream> create_stream(std::string name) override {
    return std::make_unique<HostStream>(std::move(name), streams_);
  }

  [[nodiscard]] std::unique_ptr<Event> create_event() override {
    return std::make_unique<HostEvent>();
  }

  void record_async(Event& event, Stream& stream) override {
    host_event(event).record(host_stream(stream).recording());
  }

  void wait_async(Stream& stream, Event& event) override {
    host_stream(stream).enqueue_wait(host_event(event).latest());
  }

  void synchronize(Event& event) override {
    HostStream::wait(host_event(event).latest());
    streams_.error().rethrow_if_set();
  }

  void synchronize(Stream& stream) override {
    HostStream::wait(host_stream(stream).recording());
    streams_.error().rethrow_if_set();
  }

  void fail(std::exception_ptr error) noexcept override { streams_.error().keep(std::move(error)); }

  void copy_async(void* destination, const void* source, size_t size_bytes, CopyDirection direction,
                  Stream& stream) override {
    host_stream(stream).enqueue([destination, source, size_bytes, link = &link(direction)] {
      link->copy(destination, source, size_bytes);
    });
  }

  void fill_zero_async(void* destination, size_t size_bytes, Stream& stream) override {
    host_stream(stream).enqueue([destination, size_bytes] {
      if (size_bytes > 0) std::memset(destination, 0, size_bytes);
    });
  }

  void stamp_async(int64_t* nanoseconds, Stream& stream) override {
    host_stream(stream).enqueue([nanoseconds] {
      const std::chrono::nanoseconds now = std::chrono::steady_clock::now().time_since_epoch();
      std::atomic_ref(*nanoseconds).store(now.count(), std::memory_order_relaxed);
    });
  }

  [[nodiscard]] Operators& operators() noexcept override { return operators_; }

 private:
  [[nodiscard]] HostLink& link(CopyDirection direction) noexcept {
    switch (direction) {
      case CopyDirection::kUpload:
        return upload_;
      case CopyDirection::kDownload:
        return download_;
      case CopyDirection::kWithinDevice:
        break;
    }
    return within_device_;
  }

  Capacity capacity_;
  HostLink upload_, download_, within_device_;
  HostOperators operators_;
  host::StreamGroup streams_;
};

}  // namespace

std::unique_ptr<Device> create_host_device(const HostDeviceOptions& options) {
  return std::make_unique<HostDevice>(options);
}

}  // namespace strata::gpu
