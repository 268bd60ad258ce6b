#include "nvme/chunk_io.h"

#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>

#include <cstring>
#include <utility>

#include "base/error.h"
#include "nvme/superblock.h"

namespace strata::nvme {

ChunkIo::ChunkIo(std::vector<std::unique_ptr<Drive>>& drives, Limits limits, Describe describe,
                 const void* context)
    : describe_(describe), describe_context_(context), requests_(limits.requests) {
  STRATA_CHECK(limits.chunks > 0 && limits.requests > 0, "nothing could ever be in flight");
  for (auto i = static_cast<uint32_t>(limits.requests); i-- > 0;) free_requests_.push_back(i);
  for (const auto& drive : drives) {
    auto lane = std::make_unique<Lane>();
    lane->owner = this;
    lane->drive = drive.get();
    lane->chunks.resize(limits.chunks);
    lane->queue.resize(limits.chunks);
    for (auto i = static_cast<uint32_t>(limits.chunks); i-- > 0;) lane->free.push_back(i);
    lanes_.push_back(std::move(lane));
  }
  try {
    for (const auto& lane : lanes_) {
      lane->thread = std::thread([this, &lane = *lane] { run(lane); });
    }
  } catch (...) {
    stop_lanes();
    throw;
  }
}

ChunkIo::~ChunkIo() {
  wait_for_all();
  stop_lanes();
}

void ChunkIo::stop_lanes() noexcept {
  for (const auto& lane : lanes_) {
    if (!lane->thread.joinable()) continue;
    {
      const std::lock_guard lock(lane->mutex);
      lane->stop = true;
    }
    lane->ended.notify_one();
    lane->thread.join();
  }
}

uint32_t ChunkIo::begin(const RequestSpec& spec) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !free_requests_.empty(); });
  const uint32_t index = free_requests_.back();
  free_requests_.pop_back();
  ActiveRequest& request = requests_[index];
  request.spec = spec;
  request.chunks_left = spec.chunks;
  request.error.clear();
  if (spec.operation == Operation::kWrite) ++writes_;
  return index;
}

void ChunkIo::add(uint32_t request, int drive, const ChunkTransfer& transfer) {
  Lane& lane = *lanes_[static_cast<size_t>(drive)];
  Request drive_request;
  {
    const std::lock_guard lock(mutex_);
    const RequestSpec& spec = requests_[request].spec;
    drive_request.operation = spec.operation;
    drive_request.priority = spec.priority;
    drive_request.traffic = spec.traffic;
  }
  drive_request.offset_bytes = transfer.offset_bytes;
  drive_request.data = transfer.data;
  drive_request.size_bytes = transfer.stored_bytes;
  drive_request.sink = {transfer_ended, &lane};
  {
    std::unique_lock lock(lane.mutex);
    lane.room.wait(lock, [&] { return !lane.free.empty(); });
    const uint32_t index = lane.free.back();
    lane.free.pop_back();
    lane.chunks[index] = {transfer, request, drive_request.operation, {}};
    drive_request.tag = index;
  }
  lane.drive->submit(drive_request);
}

void ChunkIo::transfer_ended(void* context, const Result& result) noexcept {
  Lane& lane = *static_cast<Lane*>(context);
  {
    const std::lock_guard lock(lane.mutex);
    lane.chunks[result.tag].result = result;
    lane.queue[(lane.first + lane.count++) % lane.queue.size()] = static_cast<uint32_t>(result.tag);
  }
  lane.ended.notify_one();
}

void ChunkIo::run(Lane& lane) noexcept {
  // Signals are for the threads of the program.
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), "strata-checksum");

  std::unique_lock lock(lane.mutex);
  for (;;) {
    lane.ended.wait(lock, [&] { return lane.count > 0 || lane.stop; });
    if (lane.count == 0) return;
    const uint32_t index = lane.queue[lane.first];
    lane.first = (lane.first + 1) % lane.queue.size();
    --lane.count;
    const ActiveChunk chunk = lane.chunks[index];
    lock.unlock();
    const std::string error = settle(lane, chunk);
    if (!error.empty() && (!chunk.transfer.may_be_lost || !chunk.result.ok())) keep_error(error);
    lock.lock();
    // Free before the request ends: who waits for its sink may count on room for as many chunks.
    lane.free.push_back(index);
    lane.room.notify_one();
    lock.unlock();
    end_chunk(chunk.request, error);
    lock.lock();
  }
}

std::string ChunkIo::settle(const Lane& lane, const ActiveChunk& chunk) const {
  const ChunkTransfer& transfer = chunk.transfer;
  const auto where = [&] {
    return fmt::format("'{}', {} bytes at offset {} ({})", lane.drive->path().string(),
                       transfer.stored_bytes, transfer.offset_bytes,
                       describe_(describe_context_, transfer.record, transfer.chunk));
  };
  if (!chunk.result.ok()) {
    return fmt::format("cannot {} {}: {}", chunk.operation == Operation::kRead ? "read" : "write",
                       where(), std::strerror(chunk.result.error));
  }
  const uint64_t checksum = checksum_of({transfer.data, transfer.content_bytes});
  if (chunk.operation == Operation::kWrite) {
    *transfer.checksum = checksum;
    *transfer.written = 1;
    return {};
  }
  if (checksum == *transfer.checksum) return {};
  if (transfer.may_be_lost) {
    return fmt::format(
        "{} is lost: an earlier run ended while it wrote over the record, which "
        "must be written anew",
        where());
  }
  return fmt::format(
      "{} is damaged: its checksum is {:016x} instead of {:016x}; replace the drive "
      "if it happens again, and resume from a checkpoint",
      where(), checksum, *transfer.checksum);
}

void ChunkIo::end_chunk(uint32_t request_index, const std::string& error) noexcept {
  RequestSpec spec;
  ActiveRequest& request = requests_[request_index];
  {
    const std::lock_guard lock(mutex_);
    if (request.error.empty()) request.error = error;
    if (--request.chunks_left > 0) return;
    spec = request.spec;
  }
  spec.sink.done(spec.sink.context, {spec.tag, request.error});
  {
    const std::lock_guard lock(mutex_);
    if (spec.operation == Operation::kWrite) --writes_;
    if (spec.read_group) --reads_[*spec.read_group];
    free_requests_.push_back(request_index);
  }
  changed_.notify_all();
}

size_t ChunkIo::enter_read() {
  const std::lock_guard lock(mutex_);
  ++reads_[read_group_];
  return read_group_;
}

size_t ChunkIo::change_read_group() {
  const std::lock_guard lock(mutex_);
  STRATA_CHECK(reads_[1 - read_group_] == 0, "the group before was not waited for");
  return std::exchange(read_group_, 1 - read_group_);
}

void ChunkIo::wait_for_reads(size_t read_group) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reads_[read_group] == 0; });
}

void ChunkIo::wait_for_writes() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return writes_ == 0; });
}

void ChunkIo::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return free_requests_.size() == requests_.size(); });
}

void ChunkIo::keep_error(const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (!first_error_.empty()) return;
  first_error_ = message;
  has_failed_.store(true, std::memory_order_release);
}

std::optional<std::string> ChunkIo::first_error() const {
  const std::lock_guard lock(mutex_);
  if (first_error_.empty()) return std::nullopt;
  return first_error_;
}

}  // namespace strata::nvme
