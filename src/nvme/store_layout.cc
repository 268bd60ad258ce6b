#include "nvme/store_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "nvme/superblock.h"

namespace strata::nvme {
namespace {

constexpr int64_t kChecksumBytes = sizeof(uint64_t);
constexpr int64_t kLargestRecord = int64_t{1} << 56;
constexpr size_t kSlots = 2;

struct MapHeader {
  uint64_t chunk_size_bytes = 0;
  uint64_t alignment_bytes = 0;
  uint64_t chunks = 0;
  uint32_t records = 0;
  uint32_t drives = 0;
};
struct DriveEntry {
  uint64_t file_size_bytes = 0;
  uint64_t tables_offset_bytes = 0;
  uint64_t tables_size_bytes = 0;
};
struct RecordEntry {
  uint64_t size_bytes = 0;
  int32_t unit = 0;
  uint8_t kind = 0;
  uint8_t slots = 0;
  uint16_t reserved = 0;
};
struct PartEntry {
  std::array<uint64_t, kSlots> data_offset_bytes{};
  std::array<uint64_t, kSlots> table_offset_bytes{};
};
static_assert(sizeof(MapHeader) == 32 && sizeof(DriveEntry) == 24 && sizeof(RecordEntry) == 16 &&
              sizeof(PartEntry) == 32);

int64_t align(int64_t bytes, int64_t alignment_bytes) {
  return (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

size_t encoded_bytes(size_t records, size_t drives, size_t chunks) {
  return sizeof(MapHeader) + drives * sizeof(DriveEntry) +
         records * (sizeof(RecordEntry) + drives * sizeof(PartEntry)) + chunks;
}

int data_slots(Slots slots) { return slots == Slots::kTwo ? 2 : 1; }
int table_slots(Slots slots) { return slots == Slots::kScratch ? 1 : 2; }

void check_records(std::span<const RecordSpec> records) {
  if (records.empty()) throw usage_error("a store needs at least one record");
  if (records.size() > kMaxRecords) {
    throw usage_error(fmt::format("a store has room for {} records, and {} were asked for",
                                  kMaxRecords, records.size()));
  }
  std::set<std::pair<int, Traffic>> seen;
  for (const RecordSpec& record : records) {
    if (record.size_bytes < 1 || record.size_bytes > kLargestRecord) {
      throw usage_error(
          fmt::format("the {} cannot have {} bytes", describe(record), record.size_bytes));
    }
    if (!seen.emplace(record.unit, record.kind).second) {
      throw usage_error(fmt::format("the {} is in the list of records twice", describe(record)));
    }
  }
}

/// Gives each chunk to the drive that is least full for its capacity.
class Spreader {
 public:
  Spreader(std::span<const DriveCapacity> drives, int64_t fixed_bytes, int64_t alignment_bytes)
      : drives_(drives), alignment_(alignment_bytes), used_(drives.size(), fixed_bytes) {}

  void begin_record(Slots slots) {
    slots_ = slots;
    chunks_.assign(drives_.size(), 0);
  }

  /// Bytes that no drive had room for are counted in missing().
  size_t place(int64_t stored_bytes) {
    size_t best = drives_.size();
    size_t cheapest = 0;
    double least = 0;
    for (size_t d = 0; d < drives_.size(); ++d) {
      if (cost(d, stored_bytes) < cost(cheapest, stored_bytes)) cheapest = d;
      const int64_t after = used_[d] + cost(d, stored_bytes);
      if (after > drives_[d].size_bytes) continue;
      const double fill = static_cast<double>(after) / static_cast<double>(drives_[d].size_bytes);
      if (best == drives_.size() || fill < least) {
        best = d;
        least = fill;
      }
    }
    const bool has_room = best < drives_.size();
    if (!has_room) best = cheapest;
    (has_room ? used_[best] : missing_) += cost(best, stored_bytes);
    ++chunks_[best];  // without room too: the next one's table is no longer than it would be
    return best;
  }

  [[nodiscard]] const std::vector<int64_t>& chunks() const noexcept { return chunks_; }
  [[nodiscard]] int64_t missing() const noexcept { return missing_; }
  [[nodiscard]] int64_t used() const noexcept {
    int64_t sum = 0;
    for (const int64_t bytes : used_) sum += bytes;
    return sum;
  }

 private:
  [[nodiscard]] int64_t table(int64_t chunks) const {
    return align(chunks * kChecksumBytes, alignment_);
  }
  /// Of one more chunk on the drive.
  [[nodiscard]] int64_t cost(size_t drive, int64_t stored_bytes) const {
    const int64_t chunks = chunks_[drive];
    return data_slots(slots_) * stored_bytes +
           table_slots(slots_) * (table(chunks + 1) - table(chunks));
  }

  std::span<const DriveCapacity> drives_;
  int64_t alignment_;
  Slots slots_ = Slots::kTwo;
  std::vector<int64_t> used_, chunks_;
  int64_t missing_ = 0;
};

/// Fills in what follows from the other fields: StoreMap::index_of_chunk and Part::chunks.
void number_chunks(StoreMap& map) {
  map.index_of_chunk.resize(map.drive_of_chunk.size());
  for (Record& record : map.records) {
    for (Part& part : record.parts) part.chunks = 0;
    for (int64_t i = 0; i < record.chunks; ++i) {
      const auto number = static_cast<size_t>(record.first_chunk + i);
      Part& part = record.parts[map.drive_of_chunk[number]];
      map.index_of_chunk[number] = static_cast<uint32_t>(part.chunks++);
    }
  }
}

/// Gives every part its extents, drive by drive: first all tables, then the data.
void place_parts(StoreMap& map, int64_t fixed_bytes) {
  for (size_t d = 0; d < map.drives.size(); ++d) {
    DriveMap& drive = map.drives[d];
    int64_t at = fixed_bytes;
    drive.tables_offset_bytes = at;
    for (Record& record : map.records) {
      Part& part = record.parts[d];
      const int64_t size = align(part.chunks * kChecksumBytes, map.alignment_bytes);
      part.table_offset_bytes = {at, table_slots(record.spec.slots) == 2 ? at + size : at};
      at += table_slots(record.spec.slots) * size;
    }
    drive.tables_size_bytes = at - drive.tables_offset_bytes;
    for (Record& record : map.records) {
      Part& part = record.parts[d];
      int64_t size = part.chunks * map.chunk_size_bytes;
      if (map.place(record, record.chunks - 1).drive == static_cast<int>(d)) {
        size -= map.chunk_size_bytes - map.stored_chunk_bytes(record, record.chunks - 1);
      }
      part.data_offset_bytes = {at, data_slots(record.spec.slots) == 2 ? at + size : at};
      at += data_slots(record.spec.slots) * size;
    }
    drive.file_size_bytes = at;
  }
}

template <class T>
void put(std::vector<std::byte>& out, size_t& at, const T& value) {
  std::memcpy(out.data() + at, &value, sizeof value);
  at += sizeof value;
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
  T get() {
    require(sizeof(T) <= rest_.size());
    T value;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return value;
  }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return rest_; }
  static void require(bool condition) {
    if (!condition) throw failure("the map of the store makes no sense");
  }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace

std::string_view name_of(Traffic kind) noexcept {
  switch (kind) {
    case Traffic::kWeight:
      return "weight";
    case Traffic::kResidual:
      return "residual";
    case Traffic::kMoment1:
      return "moment1";
    case Traffic::kMoment2:
      return "moment2";
    case Traffic::kGradient:
      return "gradient";
    case Traffic::kBoundary:
      return "boundary";
    case Traffic::kOther:
      return "other";
  }
  return "other";
}

std::string_view name_of(Slots slots) noexcept {
  switch (slots) {
    case Slots::kTwo:
      return "two";
    case Slots::kOne:
      return "one";
    case Slots::kScratch:
      return "scratch";
  }
  return "";
}

std::string describe(const RecordSpec& record) {
  return fmt::format("{} of unit {}", name_of(record.kind), record.unit);
}

int64_t StoreMap::chunk_bytes(const Record& record, int64_t chunk) const noexcept {
  return std::min(chunk_size_bytes, record.spec.size_bytes - chunk * chunk_size_bytes);
}

int64_t StoreMap::stored_chunk_bytes(const Record& record, int64_t chunk) const noexcept {
  return align(chunk_bytes(record, chunk), alignment_bytes);
}

int64_t StoreMap::stored_bytes(const Record& record) const noexcept {
  return align(record.spec.size_bytes, alignment_bytes);
}

std::array<int64_t, 2> map_offsets(size_t map_size_bytes, int64_t alignment_bytes) {
  const auto first = static_cast<int64_t>(kSuperblocks * kSuperblockSpan);
  return {first, first + align(static_cast<int64_t>(map_size_bytes), alignment_bytes)};
}

StoreMap make_map(std::span<const RecordSpec> records, std::span<const DriveCapacity> drives,
                  int64_t chunk_size_bytes, int64_t alignment_bytes) {
  STRATA_CHECK(
      chunk_size_bytes > 0 && alignment_bytes > 0 && chunk_size_bytes % alignment_bytes == 0,
      "the chunk size is not a multiple of the alignment");
  check_records(records);
  if (drives.empty() || drives.size() > kMaxDrives) {
    throw usage_error(
        fmt::format("a store can have 1 to {} drives, not {}", kMaxDrives, drives.size()));
  }
  StoreMap map;
  map.chunk_size_bytes = chunk_size_bytes;
  map.alignment_bytes = alignment_bytes;
  map.drives.resize(drives.size());
  int64_t total_chunks = 0;
  for (const RecordSpec& spec : records) {
    Record record{spec, total_chunks, (spec.size_bytes + chunk_size_bytes - 1) / chunk_size_bytes,
                  std::vector<Part>(drives.size())};
    total_chunks += record.chunks;
    map.records.push_back(std::move(record));
  }
  const size_t map_bytes =
      encoded_bytes(records.size(), drives.size(), static_cast<size_t>(total_chunks));
  const auto [first, second] = map_offsets(map_bytes, alignment_bytes);
  const int64_t fixed_bytes = second + (second - first);

  Spreader spreader(drives, fixed_bytes, alignment_bytes);
  map.drive_of_chunk.reserve(static_cast<size_t>(total_chunks));
  for (const Record& record : map.records) {
    spreader.begin_record(record.spec.slots);
    for (int64_t i = 0; i < record.chunks; ++i) {
      const size_t drive = spreader.place(map.stored_chunk_bytes(record, i));
      map.drive_of_chunk.push_back(static_cast<uint8_t>(drive));
    }
  }
  if (spreader.missing() > 0) {
    int64_t capacity = 0;
    std::string names;
    for (const DriveCapacity& drive : drives) {
      capacity += std::max<int64_t>(drive.size_bytes, 0);
      names += fmt::format("{}'{}'", names.empty() ? "" : ", ", drive.name);
    }
    const int64_t needed = spreader.used() + spreader.missing();
    throw Error(
        ErrorKind::kDoesNotFit,
        fmt::format("the store needs {} ({} bytes), and {} has room for {} ({} bytes); free "
                    "space, raise the limit, add a drive, or keep less state on disk",
                    format_bytes(static_cast<size_t>(needed)), needed, names,
                    format_bytes(static_cast<size_t>(capacity)), capacity));
  }
  for (const DriveCapacity& drive : drives) {
    if (drive.size_bytes >= fixed_bytes) continue;
    throw Error(ErrorKind::kDoesNotFit,
                fmt::format("the store needs at least {} bytes in each of its directories, and may "
                            "use {} in '{}'; free space there, raise the limit, or leave it out",
                            fixed_bytes, std::max<int64_t>(drive.size_bytes, 0), drive.name));
  }
  number_chunks(map);
  place_parts(map, fixed_bytes);
  return map;
}

std::vector<std::byte> encode(const StoreMap& map) {
  std::vector<std::byte> out(
      encoded_bytes(map.records.size(), map.drives.size(), map.drive_of_chunk.size()));
  size_t at = 0;
  put(out, at,
      MapHeader{static_cast<uint64_t>(map.chunk_size_bytes),
                static_cast<uint64_t>(map.alignment_bytes), map.drive_of_chunk.size(),
                static_cast<uint32_t>(map.records.size()),
                static_cast<uint32_t>(map.drives.size())});
  for (const DriveMap& drive : map.drives) {
    put(out, at,
        DriveEntry{static_cast<uint64_t>(drive.file_size_bytes),
                   static_cast<uint64_t>(drive.tables_offset_bytes),
                   static_cast<uint64_t>(drive.tables_size_bytes)});
  }
  for (const Record& record : map.records) {
    put(out, at,
        RecordEntry{static_cast<uint64_t>(record.spec.size_bytes), record.spec.unit,
                    static_cast<uint8_t>(record.spec.kind), static_cast<uint8_t>(record.spec.slots),
                    0});
    for (const Part& part : record.parts) {
      PartEntry entry;
      for (size_t slot = 0; slot < kSlots; ++slot) {
        entry.data_offset_bytes[slot] = static_cast<uint64_t>(part.data_offset_bytes[slot]);
        entry.table_offset_bytes[slot] = static_cast<uint64_t>(part.table_offset_bytes[slot]);
      }
      put(out, at, entry);
    }
  }
  std::memcpy(out.data() + at, map.drive_of_chunk.data(), map.drive_of_chunk.size());
  return out;
}

StoreMap decode_map(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const auto header = reader.get<MapHeader>();
  const auto require = Reader::require;
  require(header.records >= 1 && header.records <= kMaxRecords);
  require(header.drives >= 1 && header.drives <= kMaxDrives);
  require(header.chunks <= bytes.size() &&
          bytes.size() == encoded_bytes(header.records, header.drives, header.chunks));
  StoreMap map;
  map.chunk_size_bytes = static_cast<int64_t>(header.chunk_size_bytes);
  map.alignment_bytes = static_cast<int64_t>(header.alignment_bytes);
  require(map.alignment_bytes > 0 && map.chunk_size_bytes > 0 &&
          map.chunk_size_bytes <= kLargestRecord &&
          map.chunk_size_bytes % map.alignment_bytes == 0);
  for (uint32_t d = 0; d < header.drives; ++d) {
    const auto entry = reader.get<DriveEntry>();
    map.drives.push_back({static_cast<int64_t>(entry.file_size_bytes),
                          static_cast<int64_t>(entry.tables_offset_bytes),
                          static_cast<int64_t>(entry.tables_size_bytes)});
  }
  int64_t chunks = 0;
  for (uint32_t r = 0; r < header.records; ++r) {
    const auto entry = reader.get<RecordEntry>();
    require(entry.size_bytes >= 1 && entry.size_bytes <= kLargestRecord &&
            entry.kind < kTrafficKinds && entry.slots <= static_cast<uint8_t>(Slots::kScratch));
    Record record;
    record.spec = {entry.unit, static_cast<Traffic>(entry.kind),
                   static_cast<int64_t>(entry.size_bytes), static_cast<Slots>(entry.slots)};
    record.first_chunk = chunks;
    record.chunks = (record.spec.size_bytes + map.chunk_size_bytes - 1) / map.chunk_size_bytes;
    chunks += record.chunks;
    for (uint32_t d = 0; d < header.drives; ++d) {
      const auto part = reader.get<PartEntry>();
      Part& to = record.parts.emplace_back();
      for (size_t slot = 0; slot < kSlots; ++slot) {
        to.data_offset_bytes[slot] = static_cast<int64_t>(part.data_offset_bytes[slot]);
        to.table_offset_bytes[slot] = static_cast<int64_t>(part.table_offset_bytes[slot]);
      }
    }
    map.records.push_back(std::move(record));
  }
  require(static_cast<uint64_t>(chunks) == header.chunks);
  for (const std::byte drive : reader.rest()) {
    require(std::to_integer<uint32_t>(drive) < header.drives);
    map.drive_of_chunk.push_back(std::to_integer<uint8_t>(drive));
  }
  number_chunks(map);
  for (const Record& record : map.records) {
    for (uint32_t d = 0; d < header.drives; ++d) {
      const DriveMap& drive = map.drives[d];
      const Part& part = record.parts[d];
      for (size_t slot = 0; slot < kSlots; ++slot) {
        const int64_t table = part.table_offset_bytes[slot] - drive.tables_offset_bytes;
        require(table >= 0 && table + part.chunks * kChecksumBytes <= drive.tables_size_bytes);
        require(part.data_offset_bytes[slot] >= 0 &&
                part.data_offset_bytes[slot] <= drive.file_size_bytes);
      }
    }
  }
  return map;
}

}  // namespace strata::nvme
