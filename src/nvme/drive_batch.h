// Some transfers on several drives that are waited for together: what a commit is made of.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "nvme/drive.h"

namespace strata::nvme {

/// Used by one thread. The transfers are in no order; wait() is where one comes from.
class DriveBatch {
 public:
  explicit DriveBatch(const std::vector<std::unique_ptr<Drive>>& drives) : drives_(drives) {}
  /// Waits, and loses errors.
  ~DriveBatch();
  DriveBatch(const DriveBatch&) = delete;
  DriveBatch& operator=(const DriveBatch&) = delete;

  /// `data` must live until wait() has returned. `what` is for messages: "the superblock".
  void write(size_t drive, int64_t offset_bytes, std::span<const std::byte> data, std::string what);
  void sync_all();
  /// Waits for all transfers; throws a failure that names the first one that failed. The batch is
  /// empty after it.
  void wait();

 private:
  struct Item {
    size_t drive;
    Operation operation;
    int64_t offset_bytes;
    size_t size_bytes;
    std::string what;
  };
  void submit(Item item, std::byte* data);
  void wait_until_idle();

  const std::vector<std::unique_ptr<Drive>>& drives_;
  std::vector<Item> items_;

  std::mutex mutex_;
  std::condition_variable ended_;
  size_t left_ = 0;
  int error_ = 0;
  size_t failed_ = 0;  // index of the item that failed with error_
};

}  // namespace strata::nvme
