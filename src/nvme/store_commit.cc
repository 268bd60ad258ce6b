// What moves a store from one generation to the next, and what verifies the one that it has.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <random>
#include <utility>

#include "base/error.h"
#include "nvme/drive_batch.h"
#include "nvme/store_impl.h"

namespace strata::nvme {
namespace {

constexpr int64_t kChecksumBytes = sizeof(uint64_t);

bool has_same(const std::vector<Superblock>& a, const std::vector<Superblock>& b, size_t record) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](const Superblock& left, const Superblock& right) {
                      return left.records[record] == right.records[record];
                    });
}

uint64_t random_id() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

/// Some buffers for reads whose results are wanted in the order in which they were begun.
class CheckWindow {
 public:
  CheckWindow(size_t slots, size_t buffer_bytes, size_t alignment_bytes) : slots_(slots) {
    for (Slot& slot : slots_) {
      slot.owner = this;
      slot.buffer = AlignedBuffer(buffer_bytes, alignment_bytes);
    }
  }

  struct Slot {
    CheckWindow* owner = nullptr;
    AlignedBuffer buffer;
    bool busy = false;
    std::string error;
  };

  /// The next slot, free; what its last read found goes to `faults`.
  Slot& next(std::vector<std::string>& faults) {
    Slot& slot = slots_[turn_++ % slots_.size()];
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [&] { return !slot.busy; });
    if (!slot.error.empty()) faults.push_back(std::exchange(slot.error, {}));
    slot.busy = true;
    return slot;
  }
  void finish(std::vector<std::string>& faults) {
    for (size_t i = 0; i < slots_.size(); ++i) next(faults);
  }
  [[nodiscard]] static StoreSink sink(Slot& slot) noexcept {
    return {[](void* context, const StoreResult& result) noexcept {
              auto& of = *static_cast<Slot*>(context);
              const std::lock_guard lock(of.owner->mutex_);
              of.error = result.error;
              of.busy = false;
              // With the lock held: the window may be gone as soon as it is released.
              of.owner->ended_.notify_one();
            },
            &slot};
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<Slot> slots_;
  size_t turn_ = 0;
};

}  // namespace

CommitResult Store::Impl::commit(std::span<const std::byte> metadata) {
  if (metadata.size() > kMaxMetadataBytes) {
    throw usage_error(fmt::format("a commit takes {} bytes of metadata, not {}", kMaxMetadataBytes,
                                  metadata.size()));
  }
  io_->wait_for_writes();
  {
    const std::lock_guard lock(mutex_);
    require_writable();
    require_committable();
  }
  // Without the lock: reads go on, and nothing else may be called meanwhile.
  std::vector<Superblock> next = superblocks_;
  for (Superblock& superblock : next) {
    superblock.metadata.assign(metadata.begin(), metadata.end());
    superblock.in_flux = false;
  }
  std::vector<std::byte> kept_metadata(metadata.begin(), metadata.end());
  try {
    write_tables(next);
    write_superblocks(next);
  } catch (...) {
    keep_current_exception();
    throw;
  }
  std::unique_lock lock(mutex_);
  for (size_t r = 0; r < map_.records.size(); ++r) {
    if (!is_to_be_committed(r)) continue;
    end_shadow(static_cast<int>(r));
    const auto tables = damaged_tables_.begin() + static_cast<int64_t>(r * drives_.size());
    std::fill_n(tables, drives_.size(), uint8_t{0});
  }
  adopt(std::move(next));
  std::fill(may_be_lost_.begin(), may_be_lost_.end(), uint8_t{0});
  metadata_ = std::move(kept_metadata);
  const int64_t total = bytes_written_total();
  const CommitResult result{generation_, total - std::exchange(written_at_commit_, total), total};
  // Reads that began before may be on slots and tables that the next write takes.
  const size_t earlier_reads = io_->change_read_group();
  lock.unlock();
  io_->wait_for_reads(earlier_reads);
  return result;
}

void Store::Impl::require_committable() const {
  constexpr size_t kNamed = 3;
  std::string lost;
  size_t count = 0;
  for (size_t r = 0; r < map_.records.size(); ++r) {
    if (may_be_lost_[r] == 0 && !is_to_be_committed(r)) continue;
    if (is_whole(static_cast<int>(r))) continue;
    const std::string name = describe(map_.records[r].spec);
    if (may_be_lost_[r] == 0) {
      throw usage_error(fmt::format("cannot commit the {}: it was written in part", name));
    }
    if (++count <= kNamed) lost += (lost.empty() ? "" : ", ") + name;
  }
  if (count == 0) return;
  if (count > kNamed) lost += fmt::format(" and {} more", count - kNamed);
  throw usage_error(
      fmt::format("cannot commit: an earlier run ended while it wrote over records that have one "
                  "slot, and these must be written whole first ({})",
                  lost));
}

void Store::Impl::keep_current_exception() {
  try {
    throw;
  } catch (const std::exception& error) {
    io_->keep_error(error.what());
  } catch (...) {
    io_->keep_error("unknown error");
  }
}

void Store::Impl::write_tables(std::vector<Superblock>& next) {
  DriveBatch batch(drives_);
  for (size_t r = 0; r < map_.records.size(); ++r) {
    const Record& of = map_.records[r];
    if (!is_to_be_committed(r)) continue;
    const auto index = static_cast<int>(r);
    const int slot = shadow_side(index).table_slot;
    for (size_t d = 0; d < drives_.size(); ++d) {
      RecordState& state = next[d].records[r];
      state = {highest_generation_ + 1, 0, static_cast<uint32_t>(slot)};
      const Part& part = of.parts[d];
      if (part.chunks == 0) continue;
      const auto size = static_cast<size_t>(part.chunks * kChecksumBytes);
      const auto* bytes = reinterpret_cast<const std::byte*>(table(index, d, slot));
      state.table_checksum = checksum_of({bytes, size});
      batch.write(d, part.table_offset_bytes[static_cast<size_t>(slot)],
                  {bytes, align_up(size, static_cast<size_t>(map_.alignment_bytes))},
                  fmt::format("checksums of the {}", describe(of.spec)));
    }
  }
  batch.wait();
  batch.sync_all();
  batch.wait();
}

void Store::Impl::write_superblocks(std::vector<Superblock>& next) {
  const uint64_t generation = ++highest_generation_;
  const uint64_t commit_id = random_id();
  DriveBatch batch(drives_);
  for (size_t d = 0; d < drives_.size(); ++d) {
    Superblock& superblock = next[d];
    superblock.generation = generation;
    superblock.commit_id = commit_id;
    if (!superblock.in_flux) superblock.committed_generation = generation;
    superblock.bytes_written_total =
        written_before_[d] + drives_[d]->statistics().total().written + encoded_bytes(superblock);
    const std::span<std::byte> bytes = superblock_bytes_[d].bytes();
    const size_t size = encode(superblock, bytes);
    const auto position = static_cast<int64_t>((1 - positions_[d]) * kSuperblockSpan);
    batch.write(d, position, bytes.first(size), "superblock");
  }
  batch.wait();
  // Until all drives have it, the generation before is what counts, and its superblocks and slots
  // are all there: nothing is written over them before this sync has ended.
  batch.sync_all();
  batch.wait();
}

void Store::Impl::adopt(std::vector<Superblock> next) {
  for (size_t& position : positions_) position = 1 - position;
  superblocks_ = std::move(next);
  in_flux_ = superblocks_.front().in_flux;
  generation_ = superblocks_.front().committed_generation;
}

CheckResult Store::Impl::check() {
  CheckResult result;
  check_maps(result);
  check_chunks(result);
  return result;
}

void Store::Impl::check_maps(CheckResult& result) {
  const Superblock& superblock = superblocks_.front();
  AlignedBuffer buffer(
      align_up(superblock.map_size_bytes, static_cast<size_t>(map_.alignment_bytes)),
      static_cast<size_t>(map_.alignment_bytes));
  for (const auto& drive : drives_) {
    for (const int64_t offset : map_offsets(superblock.map_size_bytes, map_.alignment_bytes)) {
      try {
        drive->read(offset, buffer.bytes());
      } catch (const Error& error) {
        result.faults.push_back(fmt::format("{} (a copy of the map)", error.what()));
        continue;
      }
      if (checksum_of(buffer.bytes().first(superblock.map_size_bytes)) == superblock.map_checksum) {
        continue;
      }
      result.faults.push_back(
          fmt::format("a copy of the map in '{}', {} bytes at offset {}, is damaged",
                      drive->path().string(), superblock.map_size_bytes, offset));
    }
  }
}

void Store::Impl::check_tables(CheckResult& result, int index, int slot) {
  const Record& of = record(index);
  for (size_t d = 0; d < drives_.size(); ++d) {
    const Part& part = of.parts[d];
    if (part.chunks == 0) continue;
    const int64_t offset = part.table_offset_bytes[static_cast<size_t>(slot)];
    const auto describe_table = [&](std::string_view what) {
      return fmt::format("the checksums of the {} in '{}' at offset {} are damaged{}",
                         describe(of.spec), drives_[d]->path().string(), offset, what);
    };
    if (is_table_damaged(index, d)) {
      result.faults.push_back(
          describe_table(fmt::format(": its {} chunks there cannot be verified", part.chunks)));
      continue;
    }
    // What opening read may have been damaged since; the chunks can still be verified with that.
    const auto size = static_cast<size_t>(part.chunks * kChecksumBytes);
    const auto alignment = static_cast<size_t>(map_.alignment_bytes);
    const AlignedBuffer buffer(align_up(size, alignment), alignment);
    try {
      drives_[d]->read(offset, buffer.bytes());
    } catch (const Error& error) {
      result.faults.push_back(
          fmt::format("{} (the checksums of the {})", error.what(), describe(of.spec)));
      continue;
    }
    if (checksum_of(buffer.bytes().first(size)) !=
        superblocks_[d].records[static_cast<size_t>(index)].table_checksum) {
      result.faults.push_back(describe_table(
          " since they were read: after this run its chunks there cannot be verified"));
    }
  }
}

void Store::Impl::give_up(const std::vector<Superblock>& newer) {
  CheckResult result;
  check_chunks(result, &newer);
  if (!result.faults.empty()) {
    throw failure(fmt::format(
        "the store in '{}' cannot go back from generation {} to {}, which was written over since "
        "({}); resume from a checkpoint",
        drives_.front()->path().string(), newer.front().generation, generation_.load(),
        result.faults.front()));
  }
  // Over the newer ones: with the first of them gone, no drive can have it any more, and until the
  // last is written the generation that holds is this one as it lies beside them.
  std::vector<Superblock> next = superblocks_;
  write_superblocks(next);
  const std::lock_guard lock(mutex_);
  adopt(std::move(next));
}

void Store::Impl::check_chunks(CheckResult& result, const std::vector<Superblock>* other) {
  constexpr size_t kReadsInFlight = 32;
  CheckWindow window(kReadsInFlight, static_cast<size_t>(map_.chunk_size_bytes),
                     static_cast<size_t>(map_.alignment_bytes));
  for (size_t r = 0; r < map_.records.size(); ++r) {
    const Record& of = map_.records[r];
    const auto index = static_cast<int>(r);
    Side side;
    {
      const std::lock_guard lock(mutex_);
      side = current_side(index);
      if (side.is_shadow || !was_committed(index)) continue;
    }
    if (other != nullptr && has_same(superblocks_, *other, r)) continue;
    check_tables(result, index, side.table_slot);
    for (int64_t i = 0; i < of.chunks; ++i) {
      const int drive = map_.place(of, i).drive;
      if (is_table_damaged(index, static_cast<size_t>(drive))) continue;
      CheckWindow::Slot& slot = window.next(result.faults);
      ChunkTransfer transfer = locate(index, i, side);
      transfer.data = slot.buffer.data();
      const uint32_t ticket = io_->begin(
          {Operation::kRead, Priority::kStateRead, of.spec.kind, 0, CheckWindow::sink(slot), 1});
      io_->add(ticket, drive, transfer);
      ++result.chunks;
      result.bytes += static_cast<int64_t>(transfer.content_bytes);
    }
  }
  window.finish(result.faults);
}

}  // namespace strata::nvme
