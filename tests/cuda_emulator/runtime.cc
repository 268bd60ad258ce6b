#include "cuda_emulator/runtime.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <thread>
#include <utility>

namespace strata::gpu::cuda::emulator {

Runtime& Runtime::instance() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

void Runtime::reset(const Settings& settings) {
  static_cast<void>(synchronize_all());
  const std::lock_guard lock(mutex_);
  settings_ = settings;
  order_ = Order::kForward;
  faults_.clear();
  lost_ = cudaSuccess;
  diagnoses_.clear();
  counts_ = {};
}

void Runtime::set_lane_order(Order order, uint64_t seed) {
  const std::lock_guard lock(mutex_);
  order_ = order;
  dice_ = Dice(seed);
}

void Runtime::fail_next(Call call, int after, cudaError_t error) {
  const std::lock_guard lock(mutex_);
  faults_.push_back({call, after, error});
}

void Runtime::lose_device(cudaError_t error) {
  cudaError_t healthy = cudaSuccess;  // The first error stays.
  lost_.compare_exchange_strong(healthy, error);
}

void Runtime::diagnose(std::string_view message) {
  const std::lock_guard lock(mutex_);
  diagnoses_.emplace_back(message);
  if (settings_.print_diagnoses) {
    std::fprintf(stderr, "CUDA emulator: %.*s\n", static_cast<int>(message.size()), message.data());
  }
}

std::vector<std::string> Runtime::diagnoses() const {
  const std::lock_guard lock(mutex_);
  return diagnoses_;
}

Counts Runtime::counts() const {
  const std::lock_guard lock(mutex_);
  Counts counts = counts_;
  counts.device_allocations = device_.size();
  counts.device_bytes = 0;
  for (const auto& [pointer, memory] : device_) counts.device_bytes += memory->size_bytes();
  counts.pinned_ranges = pinned_ranges_.ranges().size();
  counts.pinned_bytes = pinned_bytes();
  counts.streams = streams_.size();
  counts.events = events_.size();
  return counts;
}

Settings Runtime::settings() const {
  const std::lock_guard lock(mutex_);
  return settings_;
}

cudaError_t Runtime::ready() const {
  const std::lock_guard lock(mutex_);
  if (!settings_.driver_present || settings_.driver_version / 1000 < CUDART_VERSION / 1000) {
    return cudaErrorInsufficientDriver;
  }
  return settings_.device_count == 0 ? cudaErrorNoDevice : lost_.load();
}

cudaError_t Runtime::begin(Call call) {
  if (const cudaError_t error = ready(); error != cudaSuccess) return error;
  const std::lock_guard lock(mutex_);
  return take_fault(call);
}

cudaError_t Runtime::take_fault(Call call) {
  for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
    if (fault->call != call || fault->after-- > 0) continue;
    const cudaError_t error = fault->error;
    faults_.erase(fault);
    return error;
  }
  return cudaSuccess;
}

// Memory.

cudaError_t Runtime::allocate_device(void** pointer, size_t size_bytes) {
  *pointer = nullptr;
  if (size_bytes == 0) return cudaSuccess;
  if (size_bytes > free_bytes()) return cudaErrorMemoryAllocation;
  // As the real allocator: large allocations begin a page, small ones share pages.
  constexpr size_t kLargeBytes = size_t{1} << 20;
  constexpr size_t kSmallOffset = 512;
  const std::lock_guard lock(mutex_);
  try {
    auto memory =
        std::make_unique<GuardedMemory>(size_bytes, size_bytes < kLargeBytes ? kSmallOffset : 0);
    *pointer = memory->data();
    device_ranges_.add(memory->data(), size_bytes);
    device_[*pointer] = std::move(memory);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
  accessible_ = nullptr;
  return cudaSuccess;
}

cudaError_t Runtime::free_device(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const cudaError_t error = synchronize_all();  // Freeing waits for the device.
  std::unique_ptr<GuardedMemory> memory;
  {
    const std::lock_guard lock(mutex_);
    const auto found = device_.find(pointer);
    if (found == device_.end()) return cudaErrorInvalidValue;
    memory = std::move(found->second);
    device_.erase(found);
    device_ranges_.remove(pointer);
    accessible_ = nullptr;
  }
  if (memory->intact()) return error;
  diagnose("an allocation of " + std::to_string(memory->size_bytes()) +
           " bytes was written outside its ends");
  lose_device(cudaErrorIllegalAddress);
  return cudaErrorIllegalAddress;
}

cudaError_t Runtime::allocate_pinned(void** pointer, size_t size_bytes) {
  *pointer = nullptr;
  if (size_bytes == 0) return cudaSuccess;
  const std::lock_guard lock(mutex_);
  if (size_bytes > settings_.pinned_limit_bytes - pinned_bytes()) return cudaErrorMemoryAllocation;
  try {
    auto memory = std::make_unique<GuardedMemory>(size_bytes, 0);
    *pointer = memory->data();
    pinned_ranges_.add(memory->data(), size_bytes);
    host_[*pointer] = std::move(memory);
  } catch (const std::bad_alloc&) {
    return cudaErrorMemoryAllocation;
  }
  accessible_ = nullptr;
  return cudaSuccess;
}

cudaError_t Runtime::free_pinned(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const cudaError_t error = synchronize_all();
  const std::lock_guard lock(mutex_);
  if (host_.erase(pointer) == 0) return cudaErrorInvalidValue;
  pinned_ranges_.remove(pointer);
  accessible_ = nullptr;
  return error;
}

cudaError_t Runtime::register_pinned(void* pointer, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  if (pointer == nullptr || size_bytes == 0 ||
      device_ranges_.overlap(pointer, size_bytes) != RangeMap::Overlap::kNone) {
    return cudaErrorInvalidValue;
  }
  if (pinned_ranges_.overlap(pointer, size_bytes) != RangeMap::Overlap::kNone) {
    return cudaErrorHostMemoryAlreadyRegistered;
  }
  if (pinned_bytes() > settings_.pinned_limit_bytes ||
      size_bytes > settings_.pinned_limit_bytes - pinned_bytes()) {
    return cudaErrorMemoryAllocation;
  }
  pinned_ranges_.add(pointer, size_bytes);
  accessible_ = nullptr;
  return cudaSuccess;
}

cudaError_t Runtime::unregister_pinned(void* pointer) {
  const std::lock_guard lock(mutex_);
  if (host_.contains(pointer) || pinned_ranges_.remove(pointer) == 0) {
    return cudaErrorHostMemoryNotRegistered;
  }
  accessible_ = nullptr;
  return cudaSuccess;
}

size_t Runtime::pinned_bytes() const {
  size_t total = 0;
  for (const auto& [begin, size_bytes] : pinned_ranges_.ranges()) total += size_bytes;
  return total;
}

size_t Runtime::free_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t used = settings_.occupied_bytes;
  for (const auto& [pointer, memory] : device_) used += memory->size_bytes();
  return used < settings_.memory_bytes ? settings_.memory_bytes - used : 0;
}

RangeMap::Overlap Runtime::device_overlap(const void* pointer, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  return device_ranges_.overlap(pointer, size_bytes);
}

RangeMap::Overlap Runtime::pinned_overlap(const void* pointer, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  return pinned_ranges_.overlap(pointer, size_bytes);
}

std::shared_ptr<const AccessibleRanges> Runtime::accessible_ranges() {
  const std::lock_guard lock(mutex_);
  if (accessible_ == nullptr) {
    std::vector<MemoryRange> ranges;
    for (const RangeMap* map : {&device_ranges_, &pinned_ranges_}) {
      for (const auto& [begin, size_bytes] : map->ranges()) {
        ranges.push_back({reinterpret_cast<const std::byte*>(begin), size_bytes});
      }
    }
    std::sort(ranges.begin(), ranges.end(),
              [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
    accessible_ = std::make_shared<const AccessibleRanges>(std::move(ranges));
  }
  return accessible_;
}

// Streams.

cudaError_t Runtime::create_stream(cudaStream_t* stream, bool blocking, int priority) {
  auto created = std::make_unique<CUstream_st>();
  created->blocking = blocking;
  created->priority = priority;
  const std::lock_guard lock(mutex_);
  streams_.insert(created.get());
  *stream = created.release();
  return cudaSuccess;
}

cudaError_t Runtime::destroy_stream(cudaStream_t stream) {
  {
    const std::lock_guard lock(mutex_);
    if (streams_.erase(stream) == 0) return cudaErrorInvalidResourceHandle;
  }
  delete stream;
  return cudaSuccess;
}

cudaError_t Runtime::create_event(cudaEvent_t* event, bool timing) {
  auto created = std::make_unique<CUevent_st>();
  created->timing = timing;
  const std::lock_guard lock(mutex_);
  events_.insert(created.get());
  *event = created.release();
  return cudaSuccess;
}

cudaError_t Runtime::destroy_event(cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  if (events_.erase(event) == 0) return cudaErrorInvalidResourceHandle;
  delete event;
  return cudaSuccess;
}

CUstream_st* Runtime::find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) {
    if (default_stream_ == nullptr) default_stream_ = std::make_unique<CUstream_st>();
    return default_stream_.get();
  }
  return streams_.contains(stream) ? stream : nullptr;
}

bool Runtime::is_stream(cudaStream_t stream) const {
  const std::lock_guard lock(mutex_);
  return stream == nullptr || stream == cudaStreamLegacy || streams_.contains(stream);
}

// The default stream's work begins after that of all blocking streams, and theirs after its.
void Runtime::order_with_default_stream(CUstream_st* stream) {
  if (stream == default_stream_.get()) {
    for (CUstream_st* other : streams_) {
      if (!other->blocking || other->thread.idle()) continue;
      stream->thread.push([ticket = other->thread.mark()] { ticket->wait(); });
    }
  } else if (stream->blocking && default_stream_ != nullptr && !default_stream_->thread.idle()) {
    stream->thread.push([ticket = default_stream_->thread.mark()] { ticket->wait(); });
  }
}

void Runtime::push(CUstream_st* stream, std::function<void()> work) {
  order_with_default_stream(stream);
  stream->thread.push(std::move(work));
}

void Runtime::push(CUstream_st* stream, TicketPtr ticket) {
  order_with_default_stream(stream);
  stream->thread.push(std::move(ticket));
}

cudaError_t Runtime::enqueue(cudaStream_t stream, std::function<cudaError_t()> work) {
  const std::lock_guard lock(mutex_);
  CUstream_st* found = find(stream);
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  push(found, [this, work = std::move(work)] { run(work); });
  return cudaSuccess;
}

void Runtime::run(const std::function<cudaError_t()>& work) {
  delay();
  if (lost_ != cudaSuccess) return;
  cudaError_t error = cudaSuccess;
  {
    const std::lock_guard lock(mutex_);
    error = take_fault(Call::kExecution);
  }
  if (error == cudaSuccess) error = work();
  if (error != cudaSuccess) lose_device(error);
}

void Runtime::delay() {
  unsigned delay_us = 0;
  {
    const std::lock_guard lock(mutex_);
    if (settings_.stream_delay_us > 0) delay_us = dice_.below(settings_.stream_delay_us + 1);
  }
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
}

cudaError_t Runtime::enqueue_kernel(cudaStream_t stream, KernelLaunch launch) {
  {
    const std::lock_guard lock(mutex_);
    launch.order = order_;
    launch.seed = uint64_t{dice_.below(UINT32_MAX)} << 32U | dice_.below(UINT32_MAX);
    ++counts_.launches;
  }
  return enqueue(stream, [this, launch = std::move(launch)] {
    const auto ranges = accessible_ranges();
    const KernelResult result = KernelRun(launch, *ranges).run();
    if (result.error != cudaSuccess) diagnose(result.diagnosis);
    return result.error;
  });
}

cudaError_t Runtime::wait_event(cudaStream_t stream, cudaEvent_t event) {
  const std::lock_guard lock(mutex_);
  CUstream_st* found = find(stream);
  if (found == nullptr || !events_.contains(event)) return cudaErrorInvalidResourceHandle;
  if (event->ticket != nullptr) push(found, [ticket = event->ticket] { ticket->wait(); });
  return cudaSuccess;
}

cudaError_t Runtime::record(cudaEvent_t event, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  CUstream_st* found = find(stream);
  if (found == nullptr || !events_.contains(event)) return cudaErrorInvalidResourceHandle;
  event->ticket = std::make_shared<Ticket>();
  push(found, event->ticket);
  return cudaSuccess;
}

cudaError_t Runtime::event_ticket(cudaEvent_t event, TicketPtr* ticket) const {
  const std::lock_guard lock(mutex_);
  if (!events_.contains(event)) return cudaErrorInvalidResourceHandle;
  *ticket = event->ticket;
  return cudaSuccess;
}

cudaError_t Runtime::synchronize(cudaStream_t stream) {
  TicketPtr ticket;
  {
    const std::lock_guard lock(mutex_);
    CUstream_st* found = find(stream);
    if (found == nullptr) return cudaErrorInvalidResourceHandle;
    ticket = std::make_shared<Ticket>();
    push(found, ticket);
  }
  ticket->wait();
  return lost_;
}

cudaError_t Runtime::synchronize_all() {
  std::vector<TicketPtr> tickets;
  {
    const std::lock_guard lock(mutex_);
    ++counts_.device_synchronizations;
    for (CUstream_st* stream : streams_) tickets.push_back(stream->thread.mark());
    if (default_stream_ != nullptr) tickets.push_back(default_stream_->thread.mark());
  }
  for (const TicketPtr& ticket : tickets) ticket->wait();
  return lost_;
}

cudaError_t Runtime::query(cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  CUstream_st* found = find(stream);
  if (found == nullptr) return cudaErrorInvalidResourceHandle;
  if (!found->thread.idle()) return cudaErrorNotReady;
  return lost_;
}

void Runtime::count_copy(bool pageable) {
  const std::lock_guard lock(mutex_);
  ++counts_.copies;
  if (pageable) ++counts_.pageable_copies;
}

void Runtime::reset_device() {
  static_cast<void>(synchronize_all());
  const std::lock_guard lock(mutex_);
  for (const auto& [pointer, memory] : device_) device_ranges_.remove(pointer);
  device_.clear();
  accessible_ = nullptr;
  lost_ = cudaSuccess;
}

// emulator.h

void reset(const Settings& settings) { Runtime::instance().reset(settings); }
void set_lane_order(Order order, uint64_t seed) { Runtime::instance().set_lane_order(order, seed); }
void fail_next(Call call, int after, cudaError_t error) {
  Runtime::instance().fail_next(call, after, error);
}
void lose_device(cudaError_t error) { Runtime::instance().lose_device(error); }
std::vector<std::string> diagnoses() { return Runtime::instance().diagnoses(); }
Counts counts() { return Runtime::instance().counts(); }
bool accessible(const void* pointer, size_t size_bytes) {
  return Runtime::instance().accessible_ranges()->find(pointer, size_bytes) !=
         AccessibleRanges::kNone;
}
cudaError_t begin_call(Call call) { return Runtime::instance().begin(call); }
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work) {
  return Runtime::instance().enqueue(stream, std::move(work));
}
void diagnose(std::string_view message) { Runtime::instance().diagnose(message); }

}  // namespace strata::gpu::cuda::emulator
