// Errors and damage: named, kept, and never data.
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "catch.h"
#include "nvme/store_fixture.h"
#include "nvme/superblock.h"

namespace strata::nvme {
namespace {

namespace fs = std::filesystem;
using Catch::Contains;

constexpr int64_t kChunk = 4096;

TEST_CASE("store: damage is named and never returned") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 2);
  const fs::path file = arena_path(directories[1].directory);
  int64_t data_offset = 0, table_offset = 0, map_offset = 0;
  int64_t chunk = 0;
  {
    Store store = Store::create(directories, edge_records(), small_options());
    Content(store).write_all(1);
    store.commit(as_metadata(1));
    const Record& record = store.map().records[7];
    while (store.map().place(record, chunk).drive != 1) ++chunk;
    data_offset = store.map().data_offset_bytes(record, store.map().place(record, chunk), 0);
    table_offset = record.parts[1].table_offset_bytes[0];
    map_offset = map_offsets(encode(store.map()).size(), 4096)[0];
  }
  SECTION("a chunk") {
    overwrite(file, data_offset + 100, "X");
    Store store = Store::open(directories, small_options());
    Content content(store);
    CHECK(content.has(6, 1));
    CHECK_THROWS_WITH(content.has(7, 1),
                      Contains(file.string()) && Contains("damaged") &&
                          Contains("offset " + std::to_string(data_offset)) &&
                          Contains("chunk " + std::to_string(chunk) + " of the moment1 of unit 7"));
    REQUIRE(store.first_error());
    CHECK_THROWS_WITH(store.commit({}), Contains("moment1 of unit 7"));
    CHECK_THROWS_WITH(content.write(6, 2), Contains("moment1 of unit 7"));
    CHECK(content.has(6, 1));  // other reads go on
    const CheckResult check = store.check();
    REQUIRE(check.faults.size() == 1);
    CHECK_THAT(check.faults[0], Contains("unit 7"));
  }
  SECTION("a table") {
    overwrite(file, table_offset, "XXXXXXXX");
    Store store = Store::open(directories, small_options());
    REQUIRE(store.check().faults.size() == 1);
    CHECK_THAT(store.check().faults[0], Contains(file.string()) && Contains("moment1 of unit 7") &&
                                            Contains(std::to_string(table_offset)));
    Content content(store);
    CHECK(content.has(6, 1));
    CHECK_THROWS_WITH(content.has(7, 1), Contains("table of checksums") && Contains("unit 7"));
    CHECK_THROWS_WITH(store.commit({}), Contains("unit 7"));
  }
  SECTION("a table of what is written anew") {
    overwrite(file, table_offset, "XXXXXXXX");
    {
      Store store = Store::open(directories, small_options());
      Content content(store);
      content.write_all(2);
      store.commit(as_metadata(2));
      CHECK(content.all_have(2));
    }
    Store store = Store::open(directories, small_options());
    CHECK(Content(store).all_have(2));
    CHECK(store.check().faults.empty());
  }
  SECTION("a copy of the map") {
    overwrite(file, map_offset + 3, "XXXXXXXX");
    Store store = Store::open(directories, small_options());
    CHECK(Content(store).all_have(1));
    REQUIRE(store.check().faults.size() == 1);
    CHECK_THAT(store.check().faults[0], Contains("copy of the map") && Contains(file.string()));
  }
  SECTION("both copies of the map") {
    overwrite(file, map_offset + 3, "XXXXXXXX");
    overwrite(file, map_offset + 3 + 4096, "XXXXXXXX");
    CHECK_THAT(open_message(directories), Contains("both copies of the map"));
  }
}

TEST_CASE("store: a check sees tables that were damaged after opening") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 5 * kChunk},
                                        {3, Traffic::kMoment2, 9 * kChunk + 1, Slots::kOne}};
  MemoryStore memory(2, records);
  Store store = memory.open();
  Content content(store);
  content.write_all(1);
  store.commit(as_metadata(1));
  content.write(0, 2);
  store.commit(as_metadata(2));
  REQUIRE(store.check().faults.empty());
  for (const int record : {0, 1}) {
    const auto slot = static_cast<size_t>(store.committed(record).slot);
    const int64_t offset =
        store.map().records[static_cast<size_t>(record)].parts[1].table_offset_bytes[slot];
    const std::string name = describe(records[static_cast<size_t>(record)]);
    memory.disk(1).flip_bit(offset * 8 + 3);
    const CheckResult check = store.check();
    REQUIRE(check.faults.size() == 1);
    CHECK_THAT(check.faults[0], Contains(name) && Contains(memory.path(1)) &&
                                    Contains("at offset " + std::to_string(offset)));
    memory.disk(1).flip_bit(offset * 8 + 3);
    CHECK(store.check().faults.empty());
  }
  // The first reads of a check are those of the two maps, then comes a table.
  memory.disk(1).fail(Operation::kRead, memory.disk(1).count(Operation::kRead) + 2, 1, EIO);
  const CheckResult check = store.check();
  REQUIRE(check.faults.size() == 1);
  CHECK_THAT(check.faults[0], Contains("cannot read '" + memory.path(1)) &&
                                  Contains("(the checksums of the weight of unit 0)"));
  CHECK(content.has(0, 2));
  CHECK(content.has(1, 1));
}

TEST_CASE("store: after the first error nothing more is committed") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 5 * kChunk},
                                        {3, Traffic::kMoment2, 9 * kChunk + 1}};
  MemoryStore memory(2, records);
  {
    Store store = memory.open();
    Content content(store);
    content.write_all(1);
    store.commit(as_metadata(1));
  }
  const auto state = [&] {
    Store store = memory.open();
    REQUIRE(Content(store).all_have(metadata_of(store)));
    return metadata_of(store);
  };
  const uint64_t writes = memory.disk(1).count(Operation::kWrite);
  const uint64_t syncs = memory.disk(1).count(Operation::kSync);
  SECTION("a write fails") {
    memory.disk(1).fail(Operation::kWrite, writes + 3, 1, EIO);
    {
      Store store = memory.open();
      Content content(store);
      CHECK_THROWS_WITH(content.write_all(2), Contains("cannot write '" + memory.path(1)) &&
                                                  Contains("bytes at offset") &&
                                                  Contains("moment2 of unit 3") &&
                                                  Contains("Input/output error"));
      CHECK_THROWS_WITH(store.commit(as_metadata(2)),
                        Contains("nothing more") && Contains("moment2 of unit 3"));
      CHECK_THROWS_WITH(content.write(0, 2), Contains("nothing more"));
      CHECK(content.all_have(1));
    }
    CHECK(state() == 1);
  }
  SECTION("a sync fails") {
    // The first of the two that a commit makes, or the second; one more is made by opening.
    for (const uint64_t later : {1, 2}) {
      memory.disk(1).fail(Operation::kSync, syncs + later, 1, EIO);
      {
        Store store = memory.open();
        Content content(store);
        content.write_all(2);
        CHECK_THROWS_WITH(store.commit(as_metadata(2)), Contains("cannot sync"));
        CHECK_THROWS_WITH(store.commit(as_metadata(2)), Contains("nothing more"));
      }
      // After the second one the superblocks may or may not be on the medium.
      CHECK(state() <= later);
      break;
    }
  }
  SECTION("a superblock cannot be written") {
    // The writes of this drive are chunks, one table for each record, and the superblock.
    uint64_t chunks = 0;
    {
      Store store = memory.open();
      for (const Record& record : store.map().records) {
        chunks += static_cast<uint64_t>(record.parts[1].chunks);
      }
    }
    memory.disk(1).fail(Operation::kWrite, writes + chunks + 2, 1, EIO);
    {
      Store store = memory.open();
      Content content(store);
      content.write_all(2);
      CHECK_THROWS_WITH(store.commit(as_metadata(2)),
                        Contains("cannot write '" + memory.path(1)) && Contains("superblock"));
    }
    CHECK(state() == 1);  // though the other drive has the new one
    {
      Store store = memory.open();
      Content content(store);
      content.write_all(3);
      CHECK(store.commit(as_metadata(3)).generation == 3);
    }
    CHECK(state() == 3);
  }
  SECTION("a read fails") {
    memory.disk(0).fail(Operation::kRead, memory.disk(0).count(Operation::kRead) + 4, 1, EIO);
    Store store = memory.open();
    Content content(store);
    CHECK_THROWS_WITH(content.all_have(1), Contains("cannot read '" + memory.path(0)) &&
                                               Contains("of unit") &&
                                               Contains("Input/output error"));
    CHECK_THROWS_WITH(store.commit({}), Contains("nothing more"));
  }
}

TEST_CASE("store: what cannot be read when it is opened is no damage") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 5 * kChunk}};
  MemoryStore memory(1, records);
  {
    Store store = memory.open();
    Content(store).write_all(1);
    store.commit(as_metadata(1));
  }
  // Reads of an opening: two superblocks, then the map, and its copy where that is no use.
  const uint64_t reads = memory.disk(0).count(Operation::kRead);
  const auto message = [&](MemoryStore::OpenAs as) {
    return message_of([&] { static_cast<void>(memory.open(as)); });
  };
  const auto check_refused = [&] {
    CHECK_THAT(message({}), Contains("cannot read '" + memory.path(0)) &&
                                Contains("Input/output error") && !Contains("damaged"));
  };
  SECTION("both superblocks") {
    memory.disk(0).fail(Operation::kRead, reads, 2, EIO);
    check_refused();
    CHECK(message({}).empty());
  }
  SECTION("one superblock, which may be the newer") {
    for (const uint64_t i : {0, 1}) {
      memory.disk(0).fail(Operation::kRead, memory.disk(0).count(Operation::kRead) + i, 1, EIO);
      check_refused();
      memory.disk(0).fail(Operation::kRead, memory.disk(0).count(Operation::kRead) + i, 1, EIO);
      const Store store = memory.open({.read_only = true});
      REQUIRE_FALSE(store.notes().empty());
      CHECK_THAT(store.notes().front(), Contains("Input/output error"));
    }
  }
  SECTION("both copies of the map") {
    memory.disk(0).fail(Operation::kRead, reads + 2, 2, EIO);
    check_refused();
    CHECK(message({}).empty());
  }
}

TEST_CASE("store: a superblock of zeros is damage where there was one") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 1);
  static_cast<void>(Store::create(directories, edge_records(), small_options()));
  {
    Store store = Store::open(directories, small_options());
    for (const std::string& note : store.notes()) CHECK_THAT(note, !Contains("superblock"));
    for (uint64_t generation = 1; generation < 3; ++generation) {
      Content(store).write_all(generation);
      store.commit(as_metadata(generation));
    }
  }
  const fs::path file = arena_path(directories[0].directory);
  const std::vector<std::byte> whole = read_file(file);
  for (const size_t i : {0, 1}) {
    overwrite(file, static_cast<int64_t>(i * kSuperblockSpan), std::string(4096, '\0'));
    {
      Store store = Store::open(directories, small_options());
      CHECK(metadata_of(store) == (i == 0 ? 1 : 2));
      REQUIRE_FALSE(store.notes().empty());
      CHECK_THAT(store.notes().front(), Contains("superblock " + std::to_string(i)));
    }
    overwrite(file, 0, {reinterpret_cast<const char*>(whole.data()), whole.size()});
  }
}

TEST_CASE("store: a bad sector under a table takes only its record") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 5 * kChunk},
                                        {1, Traffic::kWeight, 5 * kChunk}};
  MemoryStore memory(1, records);
  {
    Store store = memory.open();
    Content(store).write_all(1);
    store.commit({});
  }
  // Reads of an opening: two superblocks, the map, all tables, then one table each.
  const uint64_t reads = memory.disk(0).count(Operation::kRead);
  memory.disk(0).fail(Operation::kRead, reads + 3, 2, EIO);
  Store store = memory.open();
  Content content(store);
  CHECK(content.has(1, 1));
  CHECK_THROWS_WITH(content.has(0, 1), Contains("weight of unit 0"));
  REQUIRE_FALSE(store.notes().empty());
  CHECK_THAT(store.notes().back(), Contains("Input/output error"));
}

}  // namespace
}  // namespace strata::nvme
