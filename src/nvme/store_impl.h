// What is behind a Store: its drives, its map, and for each record where the last commit and what
// was written since are. Private to the store's sources.
#pragma once

#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "nvme/aligned_buffer.h"
#include "nvme/arena_file.h"
#include "nvme/chunk_io.h"
#include "nvme/store.h"
#include "nvme/store_layout.h"
#include "nvme/superblock.h"

namespace strata::nvme {

class Store::Impl {
 public:
  /// All that opening found. Everything is in the order of the store's drives.
  struct Opened {
    StoreOptions options;
    std::vector<UniqueFd> locks;
    std::vector<std::unique_ptr<Drive>> drives;
    StoreMap map;
    std::vector<Superblock> superblocks;     // of the generation that holds
    std::vector<Superblock> newer;           // of the one that is given up for it; or empty
    std::vector<AvailableGeneration> older;  // that may be gone back to
    std::vector<size_t> positions;           // where these lie: 0 or 1
    uint64_t highest_generation = 0;         // of all superblocks, whether they hold or not
    std::vector<AlignedBuffer> tables;       // each drive's tables as they lie there
    std::vector<uint8_t> damaged_tables;     // [record x drive]
    std::vector<std::string> notes;
  };

  /// Makes the files of a store, which are removed again where anything throws.
  static std::unique_ptr<Impl> create(const std::vector<StoreDirectory>& directories,
                                      std::span<const RecordSpec> records, StoreOptions options);
  /// `locks` has the lock of each directory, or is empty.
  static Opened open_files(const std::vector<StoreDirectory>& directories, StoreOptions options,
                           std::vector<UniqueFd> locks);

  static std::vector<AvailableGeneration> generations(
      const std::vector<StoreDirectory>& directories, StoreOptions options);

  explicit Impl(Opened opened);
  ~Impl();
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void read_async(const ReadRequest& request);
  void write_async(const WriteRequest& request);
  CommitResult commit(std::span<const std::byte> metadata);
  void discard(int record);
  CheckResult check();
  /// Makes the generation that holds the newest, if all of it is there that differs from `newer`.
  void give_up(const std::vector<Superblock>& newer);
  void close();

  [[nodiscard]] const Record& record(int index) const {
    STRATA_CHECK(index >= 0 && static_cast<size_t>(index) < map_.records.size(), "no such record");
    return map_.records[static_cast<size_t>(index)];
  }
  [[nodiscard]] CommittedRecord committed(int index) const;
  [[nodiscard]] bool has_whole_shadow(int index) const;
  [[nodiscard]] uint64_t generation() const noexcept { return generation_; }
  [[nodiscard]] std::span<const std::byte> metadata() const noexcept { return metadata_; }
  [[nodiscard]] const StoreId& id() const noexcept { return id_; }
  [[nodiscard]] std::optional<int> find(int unit, Traffic kind) const noexcept;
  [[nodiscard]] int64_t bytes_written_total() const noexcept;

  [[nodiscard]] const StoreMap& map() const noexcept { return map_; }
  [[nodiscard]] const StoreOptions& options() const noexcept { return options_; }
  [[nodiscard]] const std::vector<std::unique_ptr<Drive>>& drives() const noexcept {
    return drives_;
  }
  [[nodiscard]] bool in_flux() const noexcept { return in_flux_; }
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept { return notes_; }
  [[nodiscard]] std::optional<std::string> first_error() const { return io_->first_error(); }

 private:
  /// Where a version of a record is.
  struct Side {
    int data_slot = 0;
    int table_slot = 0;
    bool is_shadow = false;  // chunks count where they were written since the last commit
    bool may_be_lost = false;
  };

  /// Reads and verifies the tables of one drive; where they cannot be read at once, one by one, so
  /// that a bad sector takes no more with it than it must.
  static void read_tables(Opened& opened, size_t d);
  static std::string describe_chunk(const void* impl, int record, int64_t chunk);
  /// The number of chunks from `offset_bytes` on that `size_bytes` are.
  [[nodiscard]] int64_t count_chunks(const Record& record, int64_t offset_bytes,
                                     size_t size_bytes) const;
  [[nodiscard]] ChunkTransfer locate(int index, int64_t chunk, const Side& side);
  [[nodiscard]] uint64_t* table(int index, size_t drive, int slot);
  [[nodiscard]] bool is_table_damaged(int index, size_t drive) const;

  // All below with mutex_ held.
  [[nodiscard]] bool was_committed(int index) const {
    return superblocks_.front().records[static_cast<size_t>(index)].generation > 0;
  }
  [[nodiscard]] Side current_side(int index) const;
  [[nodiscard]] Side shadow_side(int index) const;
  void require_readable(int index, int64_t first, int64_t chunks, const Side& side);
  void begin_shadow(int index);
  /// Throws a usage error that names the records that must be written before a commit.
  void require_committable() const;
  void end_shadow(int index);
  [[nodiscard]] bool is_whole(int index) const;
  void require_writable() const;
  /// Makes the generation that is durable now what counts.
  void adopt(std::vector<Superblock> next);
  [[nodiscard]] bool is_to_be_committed(size_t index) const {
    return has_shadow_[index] != 0 && map_.records[index].spec.slots != Slots::kScratch;
  }

  // By commit, and with mutex_ held by the first write over a committed record. Each is durable on
  // all drives when it returns.
  /// Writes the tables of what was written since the last commit.
  void write_tables(std::vector<Superblock>& next);
  /// Writes the superblocks of a new generation over those that do not count.
  void write_superblocks(std::vector<Superblock>& next);

  /// From a handler: the exception becomes the first error.
  void keep_current_exception();

  void check_maps(CheckResult& result);
  void check_tables(CheckResult& result, int index, int slot);
  /// Of all records, or of those that differ from `other`.
  void check_chunks(CheckResult& result, const std::vector<Superblock>* other = nullptr);

  const StoreOptions options_;
  std::vector<UniqueFd> locks_;
  std::vector<std::unique_ptr<Drive>> drives_;
  const StoreMap map_;
  std::vector<AlignedBuffer> tables_;
  std::vector<uint8_t> damaged_tables_;
  const std::vector<std::string> notes_;
  const StoreId id_;
  std::vector<AlignedBuffer> superblock_bytes_;
  std::vector<uint64_t> written_before_;  // to each drive, before it was opened
  std::unordered_map<uint64_t, int> index_;

  mutable std::mutex mutex_;
  std::vector<Superblock> superblocks_;
  std::vector<size_t> positions_;
  uint64_t highest_generation_ = 0;
  std::atomic<bool> in_flux_ = false;
  std::atomic<uint64_t> generation_ = 0;  // of the last commit
  std::vector<std::byte> metadata_;
  int64_t written_at_commit_ = 0;       // bytes_written_total at the last one
  std::vector<uint8_t> has_shadow_;     // [record]: something was written since the last commit
  std::vector<uint8_t> chunk_written_;  // [chunk]: it was
  // [record]: it has one slot, the store was in flux when it was opened, and nothing was committed
  // since. Any of its chunks may have been written over.
  std::vector<uint8_t> may_be_lost_;
  bool is_closed_ = false;

  std::unique_ptr<ChunkIo> io_;
};

}  // namespace strata::nvme
