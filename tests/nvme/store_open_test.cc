// Making stores and finding them again: what is refused, and what is left behind.
#include <sys/mount.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "catch.h"
#include "nvme/store_fixture.h"
#include "nvme/superblock.h"
#include "trials.h"

namespace strata::nvme {
namespace {

namespace fs = std::filesystem;
using Catch::Contains;

TEST_CASE("store: directories that do not make one whole store are refused by name") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 3);
  const auto foreign = directories_in(place, 5);
  const std::vector<RecordSpec> records = edge_records();
  {
    Store store = Store::create(directories, records, small_options());
    Content(store).write_all(1);
    store.commit({});
  }
  const std::vector<StoreDirectory> one_foreign{foreign[4]};
  static_cast<void>(Store::create(one_foreign, records, small_options()));

  CHECK_THAT(open_message({directories[0], directories[2]}),
             Contains("3 drives") && Contains("drive 1"));
  CHECK_THAT(open_message({directories[0], directories[1], foreign[4]}),
             Contains("different stores") && Contains("drive4"));
  CHECK_THAT(open_message({directories[0], directories[1], directories[1]}),
             Contains("twice") && Contains("drive1"));
  CHECK_THAT(open_message({directories[0], directories[1], {.directory = place.path()}}),
             Contains("there is no store in '" + place.path().string()));
  CHECK_THAT(open_message({}), Contains("at least one directory"));
  fs::create_directory(foreign[3].directory);
  fs::copy_file(arena_path(directories[0].directory), arena_path(foreign[3].directory));
  CHECK_THAT(open_message({directories[0], directories[1], foreign[3]}),
             Contains("both drive 0") && Contains("copy"));

  SECTION("a drive put back from an older time") {
    {
      Store store = Store::open(directories, small_options());
      for (int i = 0; i < 3; ++i) store.commit({});
    }
    CHECK_THAT(open_message({foreign[3], directories[1], directories[2]}),
               Contains("no generation in common") && Contains("drive3"));
  }
  SECTION("two stores that went separate ways from one copy") {
    for (const size_t d : {1, 2}) {
      fs::create_directories(foreign[3].directory / std::to_string(d));
      fs::copy_file(arena_path(directories[d].directory),
                    arena_path(foreign[3].directory / std::to_string(d)));
    }
    const std::vector<StoreDirectory> copy{foreign[3],
                                           {.directory = foreign[3].directory / "1"},
                                           {.directory = foreign[3].directory / "2"}};
    for (const auto& each : {directories, copy}) {
      Store store = Store::open(each, small_options());
      for (int i = 0; i < 2; ++i) store.commit({});
    }
    CHECK_THAT(open_message({foreign[3], directories[1], directories[2]}),
               Contains("no generation in common"));
  }
  SECTION("cut short") {
    fs::resize_file(arena_path(directories[1].directory), 700000);
    CHECK_THAT(open_message(directories), Contains("cut short") && Contains("drive1"));
    fs::resize_file(arena_path(directories[1].directory), 5);
    CHECK_THAT(open_message(directories), Contains("cut short") && Contains("drive1"));
  }
  SECTION("both superblocks damaged") {
    for (const int64_t at : {int64_t{60}, static_cast<int64_t>(kSuperblockSpan) + 60}) {
      overwrite(arena_path(directories[1].directory), at, "XXXXXXXX");
    }
    CHECK_THAT(open_message(directories),
               Contains("both superblocks") && Contains("drive1") && Contains("damaged"));
  }
  SECTION("another format") {
    for (const int64_t at : {int64_t{8}, static_cast<int64_t>(kSuperblockSpan) + 8}) {
      overwrite(arena_path(directories[1].directory), at, "\x09");
    }
    CHECK_THAT(open_message(directories), Contains("format 9") && Contains("reads 1"));
  }
  SECTION("not a store") {
    for (const int64_t at : {int64_t{0}, static_cast<int64_t>(kSuperblockSpan)}) {
      overwrite(arena_path(directories[1].directory), at, "GARBAGE!");
    }
    CHECK_THAT(open_message(directories), Contains("not a store") && Contains("drive1"));
  }
  SECTION("no file") {
    fs::remove(arena_path(directories[1].directory));
    fs::create_directory(arena_path(directories[1].directory));
    CHECK_THAT(open_message(directories), Contains("not a regular file"));
  }
}

TEST_CASE("store: one damaged superblock is not missed") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 1);
  {
    Store store = Store::create(directories, edge_records(), small_options());
    Content content(store);
    content.write_all(1);
    store.commit(as_metadata(1));  // at position 1
    content.write_all(2);
    store.commit(as_metadata(2));  // at position 0
  }
  overwrite(arena_path(directories[0].directory), 70, "XXXXXXXX");
  Store store = Store::open(directories, small_options());
  CHECK(metadata_of(store) == 1);
  CHECK(Content(store).all_have(1));
  REQUIRE_FALSE(store.notes().empty());
  CHECK_THAT(store.notes().front(), Contains("superblock 0"));
  // What comes next must not be taken for the generation that was damaged.
  CHECK(store.commit(as_metadata(3)).generation > 1);
}

TEST_CASE("store: a second run is refused while the first one lives") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 2);
  StoreOptions reading = small_options();
  reading.read_only = true;
  {
    const Store store = Store::create(directories, edge_records(), small_options());
    const std::string expected = "in use by process " + std::to_string(::getpid());
    CHECK_THAT(open_message(directories), Contains(expected));
    CHECK_THROWS_WITH(Store::open(directories, reading), Contains("in use"));
    CHECK_THROWS_WITH(Store::create(directories, edge_records(), small_options()),
                      Contains("there is a store in"));
  }
  {
    Store first = Store::open(directories, reading);
    const Store second = Store::open(directories, reading);
    CHECK_THAT(open_message(directories), Contains("in use"));
    CHECK(first.check().faults.empty());
  }
  CHECK(open_message(directories).empty());
}

TEST_CASE("store: what cannot be created leaves nothing behind") {
  const TemporaryDirectory place;
  auto directories = directories_in(place, 2);
  for (StoreDirectory& directory : directories) directory.directory /= "deep";
  const auto is_clean = [&] { return fs::is_empty(place.path()); };
  SECTION("a limit that is too small") {
    for (StoreDirectory& directory : directories) directory.limit_bytes = 600000;
    CHECK(kind_of([&] {
            static_cast<void>(Store::create(directories, edge_records(), small_options()));
          }) == ErrorKind::kDoesNotFit);
    CHECK(is_clean());
  }
  SECTION("a chunk size that the drives cannot have") {
    StoreOptions options = small_options();
    for (const int64_t size : {0, 512, 4097}) {
      options.chunk_size_bytes = size;
      CHECK_THROWS_WITH(Store::create(directories, edge_records(), options),
                        Contains("multiple of 4096"));
    }
    CHECK(is_clean());
  }
  SECTION("records that make no sense") {
    CHECK_THROWS_AS(Store::create(directories, {}, small_options()), Error);
    CHECK(is_clean());
  }
  SECTION("a drive that fails at any transfer") {
    StoreOptions options = small_options();
    for (uint64_t n = 0; n < 4; ++n) {
      FaultDisk disk(kMiB), other(kMiB);
      (n % 2 == 0 ? disk : other).fail(Operation::kWrite, n / 2, 1, EIO);
      options.backend = [&](const BackendOptions& backend) {
        const bool first = backend.path.string().find("drive0") != std::string::npos;
        return (first ? disk : other).factory()(backend);
      };
      CHECK_THROWS_WITH(Store::create(directories, edge_records(), options),
                        Contains("Input/output error"));
      CHECK(is_clean());
    }
  }
  SECTION("more requests than there can be") {
    StoreOptions options = small_options();
    options.requests_in_flight = std::numeric_limits<size_t>::max();
    CHECK_THROWS_AS(Store::create(directories, edge_records(), options), std::exception);
    CHECK(is_clean());
  }
  SECTION("the same directory twice") {
    directories[1] = directories[0];
    CHECK_THROWS_WITH(Store::create(directories, edge_records(), small_options()),
                      Contains("twice"));
    CHECK(is_clean());
  }
  SECTION("what a killed creation left is no hindrance") {
    fs::create_directories(directories[1].directory);
    std::ofstream(arena_path(directories[1].directory).string() + ".partial") << "rest";
    CHECK_THAT(open_message({directories[1]}), Contains("cut off"));
    Store store = Store::create(directories, edge_records(), small_options());
    store.close();
    CHECK(open_message(directories).empty());
    CHECK_FALSE(fs::exists(arena_path(directories[1].directory).string() + ".partial"));
  }
}

TEST_CASE("store: a limit of nothing is no limit to plan with") {
  const TemporaryDirectory place;
  auto directories = directories_in(place, 2);
  for (const int64_t limit : {int64_t{0}, int64_t{-4096}}) {
    directories[1].limit_bytes = limit;
    CHECK(message_of([&] {
            static_cast<void>(Store::create(directories, edge_records(), small_options()));
          }) == "the store may use " + std::to_string(limit) + " bytes in '" +
                    directories[1].directory.string() +
                    "'; raise the limit, or leave the directory out");
    CHECK(fs::is_empty(place.path()));
  }
}

TEST_CASE("store: a full disk is found at creation") {
  const TemporaryDirectory place;
  const fs::path mount = place.path() / "mount";
  fs::create_directory(mount);
  if (::mount("strata-test", mount.c_str(), "tmpfs", 0, "size=2m") != 0) {
    WARN("skipped: a small file system cannot be mounted here");
    return;
  }
  // As much as the first drive can give according to its limit, and more than there is.
  std::vector<StoreDirectory> directories{
      {.directory = place.path("other")}, {.directory = mount / "a"}, {.directory = mount / "b"}};
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, int64_t{2 * kMiB}}};
  for (StoreDirectory& directory : directories) directory.limit_bytes = int64_t{2 * kMiB} + 600000;
  const std::string message =
      message_of([&] { static_cast<void>(Store::create(directories, records, small_options())); });
  CHECK_THAT(message, Contains("the store needs") && Contains("are free") && Contains("/b'"));
  CHECK(kind_of([&] { static_cast<void>(Store::create(directories, records, small_options())); }) ==
        ErrorKind::kDoesNotFit);
  CHECK(fs::is_empty(mount));
  CHECK_FALSE(fs::exists(directories[0].directory));
  CHECK(fs::space(mount).available == 2 * kMiB);
  CHECK(::umount(mount.c_str()) == 0);
}

TEST_CASE("store: opening and closing leaks no descriptor") {
  const TemporaryDirectory place;
  const auto directories = directories_in(place, 1);
  StoreOptions options = small_options();
  static_cast<void>(Store::create(directories, edge_records(), options));
  const auto descriptors = [] {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  };
  const auto before = descriptors();
  for (int i = 0; i < trials(1000, 40); ++i) {
    options.read_only = i % 2 == 0;
    Store store = Store::open(directories, options);
    if (i % 4 == 0) store.close();
    if (i % 10 == 1) CHECK_THROWS_AS(Store::open(directories, options), Error);
  }
  CHECK(descriptors() == before);
}

}  // namespace
}  // namespace strata::nvme
