#include "comm/one_rank.h"

#include <atomic>

#include "base/error.h"

namespace strata::comm {
namespace {

class OneRank final : public Communicator {
 public:
  explicit OneRank(gpu::Device& device) : device_(device) {}

  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int size() const noexcept override { return 1; }

  void all_gather_async(const void* in, void* out, size_t bytes_per_rank,
                        gpu::Stream& stream) override {
    copy_async(out, in, bytes_per_rank, stream);
  }
  void reduce_scatter_async(void* in, void* out, int64_t count_per_rank, DType dtype,
                            gpu::Stream& stream) override {
    copy_async(out, in, static_cast<size_t>(count_per_rank) * size_of(dtype), stream);
  }
  void all_reduce_async(void* /*data*/, int64_t /*count*/, DType /*dtype*/,
                        gpu::Stream& /*stream*/) override {
    refuse_after_abort();
  }
  void broadcast_async(void* /*data*/, size_t /*size_bytes*/, int root,
                       gpu::Stream& /*stream*/) override {
    STRATA_CHECK(root == 0, "the root is a rank of the group");
    refuse_after_abort();
  }
  void barrier_async(gpu::Stream& /*stream*/) override { refuse_after_abort(); }

  void abort() noexcept override { aborted_ = true; }

 private:
  void refuse_after_abort() {
    if (!aborted_) return;
    device_.fail(std::make_exception_ptr(failure("the group of this rank has been given up")));
  }

  void copy_async(void* out, const void* in, size_t size_bytes, gpu::Stream& stream) {
    refuse_after_abort();
    if (out == in) return;
    device_.copy_async(out, in, size_bytes, gpu::CopyDirection::kWithinDevice, stream);
  }

  gpu::Device& device_;
  std::atomic<bool> aborted_ = false;
};

}  // namespace

std::unique_ptr<Communicator> create_one_rank(gpu::Device& device) {
  return std::make_unique<OneRank>(device);
}

}  // namespace strata::comm
