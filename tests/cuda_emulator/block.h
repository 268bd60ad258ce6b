// One kernel's execution: its blocks one after another on the calling thread, a block's threads as
// fibers.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_emulator/emulator.h"
#include "cuda_emulator/fiber.h"
#include "cuda_emulator/kernel.h"
#include "cuda_emulator/memory.h"

namespace strata::gpu::cuda::emulator {

inline constexpr unsigned kWarpLanes = 32;

struct KernelLaunch {
  std::string name;
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  Order order = Order::kForward;
  uint64_t seed = 0;
  std::vector<const void*> pointers;
  std::function<void()> thread;
};

struct KernelResult {
  cudaError_t error = cudaSuccess;
  std::string diagnosis;
};

enum class Meeting : uint8_t { kNone, kBlock, kWarp, kExchange, kVote, kLoadMatrices, kMultiply };

struct AsyncCopy {
  void* to;
  const void* from;
  size_t size_bytes;
  bool valid;
  bool landed;
};

struct Lane {
  enum class State : uint8_t { kReady, kWaiting, kExited };

  Fiber* fiber;
  uint3 index;
  unsigned phase = 0;       // How many times it waited for the block,
  unsigned warp_phase = 0;  // and at __syncwarp.
  State state;
  Meeting meeting;
  const Location* where;  // As is the operand: on the lane's stack.
  void* operand;
  std::vector<AsyncCopy> copies;
  std::vector<size_t> groups;  // The number of copies up to the end of each open group.
};

/// A small fast generator: what it drives is drawn for each meeting of a warp.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 0x1234567U) {}
  unsigned below(unsigned bound) {
    state_ ^= state_ << 13U;
    state_ ^= state_ >> 7U;
    state_ ^= state_ << 17U;
    return static_cast<unsigned>((state_ >> 32U) * bound >> 32U);
  }

 private:
  uint64_t state_;
};

class KernelRun {
 public:
  KernelRun(const KernelLaunch& launch, const AccessibleRanges& ranges);
  ~KernelRun();
  KernelRun(const KernelRun&) = delete;
  KernelRun& operator=(const KernelRun&) = delete;

  KernelResult run();

  // For the thread that runs now.
  static KernelRun& current();
  Lane& lane() { return lanes_[lane_]; }
  [[nodiscard]] int lane_index() const { return static_cast<int>(lane_ % kWarpLanes); }
  std::byte* shared_memory() { return shared_.data(); }
  /// Waits until all of the warp (or block) have come to the same place.
  void meet(Meeting meeting, void* operand, const Location& where);
  void copy_async(void* shared, const void* global, size_t size_bytes, bool valid,
                  const Location& where);
  void commit_copies();
  void wait_for_copies(int pending);
  void check_global(const void* pointer, size_t size_bytes, size_t alignment,
                    const Location& where);
  /// The bytes of one row of ldmatrix.
  void read_row(void* row, const void* shared, const Location& where);

 private:
  struct Warp {
    size_t first;
    unsigned lanes;
    unsigned cursor;  // Into `order`.
    bool waits_for_block;
    std::array<uint8_t, kWarpLanes> order;
    std::array<char, 2> barrier;  // Addresses that stand for __syncwarp, to the sanitizer.
  };
  static constexpr size_t kNobody = SIZE_MAX;

  static void lane_main();
  void run_block();
  void arrange(Warp& warp);
  void arrange_warps();
  /// The next lane to run; kNobody when the block has ended or something is wrong with it.
  size_t next_lane();
  void switch_to_next(bool parks);
  bool next_warp();
  // Whether the lanes that waited for each other may go on.
  bool meet_warp(Warp& warp);
  bool meet_block();
  /// What the kernel ends with. Apart from abandon(), so that nothing with a destructor is left on
  /// the stack that is abandoned.
  void report(cudaError_t error, const Lane& lane, const std::string& message);
  void report_missing(const Lane& waiting, const Lane* missing);
  /// Leaves the kernel for good.
  [[noreturn]] void abandon();
  void land(AsyncCopy& copy);
  void land_some();
  void check_shared(const void* pointer, size_t size_bytes, size_t alignment,
                    const Location& where);

  const KernelLaunch& launch_;
  const AccessibleRanges& ranges_;
  size_t last_range_ = 0;
  GuardedMemory shared_;
  Dice dice_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  std::vector<size_t> warp_order_;
  size_t warp_ = 0;  // Into warp_order_.
  size_t lane_ = 0;
  std::array<char, 2> barrier_{};  // As in Warp, for __syncthreads.
  char begun_ = 0;                 // And for the block's begin
  char ended_ = 0;                 // and end.
  Fiber caller_;
  KernelResult result_;
};

/// What the last lane of a warp to arrive does for all. `lanes` are 32.
void perform(Meeting meeting, Lane* lanes);

}  // namespace strata::gpu::cuda::emulator
