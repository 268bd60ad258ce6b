// The map of a store: which chunk of which record lies on which drive, and where. Made once, from
// the plan's list of records; the same on every drive. Pure functions; docs/formats.md describes
// the bytes.
//
// A record is cut into chunks. Each drive holds the chunks that the map gives it, in their order
// and without gaps, in one extent for each slot: the record's part on that drive. Each part has a
// table of the checksums of its chunks, in two places, for the same reason as there are two slots.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nvme/statistics.h"

namespace strata::nvme {

/// "weight", "moment1": for messages.
[[nodiscard]] std::string_view name_of(Traffic kind) noexcept;

/// How a record is kept.
enum class Slots : uint8_t {
  kTwo,     // written beside what is committed, which stays whole
  kOne,     // written over what is committed: for what seldom or never changes, and for plans that
            // commit only when they save
  kScratch  // one slot that no commit covers: gone when the store is closed
};
[[nodiscard]] std::string_view name_of(Slots slots) noexcept;

struct RecordSpec {
  int unit = 0;
  Traffic kind = Traffic::kOther;
  int64_t size_bytes = 0;  // at least 1; need not be aligned
  Slots slots = Slots::kTwo;
  friend bool operator==(const RecordSpec&, const RecordSpec&) = default;
};

/// "weight of unit 3"
[[nodiscard]] std::string describe(const RecordSpec& record);

/// A record's chunks on one drive. What a drive has no chunk of has no extent there.
struct Part {
  std::array<int64_t, 2> data_offset_bytes{};   // by slot; the same twice where there is one
  std::array<int64_t, 2> table_offset_bytes{};  // by slot; of records with one slot too
  int64_t chunks = 0;
};

struct Record {
  RecordSpec spec;
  int64_t first_chunk = 0;  // number of its chunk 0 among all chunks of the store
  int64_t chunks = 0;
  std::vector<Part> parts;  // one for each drive
};

/// Where a chunk lies.
struct ChunkPlace {
  int drive = 0;
  int64_t index = 0;  // among the record's chunks on that drive
};

struct DriveMap {
  int64_t file_size_bytes = 0;
  int64_t tables_offset_bytes = 0;  // all tables of the drive lie together
  int64_t tables_size_bytes = 0;
};

struct StoreMap {
  int64_t chunk_size_bytes = 0;
  int64_t alignment_bytes = 0;
  std::vector<DriveMap> drives;
  std::vector<Record> records;
  std::vector<uint8_t> drive_of_chunk;   // by number among all chunks
  std::vector<uint32_t> index_of_chunk;  // likewise: ChunkPlace::index

  [[nodiscard]] ChunkPlace place(const Record& record, int64_t chunk) const noexcept {
    const auto number = static_cast<size_t>(record.first_chunk + chunk);
    return {drive_of_chunk[number], index_of_chunk[number]};
  }
  /// Bytes of the record in a chunk: the last one may have fewer than the others.
  [[nodiscard]] int64_t chunk_bytes(const Record& record, int64_t chunk) const noexcept;
  /// The same with the padding to the drives' alignment: what is transferred.
  [[nodiscard]] int64_t stored_chunk_bytes(const Record& record, int64_t chunk) const noexcept;
  /// The record's size with the padding of its last chunk.
  [[nodiscard]] int64_t stored_bytes(const Record& record) const noexcept;
  [[nodiscard]] int64_t data_offset_bytes(const Record& record, ChunkPlace place,
                                          int slot) const noexcept {
    return record.parts[static_cast<size_t>(place.drive)]
               .data_offset_bytes[static_cast<size_t>(slot)] +
           place.index * chunk_size_bytes;
  }
};

/// What a drive can give, at most.
struct DriveCapacity {
  std::string name;  // for messages
  int64_t size_bytes = 0;
};

inline constexpr size_t kMaxDrives = 255;

/// Spreads the records' chunks over the drives in proportion to their capacities, record by record,
/// so that the parts of each are read and written by all drives at once. `alignment_bytes` is a
/// power of two and `chunk_size_bytes` a multiple of it. Throws a usage error for a bad list of
/// records, and one of kind kDoesNotFit with the bytes that are needed and those that there are.
[[nodiscard]] StoreMap make_map(std::span<const RecordSpec> records,
                                std::span<const DriveCapacity> drives, int64_t chunk_size_bytes,
                                int64_t alignment_bytes);

/// Where the two copies of the encoded map lie in each arena file.
[[nodiscard]] std::array<int64_t, 2> map_offsets(size_t map_size_bytes, int64_t alignment_bytes);

[[nodiscard]] std::vector<std::byte> encode(const StoreMap& map);
/// Reads a map whose checksum was right. Throws a failure where it makes no sense all the same.
[[nodiscard]] StoreMap decode_map(std::span<const std::byte> bytes);

}  // namespace strata::nvme
