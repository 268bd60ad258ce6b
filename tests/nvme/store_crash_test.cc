// Whatever moment a run ends at, the store has its last committed generation, whole; and whatever
// bit is turned over, it is noticed. With STRATA_ALL_TRIALS as often as it takes to believe that.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <iostream>
#include <map>
#include <random>
#include <thread>

#include "catch.h"
#include "nvme/store_crash.h"
#include "nvme/store_fixture.h"
#include "nvme/superblock.h"
#include "trials.h"

extern char** environ;

namespace strata::nvme {
namespace {

#ifdef STRATA_ALL_TRIALS
constexpr int kKills = 300;
constexpr int kPowerCuts = 2000;
constexpr int kBitFlips = 10000;
#else
constexpr int kKills = strata::trials(30, 10);
constexpr int kPowerCuts = strata::trials(200, 40);
constexpr int kBitFlips = strata::trials(500, 60);
#endif

constexpr int64_t kChunk = 4096;

/// Whether every record has what it must have after `generation`; 0: none was committed.
bool is_right(Store& store, uint64_t generation) {
  Content content(store);
  for (int r = 0; r < static_cast<int>(counter_records().size()); ++r) {
    if (generation == 0) {
      if (store.committed(r).generation != 0) return false;
    } else if (!content.has(r, content_generation(r, generation))) {
      return false;
    }
  }
  return true;
}

struct Reading {
  bool is_right = true;  // or an error
  std::string error;
};

Reading read_record(Store& store, int record, uint64_t generation) {
  Reading reading;
  reading.error = message_of([&] { reading.is_right = Content(store).has(record, generation); });
  return reading;
}

/// Runs the child, kills it after a while, and returns the last generation that it reported.
uint64_t run_and_kill(const std::vector<StoreDirectory>& directories,
                      std::chrono::microseconds life) {
  std::vector<std::string> arguments{STRATA_STORE_CRASH_CHILD};
  for (const StoreDirectory& directory : directories) {
    arguments.push_back(directory.directory.string());
  }
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  int pipe[2];
  REQUIRE(::pipe(pipe) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, pipe[0]);
  posix_spawn_file_actions_addclose(&actions, pipe[1]);
  pid_t child = -1;
  REQUIRE(::posix_spawn(&child, pointers[0], &actions, nullptr, pointers.data(), environ) == 0);
  posix_spawn_file_actions_destroy(&actions);
  ::close(pipe[1]);
  std::this_thread::sleep_for(life);
  REQUIRE(::kill(child, SIGKILL) == 0);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));  // or else it failed by itself
  uint64_t last = 0, generation = 0;
  while (::read(pipe[0], &generation, sizeof generation) == sizeof generation) last = generation;
  ::close(pipe[0]);
  return last;
}

TEST_CASE("store: killed at random moments, it has the last commit") {
  int trials = 0, in_first = 0;
  uint64_t commits = 0;
  for (const size_t drives : {1, 3}) {
    const TemporaryDirectory place;
    const auto directories = directories_in(place, drives);
    static_cast<void>(Store::create(directories, counter_records(), small_options()));
    std::mt19937_64 random(drives);
    uint64_t generation = 0;
    for (int trial = 0; trial < kKills / 2; ++trial, ++trials) {
      const uint64_t reported =
          run_and_kill(directories, std::chrono::microseconds(random() % 60000));
      if (reported == 0) ++in_first;
      Store store = Store::open(directories, small_options());
      const uint64_t found = metadata_of(store);
      REQUIRE(found >= std::max(reported, generation));
      REQUIRE(found <= std::max(reported, generation) + 1);
      REQUIRE(is_right(store, found));
      REQUIRE(store.check().faults.empty());
      commits += found - generation;
      generation = found;
    }
  }
  std::cout << "SIGKILL: " << trials << " trials, " << commits << " commits between them, "
            << in_first << " runs killed before their first; nothing lost\n";
}

std::vector<std::vector<std::byte>> cut(MemoryStore& memory, uint64_t seed) {
  std::vector<std::vector<std::byte>> images;
  for (size_t d = 0; d < memory.drives(); ++d) {
    images.push_back(memory.disk(d).power_cut(seed + d));
  }
  return images;
}

TEST_CASE("store: power cuts that lose any part of what was not synced") {
  int trials = 0, ahead = 0, torn = 0, in_opening = 0;
  for (const size_t drives : {1, 3}) {
    MemoryStore memory(drives, counter_records());
    std::mt19937_64 random(drives);
    uint64_t generation = 0;
    for (int trial = 0; trial < kPowerCuts / 2; ++trial, ++trials) {
      uint64_t acknowledged = generation;
      if (random() % 8 == 0) {
        // In the middle of opening.
        memory.power().cut_after(random() % (4 * drives + 1));
        if (!message_of([&] { static_cast<void>(memory.open()); }).empty()) ++in_opening;
      } else {
        Store store = memory.open();
        memory.power().cut_after(1 + random() % 150);
        try {
          Content content(store);
          for (uint64_t next = generation + 1;; ++next) {
            for (int r = 0; r < static_cast<int>(counter_records().size()); ++r) {
              if (is_written(r, next)) content.write(r, next);
            }
            store.commit(as_metadata(next));
            acknowledged = next;
          }
        } catch (const Error&) {
          REQUIRE(memory.power().is_cut());
        }
      }
      memory.set_images(cut(memory, random()));
      Store store = memory.open();
      const uint64_t found = metadata_of(store);
      REQUIRE(found >= acknowledged);
      REQUIRE(found <= acknowledged + 1);
      REQUIRE(is_right(store, found));
      if (found > acknowledged) ++ahead;
      if (!store.notes().empty()) ++torn;
      generation = found;
    }
    CHECK(generation > static_cast<uint64_t>(kPowerCuts) / 4);
  }
  std::cout << "power cuts: " << trials << " trials, " << ahead
            << " left a commit that had not been acknowledged, " << torn
            << " a superblock torn or on some drives only, " << in_opening
            << " in an opening; nothing lost\n";
}

TEST_CASE("store: power cuts while records with one slot are written over") {
  std::vector<RecordSpec> records = counter_records();
  records[1].slots = Slots::kOne;
  int trials = 0, in_flux = 0;
  for (const size_t drives : {1, 3}) {
    MemoryStore memory(drives, records);
    std::mt19937_64 random(drives);
    uint64_t generation = 0;
    for (int trial = 0; trial < kPowerCuts / 4; ++trial, ++trials) {
      uint64_t acknowledged = generation;
      try {
        Store store = memory.open();
        memory.power().cut_after(1 + random() % 120);
        Content content(store);
        for (uint64_t next = generation + 1;; ++next) {
          for (int r = 0; r < static_cast<int>(records.size()); ++r) content.write(r, next);
          store.commit(as_metadata(next));
          acknowledged = next;
        }
      } catch (const Error&) {
        REQUIRE(memory.power().is_cut());
      }
      memory.set_images(cut(memory, random()));
      const std::string message = message_of([&] { static_cast<void>(memory.open()); });
      if (message.empty()) {
        Store store = memory.open();
        generation = metadata_of(store);
        REQUIRE(generation >= acknowledged);
        REQUIRE(generation <= acknowledged + 1);
        if (generation > 0) REQUIRE(Content(store).all_have(generation));
        continue;
      }
      REQUIRE_THAT(message, Catch::Contains("moment1 of unit 0") &&
                                Catch::Contains("resume from the last checkpoint"));
      ++in_flux;
      Store store = memory.open({.accept_in_flux = true});
      REQUIRE(metadata_of(store) == acknowledged);
      for (const int r : {0, 2, 3}) REQUIRE(Content(store).has(r, acknowledged));
      // What is returned is of the last commit, though not all of it can be.
      const Reading reading = read_record(store, 1, acknowledged);
      REQUIRE(reading.is_right);
      if (!reading.error.empty()) {
        REQUIRE_THAT(reading.error, Catch::Contains("of the moment1 of unit 0"));
      }
      // What the checkpoint had, written back.
      Store again = std::move(store);
      if (again.first_error()) {
        again.close();
        again = memory.open({.accept_in_flux = true});
      }
      Content(again).write_all(acknowledged + 1);
      again.commit(as_metadata(acknowledged + 1));
      generation = acknowledged + 1;
    }
  }
  CHECK(in_flux > trials / 4);
  std::cout << "power cuts with one slot: " << trials << " trials, " << in_flux
            << " left the store in flux and were told so; the others lost nothing\n";
}

struct Area {
  size_t drive;
  int64_t begin, end;
  const char* name;
};

/// The parts of the arena files, data included, of which some bits will be turned over.
std::vector<Area> areas_of(const Store& store, size_t superblock_bytes, size_t map_bytes) {
  std::vector<Area> areas;
  for (size_t d = 0; d < store.drives(); ++d) {
    const auto [first_map, second_map] = map_offsets(map_bytes, 4096);
    const DriveMap& drive = store.map().drives[d];
    const auto span = static_cast<int64_t>(kSuperblockSpan);
    const auto superblock = static_cast<int64_t>(superblock_bytes);
    const auto map = static_cast<int64_t>(map_bytes);
    const int64_t tables_end = drive.tables_offset_bytes + drive.tables_size_bytes;
    areas.push_back({d, 0, superblock, "superblock 0"});
    areas.push_back({d, span, span + superblock, "superblock 1"});
    areas.push_back({d, first_map, first_map + map, "map 0"});
    areas.push_back({d, second_map, second_map + map, "map 1"});
    for (const Record& record : store.map().records) {
      const Part& part = record.parts[d];
      if (part.chunks == 0) continue;
      for (const int64_t table : part.table_offset_bytes) {
        areas.push_back({d, table, table + part.chunks * int64_t{sizeof(uint64_t)}, "tables"});
      }
    }
    areas.push_back({d, tables_end, drive.file_size_bytes, "data"});
    areas.push_back({d, 0, drive.file_size_bytes, "anywhere"});
  }
  return areas;
}

TEST_CASE("store: every flipped bit is noticed, or changes nothing that is read") {
  std::map<std::string, std::array<int, 3>> outcomes;  // named, older generation, harmless
  int trials = 0;
  for (const size_t drives : {1, 3}) {
    MemoryStore memory(drives, counter_records());
    std::vector<Area> areas;
    {
      Store store = memory.open();
      Content content(store);
      for (uint64_t generation = 1; generation < 5; ++generation) {
        for (int r = 0; r < 4; ++r) {
          if (is_written(r, generation)) content.write(r, generation);
        }
        store.commit(as_metadata(generation));
      }
      areas = areas_of(store, 4096, encode(store.map()).size());
    }
    std::mt19937_64 random(drives);
    for (int trial = 0; trial < kBitFlips / 2; ++trial, ++trials) {
      const Area& area = areas[random() % areas.size()];
      const auto bits = static_cast<uint64_t>(area.end - area.begin) * 8;
      const int64_t bit = area.begin * 8 + static_cast<int64_t>(random() % bits);
      memory.disk(area.drive).flip_bit(bit);
      std::vector<std::string> faults;
      uint64_t generation = 0;
      try {
        Store store = memory.open({.read_only = true});
        generation = metadata_of(store);
        REQUIRE(generation <= 4);
        faults = store.check().faults;
        for (int r = 0; r < 4; ++r) {
          // Never anything but what was committed, whatever the check says.
          const Reading reading = read_record(store, r, content_generation(r, generation));
          REQUIRE(reading.is_right);
          if (reading.error.empty()) continue;
          REQUIRE(!faults.empty());
          faults.push_back(reading.error);
        }
        if (generation < 4) {
          // Back to what is whole, and it is said why.
          REQUIRE_FALSE(store.notes().empty());
          REQUIRE_THAT(store.notes().front(), Catch::Contains(memory.path(area.drive)));
        }
      } catch (const Error& error) {
        faults.emplace_back(error.what());
      }
      for (const std::string& fault : faults) {
        REQUIRE_THAT(fault, Catch::Contains(memory.path(area.drive)));
      }
      ++outcomes[area.name][!faults.empty() ? 0 : generation < 4 ? 1 : 2];
      memory.disk(area.drive).flip_bit(bit);
    }
    Store store = memory.open();
    REQUIRE(is_right(store, 4));
  }
  std::cout << "bit flips: " << trials
            << " trials: named / the generation before, said / in no byte that counts\n";
  for (const auto& [name, counts] : outcomes) {
    std::cout << "  " << name << ": " << counts[0] << " / " << counts[1] << " / " << counts[2]
              << '\n';
  }
  CHECK(outcomes["map 0"][2] + outcomes["map 1"][2] == 0);
}

}  // namespace
}  // namespace strata::nvme
