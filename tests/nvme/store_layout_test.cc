#include "nvme/store_layout.h"

#include <algorithm>
#include <random>

#include "base/bytes.h"
#include "base/error.h"
#include "catch.h"
#include "nvme/superblock.h"
#include "temporary_directory.h"

namespace strata::nvme {
namespace {

constexpr int64_t kAlignment = 4096;
constexpr int64_t kChunk = 16384;
const auto kPlenty = static_cast<int64_t>(kGiB);

std::vector<DriveCapacity> drives_of(std::vector<int64_t> sizes) {
  std::vector<DriveCapacity> drives;
  for (const int64_t size : sizes)
    drives.push_back({"/drive" + std::to_string(drives.size()), size});
  return drives;
}

std::vector<RecordSpec> random_records(std::mt19937_64& random, int count) {
  std::vector<RecordSpec> records;
  for (int i = 0; i < count; ++i) {
    // Around whole chunks and whole blocks as often as anywhere else.
    const auto chunks = static_cast<int64_t>(random() % 9);
    const int64_t edge = chunks * kChunk + static_cast<int64_t>(random() % 3) - 1;
    const auto any = static_cast<int64_t>(random() % (8 * kChunk));
    records.push_back({i / 3, static_cast<Traffic>(i % 3),
                       std::max<int64_t>(1, random() % 2 == 0 ? edge : any),
                       static_cast<Slots>(random() % 3)});
  }
  return records;
}

struct Extent {
  int64_t begin, end;
};

/// Bytes of the record's part on a drive, from its chunks alone.
int64_t part_bytes(const StoreMap& map, const Record& record, size_t drive) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < record.chunks; ++i) {
    if (map.place(record, i).drive == static_cast<int>(drive)) {
      bytes += map.stored_chunk_bytes(record, i);
    }
  }
  return bytes;
}

void check_map(const StoreMap& map, std::span<const RecordSpec> specs) {
  REQUIRE(map.records.size() == specs.size());
  for (size_t r = 0; r < specs.size(); ++r) {
    const Record& record = map.records[r];
    REQUIRE(record.spec.size_bytes == specs[r].size_bytes);
    int64_t bytes = 0;
    for (int64_t i = 0; i < record.chunks; ++i) bytes += map.chunk_bytes(record, i);
    REQUIRE(bytes == specs[r].size_bytes);
    // On each drive the chunks are numbered without gaps, in their order.
    std::vector<int64_t> next(map.drives.size());
    for (int64_t i = 0; i < record.chunks; ++i) {
      const ChunkPlace place = map.place(record, i);
      REQUIRE(place.index == next[static_cast<size_t>(place.drive)]++);
    }
    for (size_t d = 0; d < map.drives.size(); ++d) REQUIRE(record.parts[d].chunks == next[d]);
  }
  for (size_t d = 0; d < map.drives.size(); ++d) {
    const auto [first_map, second_map] = map_offsets(encode(map).size(), kAlignment);
    std::vector<Extent> extents{{0, second_map + (second_map - first_map)}};
    for (const Record& record : map.records) {
      const Part& part = record.parts[d];
      const int64_t table = static_cast<int64_t>(align_up(
          static_cast<size_t>(part.chunks) * sizeof(uint64_t), static_cast<size_t>(kAlignment)));
      for (size_t slot = 0; slot < 2; ++slot) {
        REQUIRE(part.data_offset_bytes[slot] % kAlignment == 0);
        REQUIRE(part.table_offset_bytes[slot] % kAlignment == 0);
        REQUIRE(part.table_offset_bytes[slot] >= map.drives[d].tables_offset_bytes);
        REQUIRE(part.table_offset_bytes[slot] + table <=
                map.drives[d].tables_offset_bytes + map.drives[d].tables_size_bytes);
        const bool has_data = slot == 0 || record.spec.slots == Slots::kTwo;
        const bool has_table = slot == 0 || record.spec.slots != Slots::kScratch;
        if (has_data) {
          extents.push_back({part.data_offset_bytes[slot],
                             part.data_offset_bytes[slot] + part_bytes(map, record, d)});
        }
        if (has_table) {
          extents.push_back({part.table_offset_bytes[slot], part.table_offset_bytes[slot] + table});
        }
      }
    }
    std::erase_if(extents, [](const Extent& extent) { return extent.begin == extent.end; });
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < extents.size(); ++i) REQUIRE(extents[i - 1].end <= extents[i].begin);
    REQUIRE(extents.back().end == map.drives[d].file_size_bytes);
  }
}

TEST_CASE("store map: everything has its place, and nothing shares one") {
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 60; ++trial) {
    const std::vector<RecordSpec> records = random_records(random, 1 + trial);
    std::vector<int64_t> sizes(1 + random() % 4);
    for (int64_t& size : sizes) size = kPlenty / static_cast<int64_t>(1 + random() % 8);
    const StoreMap map = make_map(records, drives_of(sizes), kChunk, kAlignment);
    check_map(map, records);
    const std::vector<std::byte> bytes = encode(map);
    const StoreMap again = decode_map(bytes);
    check_map(again, records);
    CHECK(encode(again) == bytes);
    for (size_t r = 0; r < records.size(); ++r) {
      CHECK(again.records[r].spec.unit == records[r].unit);
      CHECK(again.records[r].spec.kind == records[r].kind);
      CHECK(again.records[r].spec.slots == records[r].slots);
    }
  }
}

TEST_CASE("store map: drives are used in proportion, and each record by all") {
  std::vector<RecordSpec> records;
  for (int i = 0; i < 20; ++i) records.push_back({i, Traffic::kWeight, 60 * kChunk});
  SECTION("equal drives") {
    const StoreMap map = make_map(records, drives_of({kPlenty, kPlenty, kPlenty}), kChunk, 4096);
    for (const Record& record : map.records) {
      for (const Part& part : record.parts) CHECK(std::abs(part.chunks - 20) <= 1);
    }
  }
  SECTION("one has half of what the other has") {
    const StoreMap map = make_map(records, drives_of({kPlenty, kPlenty / 2}), kChunk, kAlignment);
    for (size_t r = 4; r < map.records.size(); ++r) {
      CHECK(std::abs(map.records[r].parts[0].chunks - 40) <= 1);
    }
  }
}

TEST_CASE("store map: it fits to the last byte, or is refused with the numbers") {
  std::vector<RecordSpec> records;
  for (int i = 0; i < 20; ++i) records.push_back({i, Traffic::kMoment1, 10 * kChunk + 5});
  const std::vector<DriveCapacity> plenty = drives_of({kPlenty, kPlenty / 3});
  const StoreMap roomy = make_map(records, drives_of({kPlenty}), kChunk, kAlignment);
  const int64_t needed = roomy.drives[0].file_size_bytes;
  const StoreMap tight = make_map(records, drives_of({needed}), kChunk, kAlignment);
  CHECK(tight.drives[0].file_size_bytes == needed);
  const std::vector<DriveCapacity> small = drives_of({needed - 1});
  CHECK_THROWS_MATCHES(make_map(records, small, kChunk, kAlignment), Error,
                       Catch::Predicate<Error>([](const Error& error) {
                         return error.kind() == ErrorKind::kDoesNotFit;
                       }));
  const std::string message =
      message_of([&] { static_cast<void>(make_map(records, small, kChunk, kAlignment)); });
  CHECK_THAT(message, Catch::Contains(std::to_string(needed) + " bytes") &&
                          Catch::Contains(std::to_string(needed - 1) + " bytes") &&
                          Catch::Contains("/drive0"));
  // With a small drive beside a large one the limits still hold.
  const StoreMap two = make_map(records, drives_of({needed, needed / 5}), kChunk, kAlignment);
  CHECK(two.drives[0].file_size_bytes <= needed);
  CHECK(two.drives[1].file_size_bytes <= needed / 5);
  CHECK_THROWS_AS(make_map(records, drives_of({100, 100}), kChunk, kAlignment), Error);
}

TEST_CASE("store map: a drive without room for the beginning of its file") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 10 * kChunk}};
  const auto message = [&](std::vector<int64_t> sizes) {
    return message_of(
        [&] { static_cast<void>(make_map(records, drives_of(sizes), kChunk, kAlignment)); });
  };
  const StoreMap one = make_map(records, drives_of({kPlenty}), kChunk, kAlignment);
  const auto [first_map, second_map] = map_offsets(encode(one).size(), kAlignment);
  const int64_t fixed = second_map + (second_map - first_map);
  // Alone: what all of it needs.
  for (const int64_t size : {fixed - 1, int64_t{1}, int64_t{0}, int64_t{-5}}) {
    CHECK_THAT(
        message({size}),
        Catch::Contains("needs") &&
            Catch::Contains("(" + std::to_string(one.drives[0].file_size_bytes) + " bytes)") &&
            Catch::Contains("(" + std::to_string(std::max<int64_t>(size, 0)) + " bytes)"));
  }
  // Beside one with room enough: nothing would be written to it but that, beyond its limit.
  const StoreMap two = make_map(records, drives_of({kPlenty, fixed}), kChunk, kAlignment);
  CHECK(two.drives[1].file_size_bytes == fixed);
  for (const int64_t size : {fixed - 1, int64_t{0}}) {
    CHECK_THAT(message({kPlenty, size}),
               Catch::Contains("'/drive1'") && Catch::Contains(std::to_string(fixed) + " bytes") &&
                   Catch::Contains("use " + std::to_string(size) + " in"));
  }
}

TEST_CASE("store map: bad lists of records") {
  const auto message = [](std::vector<RecordSpec> records) {
    return message_of(
        [&] { static_cast<void>(make_map(records, drives_of({kPlenty}), kChunk, kAlignment)); });
  };
  CHECK_THAT(message({}), Catch::Contains("at least one record"));
  CHECK_THAT(message({{3, Traffic::kMoment2, 0}}), Catch::Contains("moment2 of unit 3"));
  CHECK_THAT(message({{3, Traffic::kMoment2, -1}}), Catch::Contains("-1 bytes"));
  CHECK_THAT(message({{1, Traffic::kWeight, 5}, {1, Traffic::kWeight, 6}}),
             Catch::Contains("twice"));
  CHECK_THAT(message(std::vector<RecordSpec>(kMaxRecords + 1)), Catch::Contains("10000"));
  CHECK_THAT(message({{1, Traffic::kWeight, 1}}), Catch::Equals(""));
}

TEST_CASE("store map: changed bytes give a map that holds together, or an error") {
  std::mt19937_64 random(11);
  const std::vector<RecordSpec> records = random_records(random, 9);
  const std::vector<std::byte> bytes =
      encode(make_map(records, drives_of({kPlenty, kPlenty}), kChunk, kAlignment));
  for (int trial = 0; trial < 5000; ++trial) {
    std::vector<std::byte> changed = bytes;
    for (uint64_t i = random() % 3 + 1; i-- > 0;) {
      changed[random() % changed.size()] = static_cast<std::byte>(random());
    }
    if (random() % 4 == 0) changed.resize(random() % changed.size());
    try {
      const StoreMap map = decode_map(changed);
      for (const Record& record : map.records) {
        for (int64_t i = 0; i < record.chunks; ++i) {
          REQUIRE(map.place(record, i).drive < static_cast<int>(map.drives.size()));
        }
      }
    } catch (const Error&) {
    }
  }
}

}  // namespace
}  // namespace strata::nvme
