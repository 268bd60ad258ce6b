#include "cuda_emulator/block.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "base/error.h"

// NOLINTBEGIN(bugprone-reserved-identifier)
constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};
// NOLINTEND(bugprone-reserved-identifier)

namespace strata::gpu::cuda::emulator {

namespace {

constinit thread_local KernelRun* current_run = nullptr;

std::string at(const Location& where) {
  const char* name = std::strrchr(where.file_name(), '/');
  return std::string(name == nullptr ? where.file_name() : name + 1) + ":" +
         std::to_string(where.line());
}

std::string triple(const uint3& index) {
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

const char* word(Meeting meeting) {
  switch (meeting) {
    case Meeting::kBlock:
      return "__syncthreads";
    case Meeting::kWarp:
      return "__syncwarp";
    case Meeting::kExchange:
      return "a shuffle";
    case Meeting::kVote:
      return "a vote";
    case Meeting::kLoadMatrices:
      return "ldmatrix";
    case Meeting::kMultiply:
      return "mma";
    case Meeting::kNone:
      break;
  }
  return "nothing";
}

bool same_place(const Lane& a, const Lane& b) {
  return a.meeting == b.meeting && a.where->line() == b.where->line() &&
         a.where->column() == b.where->column() &&
         (a.where->file_name() == b.where->file_name() ||
          std::strcmp(a.where->file_name(), b.where->file_name()) == 0);
}

}  // namespace

KernelRun::KernelRun(const KernelLaunch& launch, const AccessibleRanges& ranges)
    : launch_(launch), ranges_(ranges), shared_(launch.shared_bytes, 0), dice_(launch.seed) {
  const size_t threads = size_t{launch.block.x} * launch.block.y * launch.block.z;
  FiberPool::instance().take(fibers_, threads);
  lanes_.resize(threads);
  for (size_t i = 0; i < threads; ++i) {
    lanes_[i].fiber = fibers_[i].get();
    lanes_[i].index = {static_cast<unsigned>(i % launch.block.x),
                       static_cast<unsigned>(i / launch.block.x % launch.block.y),
                       static_cast<unsigned>(i / launch.block.x / launch.block.y)};
  }
  warps_.resize((threads + kWarpLanes - 1) / kWarpLanes);
  for (size_t i = 0; i < warps_.size(); ++i) {
    warps_[i].first = i * kWarpLanes;
    warps_[i].lanes = static_cast<unsigned>(std::min<size_t>(kWarpLanes, threads - i * kWarpLanes));
    std::iota(warps_[i].order.begin(), warps_[i].order.begin() + warps_[i].lanes, uint8_t{0});
    if (launch.order == Order::kBackward) {
      std::reverse(warps_[i].order.begin(), warps_[i].order.begin() + warps_[i].lanes);
    }
  }
  warp_order_.resize(warps_.size());
  std::iota(warp_order_.begin(), warp_order_.end(), size_t{0});
  if (launch.order == Order::kBackward) std::reverse(warp_order_.begin(), warp_order_.end());
}

KernelRun::~KernelRun() { FiberPool::instance().give_back(std::move(fibers_)); }

KernelRun& KernelRun::current() {
  STRATA_CHECK(current_run != nullptr, "a function for kernels was called outside one");
  return *current_run;
}

KernelResult KernelRun::run() {
  for (const void* pointer : launch_.pointers) {
    if (pointer != nullptr && ranges_.find(pointer, 0) == AccessibleRanges::kNone) {
      return {cudaErrorIllegalAddress,
              launch_.name + ": a pointer parameter is neither device nor page-locked memory"};
    }
  }
  const uint64_t blocks = uint64_t{launch_.grid.x} * launch_.grid.y * launch_.grid.z;
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (launch_.order == Order::kBackward) std::reverse(order.begin(), order.end());
  if (launch_.order == Order::kRandom) {
    for (uint64_t i = blocks; i > 1; --i) {
      std::swap(order[i - 1], order[dice_.below(static_cast<unsigned>(i))]);
    }
  }
  current_run = this;
  gridDim = launch_.grid;
  blockDim = launch_.block;
  for (const uint64_t block : order) {
    blockIdx = {static_cast<unsigned>(block % launch_.grid.x),
                static_cast<unsigned>(block / launch_.grid.x % launch_.grid.y),
                static_cast<unsigned>(block / launch_.grid.x / launch_.grid.y)};
    run_block();
    if (result_.error != cudaSuccess) break;
    if (!shared_.intact()) {
      result_ = {cudaErrorIllegalAddress, launch_.name + ": block " + triple(blockIdx) +
                                              " wrote outside its shared memory of " +
                                              std::to_string(launch_.shared_bytes) + " bytes"};
      break;
    }
  }
  current_run = nullptr;
  return std::move(result_);
}

void KernelRun::run_block() {
  shared_.fill_with_pattern();
  for (Lane& lane : lanes_) {
    lane.state = Lane::State::kReady;
    lane.meeting = Meeting::kNone;
    lane.copies.clear();
    lane.groups.clear();
    lane.fiber->prepare(&lane_main);
  }
  arrange_warps();
  release_for_sanitizer(&begun_);
  {
    const IgnoredByThreadSanitizer ignored;
    lane_ = next_lane();
    threadIdx = lanes_[lane_].index;
  }
  Fiber::switch_between(caller_, *lanes_[lane_].fiber);
  acquire_for_sanitizer(&ended_);
}

void KernelRun::lane_main() {
  KernelRun* mine = nullptr;
  {
    const IgnoredByThreadSanitizer ignored;
    mine = current_run;
  }
  KernelRun& run = *mine;
  acquire_for_sanitizer(&run.begun_);
  bool threw = false;
  try {
    run.launch_.thread();
  } catch (const std::exception& exception) {
    run.report(cudaErrorLaunchFailure, run.lane(), std::string("threw: ") + exception.what());
    threw = true;
  }
  if (threw) run.abandon();
  {
    const IgnoredByThreadSanitizer ignored;
    run.lane().state = Lane::State::kExited;
  }
  run.switch_to_next(true);
}

void KernelRun::arrange(Warp& warp) {
  warp.cursor = 0;
  if (launch_.order != Order::kRandom) return;
  for (unsigned i = warp.lanes; i > 1; --i) {
    std::swap(warp.order[i - 1], warp.order[dice_.below(i)]);
  }
}

void KernelRun::arrange_warps() {
  for (Warp& warp : warps_) {
    warp.waits_for_block = false;
    arrange(warp);
  }
  warp_ = 0;
  if (launch_.order != Order::kRandom) return;
  for (size_t i = warp_order_.size(); i > 1; --i) {
    std::swap(warp_order_[i - 1], warp_order_[dice_.below(static_cast<unsigned>(i))]);
  }
}

size_t KernelRun::next_lane() {
  for (;;) {
    Warp& warp = warps_[warp_order_[warp_]];
    while (warp.cursor < warp.lanes) {
      const size_t lane = warp.first + warp.order[warp.cursor++];
      if (lanes_[lane].state == Lane::State::kReady) return lane;
    }
    if (meet_warp(warp)) {
      if (launch_.order == Order::kRandom && dice_.below(2) == 0) next_warp();
    } else if (result_.error != cudaSuccess || (!next_warp() && !meet_block())) {
      return kNobody;
    }
  }
}

bool KernelRun::next_warp() {
  const size_t count = warp_order_.size();
  const size_t step =
      launch_.order == Order::kRandom ? dice_.below(static_cast<unsigned>(count)) : 1;
  for (size_t i = 0; i < count; ++i) {
    const size_t candidate = (warp_ + step + i) % count;
    if (!warps_[warp_order_[candidate]].waits_for_block) {
      warp_ = candidate;
      return true;
    }
  }
  return false;
}

bool KernelRun::meet_warp(Warp& warp) {
  Lane* const lanes = &lanes_[warp.first];
  Lane* const end = lanes + warp.lanes;
  Lane* const first = std::find_if(lanes, end, [](const Lane& lane) {
    return lane.state == Lane::State::kWaiting && lane.meeting != Meeting::kBlock;
  });
  if (first == end) {
    warp.waits_for_block = true;
    return false;
  }
  const bool barrier = first->meeting == Meeting::kWarp;
  for (Lane* lane = lanes; lane != end; ++lane) {
    if (lane->state == Lane::State::kExited ? !barrier : !same_place(*first, *lane)) {
      report_missing(*first, lane);
      return false;
    }
  }
  if (!barrier && warp.lanes != kWarpLanes) {
    report_missing(*first, nullptr);
    return false;
  }
  if (!barrier) perform(first->meeting, lanes);
  for (Lane* lane = lanes; lane != end; ++lane) {
    if (lane->state == Lane::State::kWaiting) lane->state = Lane::State::kReady;
  }
  arrange(warp);
  return true;
}

bool KernelRun::meet_block() {
  const auto waiting = std::find_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) {
    return lane.state == Lane::State::kWaiting;
  });
  if (waiting == lanes_.end()) return false;
  for (Lane& lane : lanes_) {
    if (lane.state == Lane::State::kExited || !same_place(*waiting, lane)) {
      report_missing(*waiting, &lane);
      return false;
    }
  }
  for (Lane& lane : lanes_) lane.state = Lane::State::kReady;
  arrange_warps();
  return true;
}

void KernelRun::report_missing(const Lane& waiting, const Lane* missing) {
  std::string message =
      "waits at " + std::string(word(waiting.meeting)) + " (" + at(*waiting.where) + ") ";
  if (missing == nullptr) {
    message += "in a warp of fewer than 32 threads";
  } else {
    message += "where thread " + triple(missing->index) + " is missing: it ";
    message +=
        missing->state == Lane::State::kExited
            ? "has exited"
            : "waits at " + std::string(word(missing->meeting)) + " (" + at(*missing->where) + ")";
  }
  report(cudaErrorLaunchFailure, waiting, message);
}

void KernelRun::report(cudaError_t error, const Lane& lane, const std::string& message) {
  result_ = {error, launch_.name + ": block " + triple(blockIdx) + ", thread " +
                        triple(lane.index) + " " + message};
}

void KernelRun::abandon() {
  Fiber* const from = lane().fiber;
  release_for_sanitizer(&ended_);
  Fiber::switch_between(*from, caller_);
  std::abort();  // Nobody switches to a lane of a failed kernel.
}

void KernelRun::switch_to_next(bool parks) {
  release_for_sanitizer(&ended_);
  Fiber* from = nullptr;
  Fiber* to = &caller_;
  {
    const IgnoredByThreadSanitizer ignored;
    from = lane().fiber;
    const size_t next = next_lane();
    if (next != kNobody) {
      lane_ = next;
      threadIdx = lanes_[next].index;
      to = lanes_[next].fiber;
    }
  }
  if (to != from || parks) Fiber::switch_between(*from, *to, parks);
}

void KernelRun::meet(Meeting meeting, void* operand, const Location& where) {
  if (launch_.order == Order::kRandom) land_some();
  // The sanitizer is told of barriers only: no other meeting orders memory. Two addresses take
  // turns, so that who leaves late does not seem to have seen what others did after it.
  char* barrier = nullptr;
  if (meeting == Meeting::kBlock) barrier = &barrier_[lane().phase++ % 2];
  if (meeting == Meeting::kWarp)
    barrier = &warps_[lane_ / kWarpLanes].barrier[lane().warp_phase++ % 2];
  if (barrier != nullptr) release_for_sanitizer(barrier);
  {
    const IgnoredByThreadSanitizer ignored;
    Lane& me = lane();
    me.state = Lane::State::kWaiting;
    me.meeting = meeting;
    me.operand = operand;
    me.where = &where;
  }
  switch_to_next(false);
  if (barrier != nullptr) acquire_for_sanitizer(barrier);
}

// Asynchronous copies.

void KernelRun::copy_async(void* shared, const void* global, size_t size_bytes, bool valid,
                           const Location& where) {
  check_shared(shared, size_bytes, size_bytes, where);
  if (valid) check_global(global, size_bytes, size_bytes, where);
  AsyncCopy copy{shared, global, size_bytes, valid, false};
  if (launch_.order == Order::kBackward) {
    land(copy);
  } else {
    // From here to the wait the bytes are nobody's to read, whether old or new.
    std::memset(shared, 0xff, size_bytes);
  }
  const IgnoredByThreadSanitizer ignored;
  lane().copies.push_back(copy);
}

void KernelRun::commit_copies() {
  const IgnoredByThreadSanitizer ignored;
  lane().groups.push_back(lane().copies.size());
}

void KernelRun::wait_for_copies(int pending) {
  Lane& me = lane();
  const size_t open = std::min(static_cast<size_t>(pending), me.groups.size());
  const size_t closed = me.groups.size() - open;
  if (closed == 0) return;
  const size_t copies = me.groups[closed - 1];
  for (size_t i = 0; i < copies; ++i) land(me.copies[i]);
  const IgnoredByThreadSanitizer ignored;
  me.copies.erase(me.copies.begin(), me.copies.begin() + static_cast<ptrdiff_t>(copies));
  me.groups.erase(me.groups.begin(), me.groups.begin() + static_cast<ptrdiff_t>(closed));
  for (size_t& end : me.groups) end -= copies;
}

void KernelRun::land(AsyncCopy& copy) {
  if (std::exchange(copy.landed, true)) return;
  if (copy.valid) {
    std::memcpy(copy.to, copy.from, copy.size_bytes);
  } else {
    std::memset(copy.to, 0, copy.size_bytes);
  }
}

void KernelRun::land_some() {
  for (AsyncCopy& copy : lane().copies) {
    bool now = false;
    {
      const IgnoredByThreadSanitizer ignored;
      now = dice_.below(4) == 0;
    }
    if (now) land(copy);
  }
}

// Checks.

void KernelRun::check_global(const void* pointer, size_t size_bytes, size_t alignment,
                             const Location& where) {
  const bool aligned = reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
  {
    const IgnoredByThreadSanitizer ignored;
    const size_t range = ranges_.find(pointer, size_bytes, last_range_);
    if (aligned && range != AccessibleRanges::kNone) {
      last_range_ = range;
      return;
    }
    report(aligned ? cudaErrorIllegalAddress : cudaErrorMisalignedAddress, lane(),
           "accesses " + std::to_string(size_bytes) + " bytes " +
               (aligned ? "that are not within one allocation of device or page-locked memory"
                        : "at a misaligned address") +
               " (" + at(where) + ")");
  }
  abandon();
}

void KernelRun::check_shared(const void* pointer, size_t size_bytes, size_t alignment,
                             const Location& where) {
  const auto* begin = static_cast<const std::byte*>(pointer);
  const bool inside =
      begin >= shared_.data() && begin + size_bytes <= shared_.data() + shared_.size_bytes();
  if (inside && reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return;
  {
    const IgnoredByThreadSanitizer ignored;
    report(inside ? cudaErrorMisalignedAddress : cudaErrorIllegalAddress, lane(),
           "accesses " + std::to_string(size_bytes) + " bytes " +
               (inside ? "at a misaligned address"
                       : "outside its shared memory of " + std::to_string(launch_.shared_bytes)) +
               " (" + at(where) + ")");
  }
  abandon();
}

void KernelRun::read_row(void* row, const void* shared, const Location& where) {
  check_shared(shared, 16, 16, where);
  std::memcpy(row, shared, 16);
}

}  // namespace strata::gpu::cuda::emulator
