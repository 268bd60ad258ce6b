// docs/formats.md is enough to read a store: a reader in another language, written from it, finds
// what was written.
#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "catch.h"
#include "nvme/store_fixture.h"
#include "nvme/superblock.h"

namespace strata::nvme {
namespace {

TEST_CASE("store: a reader written from the documentation agrees") {
  const std::vector<RecordSpec> records{{0, Traffic::kWeight, 1},
                                        {0, Traffic::kMoment1, 13 * 4096 + 5},
                                        {-1, Traffic::kResidual, 700 * 4096, Slots::kOne},
                                        {1, Traffic::kBoundary, 3 * 4096, Slots::kScratch},
                                        {2, Traffic::kMoment2, 40000}};
  for (const size_t drives : {1, 3}) {
    const TemporaryDirectory place;
    const auto directories = directories_in(place, drives);
    const std::vector<uint64_t> written{3, 2, 1, 0, 0};  // generation of each record's content
    std::string id;
    {
      Store store = Store::create(directories, records, small_options());
      Content content(store);
      for (uint64_t generation = 1; generation <= 3; ++generation) {
        for (int r = 0; r < 3; ++r) {
          if (generation <= written[static_cast<size_t>(r)]) content.write(r, generation);
        }
        store.commit(as_metadata(generation));
      }
      content.write(1, 4);  // not committed
      id = store.id();
    }
    std::string command = "python3 '" STRATA_READ_STORE "'";
    for (auto at = directories.rbegin(); at != directories.rend(); ++at) {
      command += " '" + at->directory.string() + "'";
    }
    FILE* pipe = ::popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::string text;
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) {
      text.push_back(static_cast<char>(c));
    }
    const int status = ::pclose(pipe);
    if (WIFEXITED(status) && (WEXITSTATUS(status) == 77 || WEXITSTATUS(status) == 127)) {
      WARN("skipped: python3 with libxxhash.so.0 is not there");
      return;
    }
    REQUIRE(status == 0);
    const nlohmann::json json = nlohmann::json::parse(text);
    CHECK(json["store"] == id);
    CHECK(json["generation"] == 3);
    CHECK(json["in_flux"] == false);
    CHECK(json["metadata"] == "0300000000000000");
    REQUIRE(json["records"].size() == records.size());
    for (size_t r = 0; r < records.size(); ++r) {
      const nlohmann::json& record = json["records"][r];
      CHECK(record["unit"] == records[r].unit);
      CHECK(record["kind"] == name_of(records[r].kind));
      CHECK(record["slots"] == name_of(records[r].slots));
      CHECK(record["size_bytes"] == records[r].size_bytes);
      CHECK(record["generation"] == written[r]);
      if (written[r] == 0) continue;
      std::vector<std::byte> content(static_cast<size_t>(records[r].size_bytes));
      fill_content(content, static_cast<int>(r), written[r], 0);
      char expected[17];
      std::snprintf(expected, sizeof expected, "%016lx", checksum_of(content));
      CHECK(record["xxh3_64"] == expected);
    }
  }
}

}  // namespace
}  // namespace strata::nvme
