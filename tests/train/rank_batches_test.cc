#include "train/rank_batches.h"

#include <algorithm>
#include <compare>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/random.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::train {
namespace {

constexpr int64_t kLength = 3;

/// Two sources that end within their last windows: 5 windows of tokens and 6, and two targets short
/// of full.
struct Data {
  TemporaryDirectory directory;
  DatasetOptions options;
  Data() {
    CounterRandom random(1, 2);
    for (const auto& [name, count] : {std::pair{"a", 14}, std::pair{"b", 19}}) {
      std::vector<uint16_t> tokens(static_cast<size_t>(count));
      for (uint16_t& token : tokens) token = static_cast<uint16_t>(random.next_below(50000));
      options.train.push_back(
          {directory.write_tokens<uint16_t>(std::string(name) + ".u16.bin", tokens)});
    }
    options.sequence_len = kLength;
    options.vocab_size = 50000;
  }
  [[nodiscard]] WindowSet windows() const { return open_datasets(options).train; }
};

struct MicroBatch {
  std::vector<int32_t> tokens, targets;
  friend auto operator<=>(const MicroBatch&, const MicroBatch&) = default;
};

std::vector<MicroBatch> copies(std::span<const pipeline::HostMicroBatch> views) {
  std::vector<MicroBatch> list;
  for (const pipeline::HostMicroBatch& view : views) {
    list.push_back({{view.token_ids.begin(), view.token_ids.end()},
                    {view.targets.begin(), view.targets.end()}});
  }
  return list;
}

int64_t unmasked_of(std::span<const MicroBatch> batches) {
  int64_t count = 0;
  for (const MicroBatch& batch : batches) {
    count += std::count_if(batch.targets.begin(), batch.targets.end(),
                           [](int32_t target) { return target >= 0; });
  }
  return count;
}

}  // namespace

TEST_CASE("a window's targets are counted without reading it") {
  const Data data;
  WindowSet set = data.windows();
  REQUIRE(set.window_count() == 11);
  int64_t sum = 0;
  for (int64_t window = 0; window < set.window_count(); ++window) {
    MicroBatch read{std::vector<int32_t>(kLength), std::vector<int32_t>(kLength)};
    set.read(window, read.tokens, read.targets);
    CHECK(set.targets_of(window) == unmasked_of({&read, 1}));
    sum += set.targets_of(window);
  }
  CHECK(sum == set.target_count());
  CHECK(set.targets_of(4) == 1);
}

TEST_CASE("the ranks of a step see what one rank would, and know it all") {
  const Data data;
  const bool shuffle = GENERATE(false, true);
  const int ranks = GENERATE(1, 2, 3, 4, 5);
  const int64_t each = GENERATE(1, 2);     // micro-batches of a rank
  const int64_t windows = GENERATE(1, 2);  // of a micro-batch
  CAPTURE(shuffle, ranks, each, windows);
  DataLoader alone(data.windows(), windows, 7, shuffle);
  RankBatches all(ranks * each, windows, kLength);
  std::vector<DataLoader> loaders;
  std::vector<std::unique_ptr<RankBatches>> of_rank;
  for (int rank = 0; rank < ranks; ++rank) {
    loaders.emplace_back(data.windows(), windows, 7, shuffle);
    of_rank.push_back(std::make_unique<RankBatches>(each, windows, kLength, DataRank{rank, ranks}));
  }
  // Past the ends of three epochs and more.
  while (alone.state().epoch < 3) {
    const int64_t unmasked = all.fill(alone);
    const std::vector<MicroBatch> expected = copies(all.views());
    CHECK(unmasked == unmasked_of(expected));
    std::vector<MicroBatch> seen;
    for (size_t rank = 0; rank < loaders.size(); ++rank) {
      CHECK(of_rank[rank]->fill(loaders[rank]) == unmasked);
      CHECK(loaders[rank].state() == alone.state());
      const std::vector<MicroBatch> part = copies(of_rank[rank]->views());
      seen.insert(seen.end(), part.begin(), part.end());
    }
    REQUIRE(seen == expected);
  }
}

TEST_CASE("ranks go on from the position of another number of ranks") {
  const Data data;
  DataLoader first(data.windows(), 2, 7, true);
  RankBatches of_first(1, 2, kLength, {1, 3});
  for (int step = 0; step < 3; ++step) of_first.fill(first);
  DataLoader second(data.windows(), 2, 7, true);
  second.restore(first.state());
  DataLoader straight(data.windows(), 2, 7, true);
  straight.skip(9);
  CHECK(second.state() == straight.state());
  RankBatches of_second(1, 2, kLength, {1, 2});
  RankBatches of_one(1, 2, kLength);
  of_second.fill(second);
  straight.skip(1);
  of_one.fill(straight);
  CHECK(copies(of_second.views()) == copies(of_one.views()));
}

TEST_CASE("evaluation is divided among ranks, each window once, and all ends together") {
  const Data data;
  const int ranks = GENERATE(1, 2, 3, 4, 5);
  const int64_t each = GENERATE(1, 3);
  const int64_t windows = GENERATE(1, 2, 4);
  const int64_t max_batches = GENERATE(0, 1, 4, 1000);
  CAPTURE(ranks, each, windows, max_batches);
  std::multiset<MicroBatch> expected;
  EvalLoader alone(data.windows(), windows, max_batches);
  RankBatches one(1, windows, kLength);
  int64_t total = 0;
  while (const int64_t unmasked = one.fill(alone)) {
    total += unmasked;
    expected.insert(copies(one.views()).front());
  }
  const int64_t batches = (11 + windows - 1) / windows;
  CHECK(static_cast<int64_t>(expected.size()) ==
        (max_batches == 0 ? batches : std::min(batches, max_batches)));

  std::multiset<MicroBatch> seen;
  std::vector<std::vector<int64_t>> counts;
  for (int rank = 0; rank < ranks; ++rank) {
    EvalLoader loader(data.windows(), windows, max_batches);
    RankBatches mine(each, windows, kLength, {rank, ranks});
    counts.emplace_back();
    while (const int64_t unmasked = mine.fill(loader)) {
      counts.back().push_back(unmasked);
      for (const MicroBatch& batch : copies(mine.views())) {
        if (unmasked_of({&batch, 1}) > 0) {
          seen.insert(batch);
        } else {
          CHECK(batch.tokens == std::vector<int32_t>(batch.tokens.size(), 0));
          CHECK(batch.targets == std::vector<int32_t>(batch.targets.size(), -1));
        }
      }
    }
    CHECK(mine.fill(loader) == 0);
    CHECK(counts.back() == counts.front());
  }
  CHECK(seen == expected);
  CHECK(std::accumulate(counts.front().begin(), counts.front().end(), int64_t{0}) == total);
}

}  // namespace strata::train
