// Going back to the commit before the last, as ranks do whose stores are one commit apart: whole or
// refused, and durable.
#include <iostream>
#include <random>

#include "catch.h"
#include "nvme/store_crash.h"
#include "nvme/store_fixture.h"

namespace strata::nvme {
namespace {

constexpr int kPowerCuts = 160;
constexpr int kRecords = 4;

uint64_t value_of(std::span<const std::byte> metadata) {
  uint64_t value = 0;
  REQUIRE(metadata.size() == sizeof value);
  std::memcpy(&value, metadata.data(), sizeof value);
  return value;
}

/// Writes what training on counters writes for a step; see store_crash.h.
void write_step(Store& store, uint64_t step) {
  Content content(store);
  for (int r = 0; r < kRecords; ++r) {
    if (is_written(r, step)) content.write(r, step);
  }
}

void make_step(Store& store, uint64_t step) {
  write_step(store, step);
  store.commit(as_metadata(step));
}

bool is_at(Store& store, uint64_t step) {
  Content content(store);
  for (int r = 0; r < kRecords; ++r) {
    if (!content.has(r, content_generation(r, step))) return false;
  }
  return metadata_of(store) == step;
}

/// The steps that the store can be opened at.
std::vector<uint64_t> steps_of(MemoryStore& memory) {
  std::vector<uint64_t> steps;
  for (const AvailableGeneration& commit : memory.generations()) {
    steps.push_back(value_of(commit.metadata));
  }
  return steps;
}

void cut(MemoryStore& memory, uint64_t seed) {
  std::vector<std::vector<std::byte>> images;
  for (size_t d = 0; d < memory.drives(); ++d) {
    images.push_back(memory.disk(d).power_cut(seed + d));
  }
  memory.set_images(std::move(images));
}

}  // namespace

TEST_CASE("store: it can be opened at the commit before the last, which is then the last") {
  const size_t drives = GENERATE(1, 3);
  MemoryStore memory(drives, counter_records());
  CHECK(memory.generations().empty());
  {
    Store store = memory.open();
    make_step(store, 1);
  }
  CHECK(steps_of(memory) == std::vector<uint64_t>{1});
  int64_t written = 0;
  {
    Store store = memory.open();
    make_step(store, 2);
    make_step(store, 3);
    written = store.bytes_written_total();
  }
  CHECK(steps_of(memory) == std::vector<uint64_t>{3, 2});
  const std::vector<AvailableGeneration> both = memory.generations();
  {
    // Looking does not change anything.
    Store store = memory.open({.read_only = true, .generation = both[1].generation});
    CHECK(is_at(store, 2));
  }
  {
    Store store = memory.open({.generation = both[0].generation});
    CHECK(is_at(store, 3));
  }
  CHECK(steps_of(memory) == std::vector<uint64_t>{3, 2});
  {
    Store store = memory.open({.generation = both[1].generation});
    CHECK(is_at(store, 2));
    CHECK(store.generation() > both[0].generation);
    CHECK(store.bytes_written_total() > written);
    CHECK(std::any_of(store.notes().begin(), store.notes().end(), [](const std::string& note) {
      return note.find("went back") != std::string::npos;
    }));
  }
  for (const uint64_t step : steps_of(memory)) CHECK(step == 2);
  {
    Store store = memory.open();
    CHECK(is_at(store, 2));
    CHECK(store.check().faults.empty());
    make_step(store, 3);
    make_step(store, 4);
  }
  {
    Store store = memory.open();
    CHECK(is_at(store, 4));
  }
  CHECK_THROWS_WITH(memory.open({.read_only = true, .generation = 77}), Catch::Contains("77"));
}

TEST_CASE("store: what was written over is not gone back to") {
  const size_t drives = GENERATE(1, 3);
  MemoryStore memory(drives, counter_records());
  uint64_t older = 0;
  {
    Store store = memory.open();
    for (uint64_t step = 1; step <= 3; ++step) {
      older = store.generation();
      make_step(store, step);
    }
    // Of the next step, with no commit: over what step 2 had of record 1.
    REQUIRE(is_written(1, 3));
    REQUIRE(is_written(1, 4));
    Content(store).write(1, 4);
  }
  CHECK_THROWS_WITH(memory.open({.generation = older}),
                    Catch::Contains("moment1 of unit 0") && Catch::Contains("checkpoint"));
  {
    Store store = memory.open();
    CHECK(is_at(store, 3));
    // With its tables too it is not offered any more.
    make_step(store, 4);
  }
  CHECK(steps_of(memory) == std::vector<uint64_t>{4, 3});
  CHECK_THROWS_WITH(memory.open({.generation = older}), Catch::Contains("no more"));
}

TEST_CASE("store: records with one slot are not gone back over") {
  std::vector<RecordSpec> records = counter_records();
  records[2].slots = Slots::kOne;
  MemoryStore memory(1, records);
  Store store = memory.open();
  Content content(store);
  content.write_all(1);
  store.commit(as_metadata(1));
  // They stay as they are in one commit, and change in the next.
  content.write(0, 2);
  store.commit(as_metadata(2));
  store.close();
  CHECK(steps_of(memory) == std::vector<uint64_t>{2, 1});
  store = memory.open();
  Content(store).write_all(3);
  store.commit(as_metadata(3));
  store.close();
  CHECK(steps_of(memory) == std::vector<uint64_t>{3});
}

TEST_CASE("store: power cuts around going back leave one of the two commits, whole") {
  int trials = 0, back = 0, in_going = 0, refused = 0;
  for (const size_t drives : {1, 3}) {
    MemoryStore memory(drives, counter_records());
    std::mt19937_64 random(drives);
    {
      Store store = memory.open();
      make_step(store, 1);
      make_step(store, 2);
    }
    uint64_t last = 2;
    for (int trial = 0; trial < kPowerCuts / 2; ++trial, ++trials) {
      const bool quiet = random() % 4 != 0;  // or else the next step has begun
      {
        Store store = memory.open();
        make_step(store, last + 1);
        make_step(store, last + 2);
        if (!quiet) {
          memory.power().cut_after(1 + random() % 12);
          static_cast<void>(message_of([&] { write_step(store, last + 3); }));
        }
      }
      cut(memory, random());
      last += 2;
      const std::vector<AvailableGeneration> both = memory.generations();
      REQUIRE(!both.empty());
      REQUIRE(value_of(both[0].metadata) == last);
      if (quiet) REQUIRE(both.size() == 2);
      if (both.size() < 2) continue;
      REQUIRE(value_of(both[1].metadata) == last - 1);
      const bool is_cut = random() % 2 == 0;
      if (is_cut) memory.power().cut_after(random() % 90);
      std::string message;
      try {
        Store store = memory.open({.generation = both[1].generation});
        // What was opened is durable from then on.
        last = last - 1;
        ++back;
        if (!memory.power().is_cut()) {
          memory.power().cut_after(UINT64_MAX);
          REQUIRE(is_at(store, last));
        }
      } catch (const Error& error) {
        message = error.what();
        if (memory.power().is_cut()) {
          ++in_going;
        } else {
          REQUIRE_FALSE(quiet);
          REQUIRE_THAT(message, Catch::Contains("cannot go back"));
          ++refused;
        }
      }
      const bool was_cut = memory.power().is_cut();
      cut(memory, random());
      Store store = memory.open();
      const uint64_t found = metadata_of(store);
      if (!message.empty() && was_cut) {
        REQUIRE((found == last || found == last - 1));
        last = found;
      }
      REQUIRE(found == last);
      REQUIRE(is_at(store, last));
      REQUIRE(store.check().faults.empty());
    }
  }
  CHECK(back > trials / 4);
  CHECK(in_going > 0);
  CHECK(refused > 0);
  std::cout << "going back: " << trials << " trials, " << back << " went back, " << in_going
            << " were cut off in that, " << refused << " had been written over; none lost both\n";
}

}  // namespace strata::nvme
