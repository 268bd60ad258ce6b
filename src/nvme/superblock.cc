#include "nvme/superblock.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace strata::nvme {
namespace {

static_assert(std::endian::native == std::endian::little, "stores are little-endian");

constexpr std::array<char, 8> kMagic{'S', 'T', 'R', 'A', 'T', 'A', 'S', 'B'};
constexpr uint64_t kByteOrder = 0x0102030405060708;
constexpr uint32_t kInFlux = 1;

struct Header {
  std::array<char, 8> magic = kMagic;
  uint32_t format = kStoreFormat;
  uint32_t size_bytes = 0;
  uint64_t byte_order = kByteOrder;
  StoreId store_id{};
  uint32_t drive_index = 0;
  uint32_t drive_count = 0;
  uint64_t generation = 0;
  uint64_t commit_id = 0;
  uint64_t committed_generation = 0;
  uint64_t file_size_bytes = 0;
  uint64_t bytes_written_total = 0;
  uint64_t map_size_bytes = 0;
  uint64_t map_checksum = 0;
  uint32_t flags = 0;
  uint32_t record_count = 0;
  uint32_t metadata_size_bytes = 0;
  uint32_t alignment_bytes = 0;
  std::array<uint32_t, 2> reserved{};
};
static_assert(sizeof(Header) == 128 && offsetof(Header, byte_order) == 16 &&
              offsetof(Header, generation) == 48 && offsetof(Header, flags) == 104);

struct Entry {
  uint64_t generation = 0;
  uint64_t table_checksum = 0;
  uint32_t slot = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Entry) == 24);

constexpr size_t kChecksumBytes = sizeof(uint64_t);
static_assert(sizeof(Header) + kMaxRecords * sizeof(Entry) + kMaxMetadataBytes + kChecksumBytes <=
              kSuperblockSpan);

size_t content_bytes(size_t records, size_t metadata_bytes) {
  return sizeof(Header) + records * sizeof(Entry) + metadata_bytes + kChecksumBytes;
}

template <class T>
void put(std::span<std::byte> out, size_t offset_bytes, const T& value) {
  std::memcpy(out.data() + offset_bytes, &value, sizeof value);
}

template <class T>
T get(std::span<const std::byte> bytes, size_t offset_bytes) {
  T value;
  std::memcpy(&value, bytes.data() + offset_bytes, sizeof value);
  return value;
}

}  // namespace

uint64_t checksum_of(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

size_t encoded_bytes(const Superblock& superblock) noexcept {
  return align_up(content_bytes(superblock.records.size(), superblock.metadata.size()),
                  superblock.alignment_bytes);
}

size_t encode(const Superblock& superblock, std::span<std::byte> out) {
  STRATA_CHECK(superblock.records.size() <= kMaxRecords, "too many records for a superblock");
  STRATA_CHECK(superblock.metadata.size() <= kMaxMetadataBytes, "too much metadata");
  STRATA_CHECK(out.size() >= kSuperblockSpan, "no room for a superblock");
  const size_t size = align_up(content_bytes(superblock.records.size(), superblock.metadata.size()),
                               superblock.alignment_bytes);
  STRATA_CHECK(size <= kSuperblockSpan, "the alignment is larger than a superblock");

  std::fill_n(out.begin(), size, std::byte{0});
  Header header;
  header.size_bytes = static_cast<uint32_t>(size);
  header.store_id = superblock.store_id;
  header.drive_index = superblock.drive_index;
  header.drive_count = superblock.drive_count;
  header.generation = superblock.generation;
  header.commit_id = superblock.commit_id;
  header.committed_generation = superblock.committed_generation;
  header.file_size_bytes = superblock.file_size_bytes;
  header.bytes_written_total = superblock.bytes_written_total;
  header.alignment_bytes = superblock.alignment_bytes;
  header.map_size_bytes = superblock.map_size_bytes;
  header.map_checksum = superblock.map_checksum;
  header.flags = superblock.in_flux ? kInFlux : 0;
  header.record_count = static_cast<uint32_t>(superblock.records.size());
  header.metadata_size_bytes = static_cast<uint32_t>(superblock.metadata.size());
  put(out, 0, header);
  size_t at = sizeof(Header);
  for (const RecordState& record : superblock.records) {
    put(out, at, Entry{record.generation, record.table_checksum, record.slot, 0});
    at += sizeof(Entry);
  }
  std::copy(superblock.metadata.begin(), superblock.metadata.end(),
            out.begin() + static_cast<std::ptrdiff_t>(at));
  put(out, size - kChecksumBytes, checksum_of(out.first(size - kChecksumBytes)));
  return size;
}

DecodedSuperblock decode_superblock(std::span<const std::byte> bytes) {
  DecodedSuperblock decoded;
  decoded.fault = SuperblockFault::kDamaged;
  if (bytes.size() < sizeof(Header)) return decoded;
  const auto header = get<Header>(bytes, 0);
  if (header.magic == std::array<char, 8>{}) {
    decoded.fault = SuperblockFault::kEmpty;
    return decoded;
  }
  if (header.magic != kMagic) {
    decoded.fault = SuperblockFault::kNotAStore;
    return decoded;
  }
  if (header.byte_order == __builtin_bswap64(kByteOrder)) {
    decoded.fault = SuperblockFault::kOtherByteOrder;
    return decoded;
  }
  if (header.format != kStoreFormat) {
    decoded.fault = SuperblockFault::kOtherFormat;
    decoded.format = header.format;
    return decoded;
  }
  const size_t size = header.size_bytes;
  if (size > bytes.size() || size > kSuperblockSpan || size < content_bytes(0, 0)) return decoded;
  if (get<uint64_t>(bytes, size - kChecksumBytes) !=
      checksum_of(bytes.first(size - kChecksumBytes))) {
    return decoded;
  }
  if (header.byte_order != kByteOrder || !std::has_single_bit(header.alignment_bytes) ||
      header.alignment_bytes > kSuperblockSpan || header.record_count > kMaxRecords ||
      header.metadata_size_bytes > kMaxMetadataBytes ||
      content_bytes(header.record_count, header.metadata_size_bytes) > size) {
    return decoded;
  }

  Superblock& superblock = decoded.superblock;
  superblock.store_id = header.store_id;
  superblock.drive_index = header.drive_index;
  superblock.drive_count = header.drive_count;
  superblock.generation = header.generation;
  superblock.commit_id = header.commit_id;
  superblock.committed_generation = header.committed_generation;
  superblock.in_flux = (header.flags & kInFlux) != 0;
  superblock.file_size_bytes = header.file_size_bytes;
  superblock.bytes_written_total = header.bytes_written_total;
  superblock.alignment_bytes = header.alignment_bytes;
  superblock.map_size_bytes = header.map_size_bytes;
  superblock.map_checksum = header.map_checksum;
  size_t at = sizeof(Header);
  superblock.records.reserve(header.record_count);
  for (uint32_t i = 0; i < header.record_count; ++i, at += sizeof(Entry)) {
    const auto entry = get<Entry>(bytes, at);
    superblock.records.push_back({entry.generation, entry.table_checksum, entry.slot});
  }
  const auto metadata = bytes.subspan(at, header.metadata_size_bytes);
  superblock.metadata.assign(metadata.begin(), metadata.end());
  decoded.fault = SuperblockFault::kNone;
  return decoded;
}

}  // namespace strata::nvme
