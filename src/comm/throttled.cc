#include "comm/throttled.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "base/error.h"
#include "gpu/host/host_stream.h"

namespace strata::comm {
namespace {

using Clock = std::chrono::steady_clock;

class Throttled final : public Communicator {
 public:
  Throttled(std::unique_ptr<Communicator> group, double bytes_per_second)
      : group_(std::move(group)), bytes_per_second_(bytes_per_second) {
    if (!(bytes_per_second >= 1) || !std::isfinite(bytes_per_second)) {
      throw usage_error(
          fmt::format("the speed limit between ranks must be at least 1 byte per second, not {}",
                      bytes_per_second));
    }
  }

  [[nodiscard]] int rank() const noexcept override { return group_->rank(); }
  [[nodiscard]] int size() const noexcept override { return group_->size(); }

  void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                        gpu::Stream& stream) override {
    group_->all_gather_async(in, out, bytes_per_rank, stream);
    sleep_async(Collective::kAllGather, bytes_per_rank * static_cast<size_t>(size()), stream);
  }
  void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                            gpu::Stream& stream) override {
    group_->reduce_scatter_async(in, out, count_per_rank, dtype, stream);
    sleep_async(Collective::kReduceScatter,
                static_cast<size_t>(count_per_rank) * size_of(dtype) * static_cast<size_t>(size()),
                stream);
  }
  void all_reduce_async(void* data, int64_t count, DType dtype, gpu::Stream& stream) override {
    group_->all_reduce_async(data, count, dtype, stream);
    sleep_async(Collective::kAllReduce, static_cast<size_t>(count) * size_of(dtype), stream);
  }
  void broadcast_async(void* data, size_t size_bytes, int root, gpu::Stream& stream) override {
    group_->broadcast_async(data, size_bytes, root, stream);
    sleep_async(Collective::kBroadcast, size_bytes, stream);
  }
  void barrier_async(gpu::Stream& stream) override { group_->barrier_async(stream); }

  void abort() noexcept override {
    aborted_ = true;
    group_->abort();
  }

 private:
  void sleep_async(Collective collective, size_t size_bytes, gpu::Stream& stream) {
    const std::chrono::duration<double> seconds(
        static_cast<double>(collective_bytes(collective, size_bytes, size())) / bytes_per_second_);
    if (seconds.count() == 0) return;
    const auto duration = std::chrono::ceil<Clock::duration>(seconds);
    static_cast<gpu::host::HostStream&>(stream).enqueue([this, duration] {
      constexpr std::chrono::milliseconds kMost{50};  // between looks whether to stop
      const Clock::time_point end = Clock::now() + duration;
      while (!aborted_ && Clock::now() < end) {
        std::this_thread::sleep_until(std::min(end, Clock::now() + kMost));
      }
    });
  }

  std::unique_ptr<Communicator> group_;
  double bytes_per_second_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> throttled(std::unique_ptr<Communicator> group,
                                        double bytes_per_second) {
  return std::make_unique<Throttled>(std::move(group), bytes_per_second);
}

}  // namespace strata::comm
