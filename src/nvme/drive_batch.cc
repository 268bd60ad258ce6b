#include "nvme/drive_batch.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "base/error.h"

namespace strata::nvme {

DriveBatch::~DriveBatch() { wait_until_idle(); }

void DriveBatch::write(size_t drive, int64_t offset_bytes, std::span<const std::byte> data,
                       std::string what) {
  submit({drive, Operation::kWrite, offset_bytes, data.size(), std::move(what)},
         const_cast<std::byte*>(data.data()));
}

void DriveBatch::sync_all() {
  for (size_t d = 0; d < drives_.size(); ++d) submit({d, Operation::kSync, 0, 0, ""}, nullptr);
}

void DriveBatch::submit(Item item, std::byte* data) {
  Request request;
  request.operation = item.operation;
  request.offset_bytes = item.offset_bytes;
  request.data = data;
  request.size_bytes = item.size_bytes;
  request.priority = Priority::kWeightRead;  // everything waits for it
  request.tag = items_.size();
  request.sink.context = this;
  request.sink.done = [](void* context, const Result& result) noexcept {
    auto& batch = *static_cast<DriveBatch*>(context);
    const std::lock_guard lock(batch.mutex_);
    if (!result.ok() && batch.error_ == 0) {
      batch.error_ = result.error;
      batch.failed_ = result.tag;
    }
    // With the lock held: the batch may be gone as soon as it is released.
    if (--batch.left_ == 0) batch.ended_.notify_one();
  };
  Drive& drive = *drives_[item.drive];
  items_.push_back(std::move(item));  // may throw: before anything is waited for
  {
    const std::lock_guard lock(mutex_);
    ++left_;
  }
  drive.submit(request);
}

void DriveBatch::wait_until_idle() {
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return left_ == 0; });
}

void DriveBatch::wait() {
  wait_until_idle();
  const std::vector<Item> items = std::exchange(items_, {});
  const int error = std::exchange(error_, 0);
  if (error == 0) return;
  const Item& item = items[failed_];
  const std::string path = drives_[item.drive]->path().string();
  if (item.operation == Operation::kSync) {
    throw failure(fmt::format("cannot sync '{}': {}", path, std::strerror(error)));
  }
  throw failure(fmt::format("cannot write '{}', {} bytes at offset {} ({}): {}", path,
                            item.size_bytes, item.offset_bytes, item.what, std::strerror(error)));
}

}  // namespace strata::nvme
