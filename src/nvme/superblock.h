// The superblock of a store: what one drive's arena file says about the generation it holds. Pure
// functions over bytes; docs/formats.md describes them.
//
// An arena file has room for two superblocks, so that the one that holds is never overwritten: it
// is the newest whose checksum is right and of which every drive has its own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/bytes.h"

namespace strata::nvme {

inline constexpr uint32_t kStoreFormat = 1;
/// From the first superblock to the second, and from that to the map.
inline constexpr size_t kSuperblockSpan = 256 * kKiB;
inline constexpr size_t kSuperblocks = 2;
inline constexpr size_t kMaxMetadataBytes = 16 * kKiB;
inline constexpr size_t kMaxRecords = 10000;

using StoreId = std::array<uint8_t, 16>;

/// XXH3-64, seed 0: the checksum of everything in a store.
[[nodiscard]] uint64_t checksum_of(std::span<const std::byte> bytes) noexcept;

/// What a generation holds of one record, on one drive.
struct RecordState {
  uint64_t generation = 0;      // whose commit wrote it; 0: never written
  uint64_t table_checksum = 0;  // of the chunk checksums of the record's part on this drive
  uint32_t slot = 0;            // the current one

  [[nodiscard]] bool operator==(const RecordState&) const = default;
};

struct Superblock {
  StoreId store_id{};
  uint32_t drive_index = 0;
  uint32_t drive_count = 1;
  uint64_t generation = 0;            // one more for each superblock
  uint64_t commit_id = 0;             // drawn at random; the same on all drives of one generation
  uint64_t committed_generation = 0;  // less than `generation` where in_flux
  bool in_flux = false;               // records with one slot are being overwritten
  uint64_t file_size_bytes = 0;
  uint64_t bytes_written_total = 0;  // to this drive, this superblock included
  uint32_t alignment_bytes = 4096;   // of everything in the file; a power of two
  uint64_t map_size_bytes = 0;
  uint64_t map_checksum = 0;
  std::vector<RecordState> records;
  std::vector<std::byte> metadata;

  [[nodiscard]] bool operator==(const Superblock&) const = default;
};

/// Bytes of the encoded superblock: a multiple of its alignment.
[[nodiscard]] size_t encoded_bytes(const Superblock& superblock) noexcept;

/// Writes the superblock into `out` (kSuperblockSpan bytes) and returns how many are to be written
/// to the drive: encoded_bytes, which must not exceed kSuperblockSpan. At most kMaxRecords records
/// and kMaxMetadataBytes of metadata.
[[nodiscard]] size_t encode(const Superblock& superblock, std::span<std::byte> out);

enum class SuperblockFault : uint8_t {
  kNone,
  kEmpty,           // zeros: never written
  kNotAStore,       // does not begin as a superblock does
  kOtherByteOrder,  // written by a machine of the other endianness
  kOtherFormat,
  kDamaged  // cut short, torn, or changed
};

struct DecodedSuperblock {
  SuperblockFault fault = SuperblockFault::kEmpty;
  uint32_t format = 0;    // with kOtherFormat
  Superblock superblock;  // with kNone
};

/// Reads the superblock at the beginning of `bytes`, of which kSuperblockSpan are enough.
[[nodiscard]] DecodedSuperblock decode_superblock(std::span<const std::byte> bytes);

}  // namespace strata::nvme
