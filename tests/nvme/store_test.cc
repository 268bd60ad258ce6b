#include "nvme/store.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "catch.h"
#include "nvme/store_fixture.h"
#include "nvme/superblock.h"
#include "trials.h"

namespace strata::nvme {
namespace {

using Catch::Contains;

constexpr int64_t kChunk = 4096;

std::vector<StoreDirectory> reversed(std::vector<StoreDirectory> directories) {
  std::reverse(directories.begin(), directories.end());
  return directories;
}

TEST_CASE("store: what was committed is there again, whatever the sizes and drives") {
  for (const size_t drives : {1, 3}) {
    const TemporaryDirectory place;
    const auto directories = directories_in(place, drives);
    {
      Store store = Store::create(directories, edge_records(), small_options());
      CHECK(store.drives() == drives);
      CHECK(store.generation() == 0);
      CHECK(store.metadata().empty());
      Content content(store);
      content.write_all(1);
      CHECK(store.commit(as_metadata(1)).generation == 1);
      CHECK(content.all_have(1));
      content.write_all(2);
      CHECK(content.all_have(1));
      CHECK(content.has(7, 2, Version::kShadow));
      CHECK(store.commit(as_metadata(2)).generation == 2);
      CHECK(content.all_have(2));
      content.write_all(3);  // and not committed
      store.close();
    }
    for (const auto& order : {directories, reversed(directories)}) {
      Store store = Store::open(order, small_options());
      CHECK(store.generation() == 2);
      CHECK(metadata_of(store) == 2);
      Content content(store);
      CHECK(content.all_have(2));
      const CheckResult check = store.check();
      CHECK(check.faults.empty());
      CHECK(check.chunks == 1 + 1 + 1 + 2 + 2 + 6 + 9 + 1101);
    }
  }
}

TEST_CASE("store: a record that was not written keeps what it has, for many generations") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 2);
  std::mt19937_64 random(3);
  std::vector<uint64_t> expected(edge_records().size(), 1);
  {
    Store store = Store::create(directories, edge_records(), small_options());
    Content content(store);
    content.write_all(1);
    store.commit(as_metadata(1));
  }
  constexpr uint64_t kGenerations = trials(30, 10);
  for (uint64_t generation = 2; generation < kGenerations; ++generation) {
    Store store = Store::open(directories, small_options());
    Content content(store);
    for (size_t r = 0; r < expected.size(); ++r) {
      REQUIRE(content.has(static_cast<int>(r), expected[r]));
      if (random() % 2 == 0) continue;
      content.write(static_cast<int>(r), generation);
      expected[r] = generation;
    }
    REQUIRE(store.commit(as_metadata(generation)).generation == generation);
  }
}

TEST_CASE("store: a shadow can be read, thrown away, and written again") {
  const TemporaryDirectory place;
  Store store = Store::create(directories_in(place, 2), edge_records(), small_options());
  Content content(store);
  content.write_all(1);
  store.commit({});
  CHECK_FALSE(store.has_whole_shadow(5));
  content.write(5, 2);
  CHECK(store.has_whole_shadow(5));
  CHECK(content.has(5, 2, Version::kShadow));
  store.discard(5);
  CHECK_FALSE(store.has_whole_shadow(5));
  CHECK_THROWS_WITH(content.has(5, 2, Version::kShadow),
                    Contains("chunk 0 of the moment1 of unit 5"));
  store.commit({});
  CHECK(content.has(5, 1));
  content.write(5, 3);
  content.write(5, 4);
  store.commit({});
  CHECK(content.has(5, 4));
  CHECK_FALSE(store.first_error());
}

TEST_CASE("store: a commit of half a record is refused, and nothing is lost by asking") {
  const TemporaryDirectory place;
  Store store = Store::create(directories_in(place, 1), edge_records(), small_options());
  Content content(store);
  content.write_all(1);
  store.commit(as_metadata(1));
  const AlignedBuffer chunk(kChunk, 4096);
  fill_content(chunk.bytes(), 4, 2, kChunk);
  store.write({.record = 4, .offset_bytes = kChunk, .data = chunk.bytes()});
  CHECK_FALSE(store.has_whole_shadow(4));
  CHECK(kind_of([&] { store.commit({}); }) == ErrorKind::kUsage);
  CHECK_THROWS_WITH(store.commit({}), Contains("moment1 of unit 4") && Contains("in part"));
  CHECK(store.generation() == 1);
  fill_content(chunk.bytes(), 4, 2, 0);
  store.write({.record = 4, .data = chunk.bytes()});
  CHECK(store.commit({}).generation == 2);
  CHECK(content.has(4, 2));
  CHECK(kind_of([&] { store.commit(std::vector<std::byte>(kMaxMetadataBytes + 1)); }) ==
        ErrorKind::kUsage);
  CHECK(store.commit(std::vector<std::byte>(kMaxMetadataBytes)).generation == 3);
}

TEST_CASE("store: what was never committed is no data") {
  const TemporaryDirectory place;
  Store store = Store::create(directories_in(place, 1), edge_records(), small_options());
  Content content(store);
  CHECK_THROWS_WITH(content.has(2, 1), Contains("moment1 of unit 2 was never committed"));
  content.write(2, 1);
  CHECK_THROWS_WITH(content.has(2, 1), Contains("never committed"));
  CHECK(content.has(2, 1, Version::kShadow));
  store.commit({});
  CHECK(content.has(2, 1));
  CHECK(store.committed(3).generation == 0);
  CHECK(store.committed(2).generation == 1);
  CHECK(store.find(2, Traffic::kMoment1) == 2);
  CHECK_FALSE(store.find(2, Traffic::kMoment2));
}

TEST_CASE("store: records with one slot put the store in flux until the next commit") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 2);
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 9 * kChunk + 1, Slots::kOne},
                                        {1, Traffic::kWeight, 9 * kChunk + 1, Slots::kTwo},
                                        {2, Traffic::kWeight, 3 * kChunk, Slots::kOne}};
  const auto lose_by = [&](auto&& change) {
    Store store = Store::open(directories, small_options());
    change(store);
  };
  {
    Store store = Store::create(directories, records, small_options());
    Content content(store);
    content.write_all(1);
    CHECK_FALSE(store.in_flux());  // nothing was committed that could be lost
    store.commit(as_metadata(1));
    content.write(1, 2);
    CHECK_FALSE(store.in_flux());
    content.write(0, 2);
    CHECK(store.in_flux());
    CHECK(content.has(0, 2));  // both versions are the same
    CHECK(content.has(0, 2, Version::kShadow));
    CHECK(content.has(1, 1));
    CHECK(content.has(2, 1));
    const CommitResult commit = store.commit(as_metadata(2));
    CHECK(commit.generation == 3);  // that of the mark was 2
    CHECK_FALSE(store.in_flux());
    CHECK(content.has(0, 2));
    CHECK(content.has(1, 2));
  }
  SECTION("left in flux") {
    lose_by([](Store& store) {
      const AlignedBuffer chunk(kChunk, 4096);
      store.write({.record = 0, .offset_bytes = 3 * kChunk, .data = chunk.bytes()});
    });
    CHECK_THAT(open_message(directories), Contains("generation 3") &&
                                              Contains("weight of unit 0, weight of unit 2") &&
                                              Contains("resume from the last checkpoint"));
    StoreOptions options = small_options();
    options.accept_in_flux = true;
    Store store = Store::open(directories, options);
    CHECK(store.in_flux());
    CHECK(metadata_of(store) == 2);
    Content content(store);
    CHECK(content.has(1, 2));
    CHECK(content.has(2, 1));
    const CheckResult check = store.check();
    REQUIRE(check.faults.size() == 1);
    CHECK_THAT(check.faults[0], Contains("chunk 3 of the weight of unit 0"));
  }
  SECTION("no commit before all that may be lost is written anew") {
    lose_by([](Store& store) {
      const AlignedBuffer chunk(kChunk, 4096);
      store.write({.record = 0, .offset_bytes = 3 * kChunk, .data = chunk.bytes()});
    });
    StoreOptions options = small_options();
    options.accept_in_flux = true;
    {
      Store store = Store::open(directories, options);
      Content content(store);
      CHECK_THROWS_WITH(content.has(0, 2),
                        Contains("chunk 3 of the weight of unit 0 is lost") ||
                            Contains("chunk 3 of the weight of unit 0) is lost"));
      CHECK_FALSE(store.first_error());
      CHECK(kind_of([&] { store.commit(as_metadata(3)); }) == ErrorKind::kUsage);
      CHECK_THROWS_WITH(store.commit(as_metadata(3)),
                        Contains("weight of unit 0, weight of unit 2") && Contains("whole"));
      const AlignedBuffer chunk(kChunk, 4096);
      fill_content(chunk.bytes(), 0, 3, 0);
      store.write({.record = 0, .data = chunk.bytes()});
      CHECK_FALSE(store.has_whole_shadow(0));
      CHECK_THROWS_WITH(content.has(0, 3), Contains("chunk 1 of the weight of unit 0"));
      CHECK_FALSE(store.first_error());
      content.write(2, 3);
      CHECK_THROWS_WITH(store.commit(as_metadata(3)), Contains("(weight of unit 0)"));
      CHECK(store.in_flux());
      content.write(0, 3);
      CHECK(store.has_whole_shadow(0));
      store.commit(as_metadata(3));
      CHECK_FALSE(store.in_flux());
      // From here on it is as any store: part of a record may be written, and all of it is there.
      fill_content(chunk.bytes(), 0, 3, kChunk);
      store.write({.record = 0, .offset_bytes = kChunk, .data = chunk.bytes()});
      store.commit(as_metadata(4));
    }
    Store store = Store::open(directories, small_options());
    Content content(store);
    CHECK(content.has(0, 3));
    CHECK(content.has(1, 2));
    CHECK(content.has(2, 3));
  }
  SECTION("the lost record written anew") {
    lose_by([](Store& store) { Content(store).write(0, 7); });
    StoreOptions options = small_options();
    options.accept_in_flux = true;
    {
      Store store = Store::open(directories, options);
      Content content(store);
      content.write_all(8);
      store.commit(as_metadata(8));
    }
    Store store = Store::open(directories, small_options());
    CHECK(Content(store).all_have(8));
  }
  SECTION("writes beside what is committed change nothing") {
    lose_by([](Store& store) { Content(store).write(1, 7); });
    Store store = Store::open(directories, small_options());
    CHECK(Content(store).has(1, 2));
  }
}

TEST_CASE("store: scratch records are in no commit") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 2);
  {
    Store store = Store::create(
        directories,
        std::vector<RecordSpec>{{0, Traffic::kWeight, 3 * kChunk},
                                {0, Traffic::kBoundary, 5 * kChunk + 9, Slots::kScratch}},
        small_options());
    Content content(store);
    content.write(0, 1);
    store.commit({});
    const AlignedBuffer chunk(kChunk, 4096);
    fill_content(chunk.bytes(), 1, 1, 2 * kChunk);
    store.write({.record = 1, .offset_bytes = 2 * kChunk, .data = chunk.bytes()});
    store.commit({});  // in part, and no matter
    content.write(1, 5);
    CHECK(content.has(1, 5));
    store.commit({});
    CHECK(content.has(1, 5));
    content.write(1, 6);
    CHECK(content.has(1, 6));
    CHECK_FALSE(store.in_flux());
  }
  Store store = Store::open(directories, small_options());
  Content content(store);
  CHECK(content.has(0, 1));
  CHECK_THROWS_WITH(content.has(1, 6), Contains("boundary of unit 0"));
  CHECK(store.check().faults.empty());
}

TEST_CASE("store: short transfers, interruptions and any order change nothing") {
  MemoryStore memory(3, edge_records());
  for (size_t d = 0; d < 3; ++d) {
    memory.disk(d).set_noise({d + 1, 0.1, 0.1, 0.2, 0.1});
    memory.disk(d).reorder(d + 1, 8);
  }
  for (uint64_t generation = 1; generation < 6; ++generation) {
    Store store = memory.open();
    Content content(store);
    if (generation > 1) REQUIRE(content.all_have(generation - 1));
    content.write_all(generation);
    REQUIRE(store.commit(as_metadata(generation)).generation == generation);
    REQUIRE(content.all_have(generation));
  }
}

/// Counts the requests that have ended.
struct Counter {
  std::atomic<int> good = 0, bad = 0;
  [[nodiscard]] StoreSink sink() noexcept {
    return {[](void* context, const StoreResult& result) noexcept {
              auto& counter = *static_cast<Counter*>(context);
              ++(result.ok() ? counter.good : counter.bad);
            },
            this};
  }
};

TEST_CASE("store: a full queue waits") {
  StoreOptions options = small_options();
  options.chunks_in_flight = 2;
  options.requests_in_flight = 2;
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 40 * kChunk},
                                        {1, Traffic::kWeight, 40 * kChunk}};
  MemoryStore memory(2, records, options);
  Store store = memory.open();
  const AlignedBuffer buffer(40 * kChunk, 4096);
  Counter counter;
  memory.disk(1).hold();
  std::atomic<int> submitted = 0;
  std::thread submitter([&] {
    for (int64_t i = 0; i < 40; ++i, ++submitted) {
      store.write_async(
          {.record = static_cast<int>(i % 2),
           .offset_bytes = i / 2 * 2 * kChunk,
           .data = buffer.bytes().subspan(static_cast<size_t>(i / 2 * 2 * kChunk), 2 * kChunk),
           .sink = counter.sink()});
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(submitted < 10);
  memory.disk(1).release();
  submitter.join();
  CHECK(store.commit({}).generation == 1);
  CHECK(counter.good == 40);
  CHECK(counter.bad == 0);
}

TEST_CASE("store: many threads read and write at once") {
  const TemporaryDirectory place;
  std::vector<RecordSpec> records;
  for (int i = 0; i < 8; ++i) records.push_back({i, Traffic::kMoment1, 30 * kChunk + i});
  StoreOptions options = small_options();
  options.chunks_in_flight = 8;
  options.requests_in_flight = 4;
  Store store = Store::create(directories_in(place, 2), records, options);
  {
    Content content(store);
    content.write_all(1);
    store.commit({});
  }
  for (uint64_t generation = 2; generation < 5; ++generation) {
    std::atomic<int> right = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        Content content(store);
        for (const int record : {2 * t, 2 * t + 1}) {
          content.write(record, generation);
          if (content.has(record, generation - 1)) ++right;
          if (content.has(record, generation, Version::kShadow)) ++right;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(right == 16);
    store.commit({});
  }
}

/// A sink that does not return before it is let go.
class Gate {
 public:
  [[nodiscard]] StoreSink sink() noexcept {
    return {[](void* context, const StoreResult& result) noexcept {
              auto& gate = *static_cast<Gate*>(context);
              std::unique_lock lock(gate.mutex_);
              gate.is_good_ = result.ok();
              gate.has_come_ = true;
              gate.changed_.notify_all();
              gate.changed_.wait(lock, [&] { return gate.is_open_; });
            },
            this};
  }
  void wait_for_call() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return has_come_; });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  [[nodiscard]] bool is_good() {
    const std::lock_guard lock(mutex_);
    return is_good_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_come_ = false, is_open_ = false, is_good_ = false;
};

TEST_CASE("store: a commit returns when no read is left on what it replaced") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, kChunk}};
  MemoryStore memory(1, records);
  Store store = memory.open();
  Content content(store);
  content.write(0, 1);
  store.commit({});
  content.write(0, 2);
  const AlignedBuffer buffer(kChunk, 4096);
  Gate gate;
  store.read_async({.record = 0, .data = buffer.bytes(), .sink = gate.sink()});
  gate.wait_for_call();
  std::atomic<bool> has_returned = false;
  std::thread committer([&] {
    store.commit({});
    has_returned = true;
  });
  // The read holds up the return, but not the commit.
  while (store.generation() < 2) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_FALSE(has_returned);
  gate.open();
  committer.join();
  CHECK(gate.is_good());
  CHECK(content.has(0, 2));
}

TEST_CASE("store: reads over a commit see one generation whole") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 4 * kChunk}};
  MemoryStore memory(2, records);
  for (size_t d = 0; d < 2; ++d) memory.disk(d).reorder(d + 1, 8);
  Store store = memory.open();
  Content content(store);
  content.write(0, 1);
  store.commit({});
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t) {
    readers.emplace_back([&] {
      const AlignedBuffer read(4 * kChunk, 4096), expected(4 * kChunk, 4096);
      while (!stop) {
        const uint64_t before = store.generation();
        try {
          store.read({.record = 0, .data = read.bytes()});
        } catch (const Error&) {
          ++wrong;
          return;
        }
        // Generation and slot change together, so a reader may be one ahead of what it asked.
        bool is_known = false;
        for (uint64_t g = before; g <= store.generation() + 1 && !is_known; ++g) {
          fill_content(expected.bytes(), 0, g, 0);
          is_known = std::memcmp(read.data(), expected.data(), read.bytes().size()) == 0;
        }
        if (!is_known) ++wrong;
      }
    });
  }
  for (uint64_t generation = 2; generation < 200; ++generation) {
    content.write(0, generation);
    if (store.first_error()) break;
    store.commit({});
  }
  stop = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(wrong == 0);
  CHECK_FALSE(store.first_error());
}

TEST_CASE("store: files and records beyond 4 GiB") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 1);
  const auto big = static_cast<int64_t>(4 * kGiB);
  const std::vector<RecordSpec> records{
      {0, Traffic::kOther, big + 3 * int64_t{kMiB} + 5, Slots::kScratch},
      {1, Traffic::kWeight, 3 * int64_t{kMiB} + 5}};
  try {
    Store store = Store::create(directories, records);
    Content content(store, store.stored_bytes(1));
    const AlignedBuffer buffer(4 * kMiB, 4096), back(4 * kMiB, 4096);
    // Across the 4 GiB boundary of the record, and so of the file; and the record's last bytes.
    for (const auto& [offset, size] :
         {std::pair{big - static_cast<int64_t>(2 * kMiB), 4 * kMiB},
          std::pair{big + static_cast<int64_t>(2 * kMiB), kMiB + 4096}}) {
      fill_content(buffer.bytes(), 0, 1, offset);
      store.write({.record = 0, .offset_bytes = offset, .data = buffer.bytes().first(size)});
      store.read({.record = 0, .offset_bytes = offset, .data = back.bytes().first(size)});
      CHECK(std::memcmp(buffer.data(), back.data(), size - 4091) == 0);
    }
    content.write(1, 1);
    store.commit({});
    content.write(1, 2);
    store.commit({});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kDoesNotFit) throw;
    WARN("skipped: " << error.what());
    return;
  }
  Store store = Store::open(directories);
  CHECK(Content(store, store.stored_bytes(1)).has(1, 2));
  CHECK(store.map().records[1].parts[0].data_offset_bytes[0] > big);
}

TEST_CASE("store: written bytes are counted, over commits and runs") {
  MemoryStore memory(2, {{0, Traffic::kWeight, 10 * kChunk}, {0, Traffic::kMoment1, 3 * kChunk}});
  int64_t total = 0;
  {
    Store store = memory.open();
    Content content(store);
    const int64_t before = store.bytes_written_total();
    content.write_all(1);
    const CommitResult first = store.commit({});
    // Chunks, a table for each record on each drive, and a superblock for each drive.
    const int64_t superblock = 4096;
    CHECK(first.bytes_written == 13 * kChunk + 4 * 4096 + 2 * superblock);
    CHECK(first.bytes_written_total == before + first.bytes_written);
    content.write(1, 2);
    const CommitResult second = store.commit({});
    CHECK(second.bytes_written == 3 * kChunk + 2 * 4096 + 2 * superblock);
    total = second.bytes_written_total;
    CHECK(store.drive(0).statistics().bytes[static_cast<size_t>(Traffic::kMoment1)].written > 0);
  }
  const Store store = memory.open();
  CHECK(store.bytes_written_total() == total);
}

}  // namespace
}  // namespace strata::nvme
