// The thread of a Drive: starts blocks, settles their completions, calls handlers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nvme/drive.h"
#include "nvme/request_queue.h"

namespace strata::nvme {

class Drive::Engine {
 public:
  explicit Engine(DriveOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// False where the queue is full and `wait` is not set.
  [[nodiscard]] bool submit(const Request& request, bool wait);
  void drain();
  /// The errno of close(2), or 0.
  int close();
  [[nodiscard]] DriveStatistics statistics() const noexcept;

  [[nodiscard]] const DriveOptions& options() const noexcept { return options_; }
  /// Of the backend, with the drive's own alignment.
  [[nodiscard]] const BackendInfo& info() const noexcept { return info_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// A block under way: with the backend, or waiting to be handed to it again.
  struct Flight {
    Block block;
    Transfer rest;  // what is still to be transferred
    Clock::time_point started;
    Clock::time_point stalled;  // since when it has not got on, where attempts > 0
    unsigned attempts = 0;      // in a row without any progress
  };

  void open_and_run() noexcept;
  void check(const Request& request) const;
  // All below on the drive's thread, with mutex_ held; those that take `lock` release it for a
  // while.
  void run(std::unique_lock<std::mutex>& lock) noexcept;
  void start_blocks(std::unique_lock<std::mutex>& lock) noexcept;
  [[nodiscard]] bool hand_over(uint32_t index, std::unique_lock<std::mutex>& lock) noexcept;
  void settle(uint32_t index, int64_t result) noexcept;
  void try_again(uint32_t index, int errno_code, bool has_progressed) noexcept;
  [[nodiscard]] bool is_out_of_patience(Flight& flight) noexcept;
  void end(uint32_t index, int error) noexcept;
  void back_off(std::unique_lock<std::mutex>& lock) noexcept;
  bool call_handlers(std::unique_lock<std::mutex>& lock) noexcept;

  const DriveOptions options_;
  BackendInfo info_;
  size_t step_bytes_ = 1;  // progress counts in multiples of this
  std::unique_ptr<Backend> backend_;
  std::exception_ptr open_error_;
  int close_error_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable opened_;
  std::condition_variable room_;     // in the queue
  std::condition_variable handled_;  // handlers have returned
  RequestQueue queue_;
  DriveStatistics statistics_;
  bool is_open_ = false;
  bool is_closing_ = false;
  bool is_asleep_ = false;  // and could start blocks if woken
  bool is_handling_ = false;
  unsigned submitters_waiting_ = 0;
  unsigned drains_waiting_ = 0;

  // The thread's own.
  std::vector<Flight> flights_;
  std::vector<uint32_t> free_flights_;
  std::vector<uint32_t> again_;  // flights to be handed over again, the oldest first
  std::vector<RawCompletion> completions_;
  std::vector<Ended> ended_;
  unsigned in_flight_ = 0;  // with the backend

  std::thread thread_;
};

}  // namespace strata::nvme
