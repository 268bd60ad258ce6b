#include "nvme/request_queue.h"

#include <algorithm>

#include "base/error.h"

namespace strata::nvme {

RequestQueue::RequestQueue(size_t capacity, size_t block_size_bytes)
    : slots_(capacity), block_size_bytes_(block_size_bytes) {
  STRATA_CHECK(capacity > 0 && capacity < kNone, "a queue has room for at least one request");
  for (size_t i = capacity; i-- > 0;) {
    slots_[i].next = free_;
    free_ = static_cast<uint32_t>(i);
  }
}

bool RequestQueue::has_older_than(uint64_t number) const noexcept {
  return std::any_of(slots_.begin(), slots_.end(),
                     [number](const Slot& slot) { return slot.is_used && slot.number < number; });
}

void RequestQueue::accept(const Request& request) noexcept {
  const uint32_t index = free_;
  Slot& slot = slots_[index];
  free_ = slot.next;
  ++size_;
  slot = {.request = request, .number = next_number_++, .is_used = true};
  if (request.operation == Operation::kSync) {
    slot.awaited_writes = unended_writes_;
    slot.is_waiting = true;
    append(syncs_, index);
    return;
  }
  if (request.operation == Operation::kWrite) ++unended_writes_;
  if (request.size_bytes == 0) {
    end_if_done(index);
    return;
  }
  slot.is_waiting = true;
  append(waiting_[static_cast<size_t>(request.priority)], index);
}

bool RequestQueue::next_block(Block& block) noexcept {
  // An earlier sync waits for fewer writes than a later one, so the first is ready first.
  if (syncs_.first != kNone && slots_[syncs_.first].awaited_writes == 0) {
    const uint32_t index = syncs_.first;
    remove_first(syncs_);
    slots_[index].is_waiting = false;
    start(slots_[index], index, 0, block);
    return true;
  }
  for (List& list : waiting_) {
    if (list.first == kNone) continue;
    const uint32_t index = list.first;
    Slot& slot = slots_[index];
    const size_t left = slot.request.size_bytes - slot.started_bytes;
    if (left <= block_size_bytes_) {
      remove_first(list);
      slot.is_waiting = false;
    }
    start(slot, index, std::min(left, block_size_bytes_), block);
    return true;
  }
  return false;
}

void RequestQueue::start(Slot& slot, uint32_t index, size_t size_bytes, Block& block) noexcept {
  const Request& request = slot.request;
  block.slot = index;
  block.transfer = {.operation = request.operation,
                    .offset_bytes = request.offset_bytes + static_cast<int64_t>(slot.started_bytes),
                    .data = size_bytes == 0 ? nullptr : request.data + slot.started_bytes,
                    .size_bytes = size_bytes,
                    .tag = 0};
  slot.started_bytes += size_bytes;
  ++slot.blocks;
}

void RequestQueue::end_block(const Block& block, int error, size_t transferred_bytes) noexcept {
  Slot& slot = slots_[block.slot];
  --slot.blocks;
  slot.transferred_bytes += transferred_bytes;
  if (error != 0 && slot.error == 0) {
    slot.error = error;
    if (slot.is_waiting) {
      // Only the first of a list has blocks under way.
      remove_first(waiting_[static_cast<size_t>(slot.request.priority)]);
      slot.is_waiting = false;
    }
  }
  end_if_done(block.slot);
}

void RequestQueue::end_if_done(uint32_t index) noexcept {
  Slot& slot = slots_[index];
  if (slot.is_waiting || slot.blocks > 0) return;
  if (slot.request.operation == Operation::kWrite) {
    --unended_writes_;
    for (uint32_t sync = syncs_.first; sync != kNone; sync = slots_[sync].next) {
      if (slots_[sync].number > slot.number) --slots_[sync].awaited_writes;
    }
  }
  append(ended_, index);
}

bool RequestQueue::take_ended(Ended& ended) noexcept {
  if (ended_.first == kNone) return false;
  const uint32_t index = ended_.first;
  remove_first(ended_);
  Slot& slot = slots_[index];
  ended = {slot.request.sink, {slot.request.tag, slot.error, slot.transferred_bytes}};
  slot.is_used = false;
  slot.next = free_;
  free_ = index;
  --size_;
  return true;
}

void RequestQueue::append(List& list, uint32_t slot) noexcept {
  slots_[slot].next = kNone;
  if (list.first == kNone) {
    list.first = slot;
  } else {
    slots_[list.last].next = slot;
  }
  list.last = slot;
}

void RequestQueue::remove_first(List& list) noexcept { list.first = slots_[list.first].next; }

}  // namespace strata::nvme
