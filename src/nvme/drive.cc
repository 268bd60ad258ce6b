#include "nvme/drive.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "nvme/engine.h"

namespace strata::nvme {
namespace {

/// Lets the calling thread wait for one completion.
class Waiter {
 public:
  [[nodiscard]] CompletionSink sink() noexcept { return {&Waiter::done, this}; }
  [[nodiscard]] Result wait() {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return has_ended_; });
    return result_;
  }

 private:
  static void done(void* context, const Result& result) noexcept {
    auto* waiter = static_cast<Waiter*>(context);
    // Notified with the lock held: the waiter is gone as soon as its thread has seen the result.
    const std::lock_guard lock(waiter->mutex_);
    waiter->result_ = result;
    waiter->has_ended_ = true;
    waiter->ended_.notify_one();
  }

  std::mutex mutex_;
  std::condition_variable ended_;
  Result result_;
  bool has_ended_ = false;
};

}  // namespace

Drive::Drive(DriveOptions options) : engine_(std::make_unique<Engine>(std::move(options))) {}

Drive::~Drive() = default;

void Drive::submit(const Request& request) {
  const bool accepted = engine_->submit(request, true);
  STRATA_CHECK(accepted, "a request that waits for room is accepted");
}

bool Drive::try_submit(const Request& request) { return engine_->submit(request, false); }

void Drive::read(int64_t offset_bytes, std::span<std::byte> out, Priority priority,
                 Traffic traffic) {
  Waiter waiter;
  submit({.operation = Operation::kRead,
          .offset_bytes = offset_bytes,
          .data = out.data(),
          .size_bytes = out.size(),
          .priority = priority,
          .traffic = traffic,
          .sink = waiter.sink()});
  const Result result = waiter.wait();
  if (!result.ok()) {
    throw IoError("read", path().string(), result.error, offset_bytes,
                  static_cast<int64_t>(out.size()));
  }
}

void Drive::write(int64_t offset_bytes, std::span<const std::byte> data, Priority priority,
                  Traffic traffic) {
  Waiter waiter;
  submit({.operation = Operation::kWrite,
          .offset_bytes = offset_bytes,
          .data = const_cast<std::byte*>(data.data()),  // a write only reads from it
          .size_bytes = data.size(),
          .priority = priority,
          .traffic = traffic,
          .sink = waiter.sink()});
  const Result result = waiter.wait();
  if (!result.ok()) {
    throw IoError("write", path().string(), result.error, offset_bytes,
                  static_cast<int64_t>(data.size()));
  }
}

void Drive::sync() {
  Waiter waiter;
  submit({.operation = Operation::kSync, .sink = waiter.sink()});
  const Result result = waiter.wait();
  if (!result.ok()) throw IoError("sync", path().string(), result.error);
}

void Drive::drain() { engine_->drain(); }

void Drive::close() {
  const int code = engine_->close();
  if (code != 0) throw IoError("close", path().string(), code);
}

DriveStatistics Drive::statistics() const noexcept { return engine_->statistics(); }
const std::filesystem::path& Drive::path() const noexcept { return engine_->options().path; }
size_t Drive::alignment_bytes() const noexcept { return engine_->info().alignment_bytes; }
int64_t Drive::size_bytes() const noexcept { return engine_->info().size_bytes; }
bool Drive::is_direct() const noexcept { return engine_->info().direct; }
const std::string& Drive::backend_name() const noexcept { return engine_->info().name; }
const std::vector<std::string>& Drive::notes() const noexcept { return engine_->info().notes; }

}  // namespace strata::nvme
