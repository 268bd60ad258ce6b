#include "train/dataset.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::train {
namespace {

constexpr int64_t kVocabulary = 1 << 17;

struct Window {
  std::vector<int32_t> tokens;
  std::vector<int32_t> targets;
  friend bool operator==(const Window&, const Window&) = default;
};

Window window_of(int64_t length) {
  const auto size = static_cast<size_t>(length);
  // Values that no window holds: what is left unwritten shows.
  return {std::vector<int32_t>(size, -77), std::vector<int32_t>(size, -77)};
}

/// By the definition in dataset.h.
std::vector<Window> windows_by_definition(const std::vector<int32_t>& ids, int64_t length) {
  std::vector<Window> windows;
  const auto count = static_cast<int64_t>(ids.size());
  for (int64_t start = 0; start + 1 < count; start += length) {
    Window window = window_of(length);
    for (int64_t i = 0; i < length; ++i) {
      const int64_t at = start + i;
      const bool inside = at + 1 < count;
      window.tokens[static_cast<size_t>(i)] = inside ? ids[static_cast<size_t>(at)] : 0;
      window.targets[static_cast<size_t>(i)] = inside ? ids[static_cast<size_t>(at + 1)] : -1;
    }
    windows.push_back(std::move(window));
  }
  return windows;
}

std::vector<Window> all_windows(WindowSet& set) {
  std::vector<Window> windows;
  for (int64_t i = 0; i < set.window_count(); ++i) {
    windows.push_back(window_of(set.sequence_len()));
    set.read(i, windows.back().tokens, windows.back().targets);
  }
  return windows;
}

template <class Token>
std::vector<Token> random_tokens(size_t count, uint64_t bound, uint64_t seed) {
  CounterRandom random(seed, 0);
  std::vector<Token> tokens(count);
  for (Token& token : tokens) token = static_cast<Token>(random.next_below(bound));
  return tokens;
}

template <class Token>
std::vector<int32_t> ids_of(const std::vector<Token>& tokens) {
  return {tokens.begin(), tokens.end()};
}

WindowSet open_one(const SourceSpec& source, int64_t length, int64_t vocab_size = kVocabulary) {
  return open_datasets({.train = {source}, .sequence_len = length, .vocab_size = vocab_size}).train;
}

template <class Token>
void check_windows(const TemporaryDirectory& directory, std::string_view name, uint64_t bound,
                   SourceType type = SourceType::kAuto) {
  constexpr uint64_t kSeed = 21;
  CAPTURE(kSeed, name);
  for (const int64_t length : {1, 2, 7, 64}) {
    for (const int64_t windows : {1, 2, 3}) {
      for (const int64_t beyond : {-1, 0, 1, 2}) {
        const int64_t count = windows * length + 1 + beyond;
        if (count < length + 1) continue;
        CAPTURE(length, count);
        const auto tokens = random_tokens<Token>(static_cast<size_t>(count), bound, kSeed);
        const std::string path = directory.write_tokens<Token>(name, tokens);
        WindowSet set = open_one({path, type}, length);
        REQUIRE(all_windows(set) == windows_by_definition(ids_of(tokens), length));
        REQUIRE(set.target_count() == count - 1);
      }
    }
  }
}

TEST_CASE("each kind of file is cut into windows by the definition", "[dataset]") {
  const TemporaryDirectory directory;
  check_windows<uint8_t>(directory, "a.txt", 256);  // most of it is not UTF-8
  check_windows<uint8_t>(directory, "a.md", 256);
  check_windows<uint8_t>(directory, "a.rst", 256, SourceType::kText);
  check_windows<uint16_t>(directory, "a.bin", 65536);
  check_windows<uint16_t>(directory, "a.u16.bin", 65536);
  check_windows<uint32_t>(directory, "a.u32.bin", kVocabulary);
  check_windows<uint32_t>(directory, "b.bin", kVocabulary, SourceType::kTokensU32);
  check_windows<uint16_t>(directory, "b.u32.bin", 65536, SourceType::kTokensU16);
}

TEST_CASE("windows do not reach from one file into the next", "[dataset]") {
  const TemporaryDirectory directory;
  const auto a = random_tokens<uint8_t>(10, 256, 1);
  const auto b = random_tokens<uint16_t>(23, 65536, 2);
  Datasets datasets = open_datasets({.train = {{directory.write_tokens<uint8_t>("a.txt", a)},
                                               {directory.write_tokens<uint16_t>("b.bin", b)}},
                                     .sequence_len = 5,
                                     .vocab_size = kVocabulary});
  std::vector<Window> expected = windows_by_definition(ids_of(a), 5);
  const std::vector<Window> more = windows_by_definition(ids_of(b), 5);
  expected.insert(expected.end(), more.begin(), more.end());
  CHECK(all_windows(datasets.train) == expected);
  CHECK(datasets.eval.window_count() == 0);
  CHECK(datasets.train.target_count() == 9 + 22);
}

TEST_CASE("the held-out part is the end of each file and nothing is lost", "[dataset]") {
  const TemporaryDirectory directory;
  constexpr int64_t kLength = 4;
  std::vector<SourceSpec> sources;
  std::vector<std::vector<Window>> parts;
  for (const size_t count : {size_t{401}, size_t{5}, size_t{199}, size_t{6}, size_t{42}}) {
    const auto tokens = random_tokens<uint16_t>(count, 65536, count);
    const std::string name = std::to_string(count) + ".bin";
    sources.push_back({directory.write_tokens<uint16_t>(name, tokens)});
    parts.push_back(windows_by_definition(ids_of(tokens), kLength));
  }
  const double part = GENERATE(0.001, 0.05, 0.1, 0.5, 0.9);
  CAPTURE(part);
  Datasets datasets = open_datasets(
      {.train = sources, .val_set_size = part, .sequence_len = kLength, .vocab_size = kVocabulary});
  const auto train = all_windows(datasets.train);
  const auto eval = all_windows(datasets.eval);
  const int64_t total = datasets.train.window_count() + datasets.eval.window_count();
  CHECK(datasets.eval.window_count() ==
        std::max<int64_t>(1, std::llround(part * static_cast<double>(total))));
  // Each file is a run of training windows, then a run of held-out ones.
  size_t from_train = 0;
  size_t from_eval = 0;
  for (const auto& windows : parts) {
    size_t i = 0;
    while (i < windows.size() && from_train < train.size() && windows[i] == train[from_train]) {
      ++i;
      ++from_train;
    }
    const auto held_out = static_cast<double>(windows.size() - i);
    CHECK(std::abs(held_out - part * static_cast<double>(windows.size())) < 2);
    for (; i < windows.size(); ++i, ++from_eval) REQUIRE(windows[i] == eval.at(from_eval));
  }
  CHECK(from_train == train.size());
  CHECK(from_eval == eval.size());
}

TEST_CASE("something is held out where it can be, never everything", "[dataset]") {
  const TemporaryDirectory directory;
  const auto held_out = [&](size_t windows, double part) {
    const auto tokens = random_tokens<uint8_t>(windows * 4 + 1, 256, 3);
    const Datasets datasets =
        open_datasets({.train = {{directory.write_tokens<uint8_t>("a.txt", tokens)}},
                       .val_set_size = part,
                       .sequence_len = 4,
                       .vocab_size = kVocabulary});
    CHECK(datasets.train.window_count() + datasets.eval.window_count() ==
          static_cast<int64_t>(windows));
    return datasets.eval.window_count();
  };
  CHECK(held_out(1, 0.5) == 0);
  CHECK(held_out(2, 0.02) == 1);
  CHECK(held_out(2, 0.9) == 1);
  CHECK(held_out(100, 0.05) == 5);
  CHECK(held_out(100, 0) == 0);
}

TEST_CASE("evaluation data of its own leaves the training data whole", "[dataset]") {
  const TemporaryDirectory directory;
  const auto a = random_tokens<uint8_t>(101, 256, 4);
  const auto b = random_tokens<uint8_t>(33, 256, 5);
  Datasets datasets = open_datasets({.train = {{directory.write_tokens<uint8_t>("a.txt", a)}},
                                     .eval = {{directory.write_tokens<uint8_t>("b.txt", b)}},
                                     .val_set_size = 0.5,
                                     .sequence_len = 10,
                                     .vocab_size = kVocabulary});
  CHECK(all_windows(datasets.train) == windows_by_definition(ids_of(a), 10));
  CHECK(all_windows(datasets.eval) == windows_by_definition(ids_of(b), 10));
}

TEST_CASE("a file that cannot be used is named, with what is wrong", "[dataset]") {
  const TemporaryDirectory directory;
  const auto refused = [&](const SourceSpec& source, int64_t length,
                           const std::vector<std::string>& words) {
    CHECK_THROWS_AS(open_one(source, length), Error);
    const std::string message = message_of([&] { open_one(source, length); });
    CHECK_THAT(message, Catch::Contains("'" + source.path + "'"));
    for (const std::string& word : words) CHECK_THAT(message, Catch::Contains(word));
    try {
      open_one(source, length);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
    }
  };
  refused({directory.path("missing.txt")}, 4, {"No such file"});
  refused({directory.path("")}, 4, {"does not say what it holds"});
  refused({directory.path(""), SourceType::kText}, 4, {"directory"});
  refused({directory.write("empty.txt", "")}, 4, {"empty"});
  refused({directory.write("empty.bin", "")}, 4, {"empty"});
  refused({directory.write("short.txt", "abcd")}, 4, {"has 4 tokens", "needs 5"});
  refused({directory.write("short.bin", "12345678")}, 4, {"has 4 tokens", "needs 5"});
  refused({directory.write("odd.bin", "12345678901")}, 4, {"11 bytes", "2-byte"});
  refused({directory.write("odd.u32.bin", "1234567890123456789012")}, 4, {"22 bytes", "4-byte"});
  refused({directory.write("data.jsonl", "abcdefgh")}, 4, {"tokens_u16"});
  CHECK_THROWS_AS(open_datasets({.sequence_len = 4, .vocab_size = 256}), Error);
  CHECK(open_one({directory.write("enough.txt", "abcde")}, 4).window_count() == 1);
}

TEST_CASE("a token outside the vocabulary is named, with where it is", "[dataset]") {
  const TemporaryDirectory directory;
  const auto message_at = [&](WindowSet set, int64_t window) {
    Window out = window_of(set.sequence_len());
    return message_of([&] { set.read(window, out.tokens, out.targets); });
  };
  std::vector<uint16_t> narrow(21, 999);
  narrow[20] = 1000;  // the very last token is only ever a target
  const std::string narrow_path = directory.write_tokens<uint16_t>("a.bin", narrow);
  CHECK(message_at(open_one({narrow_path}, 5, 1000), 2).empty());
  CHECK(message_at(open_one({narrow_path}, 5, 1001), 3).empty());
  const std::string message = message_at(open_one({narrow_path}, 5, 1000), 3);
  CHECK_THAT(message, Catch::Contains(narrow_path));
  CHECK_THAT(message, Catch::Contains("token id 1000 at byte 40"));

  std::vector<uint32_t> wide(11, 5);
  wide[3] = 0xffffffffU;
  const std::string wide_path = directory.write_tokens<uint32_t>("a.u32.bin", wide);
  CHECK_THAT(message_at(open_one({wide_path}, 5, 1000), 0),
             Catch::Contains("token id 4294967295 at byte 12"));

  const std::string text_path = directory.write("a.txt",
                                                "ab\x80"
                                                "cdefgh");
  CHECK_THAT(message_at(open_one({text_path}, 4, 128), 0),
             Catch::Contains("token id 128 at byte 2"));
}

/// A loader over one file whose window i begins with token i * length.
struct Counted {
  TemporaryDirectory directory;
  std::string path;
  explicit Counted(int64_t windows, int64_t length) {
    std::vector<uint32_t> tokens(static_cast<size_t>(windows * length + 1));
    std::iota(tokens.begin(), tokens.end(), 0U);
    path = directory.write_tokens<uint32_t>("a.u32.bin", tokens);
  }
};

std::vector<int32_t> next_batch(DataLoader& loader, int64_t batch, int64_t length) {
  Window out = window_of(batch * length);
  loader.next(out.tokens, out.targets);
  std::vector<int32_t> windows;
  for (size_t row = 0; row < static_cast<size_t>(batch); ++row) {
    const size_t start = row * static_cast<size_t>(length);
    windows.push_back(out.tokens[start] / static_cast<int32_t>(length));
    for (size_t i = 0; i < static_cast<size_t>(length); ++i) {
      REQUIRE(out.tokens[start + i] == out.tokens[start] + static_cast<int32_t>(i));
      REQUIRE(out.targets[start + i] == out.tokens[start + i] + 1);
    }
  }
  return windows;
}

TEST_CASE("each epoch is a permutation of its own", "[dataset]") {
  constexpr int64_t kWindows = 60;
  const Counted data(kWindows, 3);
  const auto epochs = [&](uint64_t seed, bool shuffle) {
    DataLoader loader(open_one({data.path}, 3), 5, seed, shuffle);
    std::vector<std::vector<int32_t>> orders(3);
    for (auto& order : orders) {
      for (int i = 0; i < kWindows / 5; ++i) {
        const auto batch = next_batch(loader, 5, 3);
        order.insert(order.end(), batch.begin(), batch.end());
      }
    }
    return orders;
  };
  std::vector<int32_t> in_order(kWindows);
  std::iota(in_order.begin(), in_order.end(), 0);

  const auto shuffled = epochs(7, true);
  for (auto order : shuffled) {
    CHECK(order != in_order);
    std::sort(order.begin(), order.end());
    CHECK(order == in_order);
  }
  CHECK(shuffled[0] != shuffled[1]);
  CHECK(shuffled[1] != shuffled[2]);
  CHECK(epochs(7, true) == shuffled);
  CHECK(epochs(8, true)[0] != shuffled[0]);
  for (const auto& order : epochs(7, false)) CHECK(order == in_order);
}

TEST_CASE("every window is as likely at every place", "[dataset]") {
  constexpr int64_t kWindows = 4;
  constexpr int kEpochs = 6000;
  const Counted data(kWindows, 1);
  DataLoader loader(open_one({data.path}, 1), kWindows, 99, true);
  std::vector<int> seen(kWindows * kWindows);
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const auto order = next_batch(loader, kWindows, 1);
    for (size_t place = 0; place < order.size(); ++place) {
      ++seen[place * kWindows + static_cast<size_t>(order[place])];
    }
  }
  // Mean 1500, standard deviation 34.
  for (const int count : seen) CHECK(std::abs(count - kEpochs / 4) < 170);
}

TEST_CASE("a batch goes over the end of an epoch, even of several", "[dataset]") {
  const Counted data(3, 2);
  DataLoader loader(open_one({data.path}, 2), 4, 1, false);
  CHECK(loader.windows_per_epoch() == 3);
  CHECK(next_batch(loader, 4, 2) == std::vector<int32_t>{0, 1, 2, 0});
  CHECK(loader.state() == DataPosition{1, 1});
  CHECK(next_batch(loader, 4, 2) == std::vector<int32_t>{1, 2, 0, 1});
  CHECK(next_batch(loader, 4, 2) == std::vector<int32_t>{2, 0, 1, 2});
  CHECK(loader.state() == DataPosition{4, 0});

  const Counted one(1, 2);
  DataLoader tiny(open_one({one.path}, 2), 4, 1, true);
  CHECK(next_batch(tiny, 4, 2) == std::vector<int32_t>{0, 0, 0, 0});
  CHECK(tiny.state() == DataPosition{4, 0});
}

TEST_CASE("a restored position goes on with the same windows", "[dataset]") {
  constexpr int64_t kWindows = 17;
  const Counted data(kWindows, 2);
  const int64_t batch = GENERATE(1, 3, 16, 17, 18);
  const bool shuffle = GENERATE(true, false);
  const auto make = [&] { return DataLoader(open_one({data.path}, 2), batch, 5, shuffle); };
  DataLoader straight = make();
  std::vector<DataPosition> positions;
  std::vector<std::vector<int32_t>> batches;
  for (int i = 0; i < 40; ++i) {
    positions.push_back(straight.state());
    batches.push_back(next_batch(straight, batch, 2));
  }
  // Backwards, so that each restore is to an epoch other than the one prepared.
  DataLoader restored = make();
  for (size_t i = positions.size(); i-- > 0;) {
    restored.restore(positions[i]);
    REQUIRE(restored.state() == positions[i]);
    REQUIRE(next_batch(restored, batch, 2) == batches[i]);
  }
}

TEST_CASE("a position of other data is refused", "[dataset]") {
  const Counted data(3, 2);
  DataLoader loader(open_one({data.path}, 2), 1, 1, true);
  CHECK_NOTHROW(loader.restore({5, 2}));
  CHECK_THROWS_AS(loader.restore({0, 3}), Error);
  CHECK_THROWS_AS(loader.restore({0, -1}), Error);
  CHECK_THROWS_AS(loader.restore({-1, 0}), Error);
  CHECK(loader.state() == DataPosition{5, 2});
}

TEST_CASE("a batch that cannot be read leaves the position", "[dataset]") {
  const TemporaryDirectory directory;
  std::vector<uint16_t> tokens(13, 1);
  tokens[9] = 500;
  const std::string path = directory.write_tokens<uint16_t>("a.bin", tokens);
  DataLoader loader(open_one({path}, 4, 100), 2, 1, false);
  Window out = window_of(8);
  loader.next(out.tokens, out.targets);
  CHECK_THROWS_AS(loader.next(out.tokens, out.targets), Error);
  CHECK(loader.state() == DataPosition{0, 2});
}

TEST_CASE("evaluation hands out every window once and fills up the last batch", "[dataset]") {
  constexpr int64_t kWindows = 7;
  const Counted data(kWindows, 3);
  WindowSet set = open_one({data.path}, 3);
  const auto expected = all_windows(set);
  for (const int64_t batch : {1, 2, 6, 7, 8}) {
    CAPTURE(batch);
    EvalLoader loader(set, batch);
    CHECK(loader.batch_count() == (kWindows + batch - 1) / batch);
    for (int pass = 0; pass < 2; ++pass) {
      size_t window = 0;
      int64_t batches = 0;
      Window out = window_of(batch * 3);
      for (; loader.next(out.tokens, out.targets); ++batches) {
        for (size_t row = 0; row < static_cast<size_t>(batch); ++row, ++window) {
          const auto at = static_cast<ptrdiff_t>(row * 3);
          const Window got{{out.tokens.begin() + at, out.tokens.begin() + at + 3},
                           {out.targets.begin() + at, out.targets.begin() + at + 3}};
          const Window padding{{0, 0, 0}, {-1, -1, -1}};
          REQUIRE(got == (window < expected.size() ? expected[window] : padding));
        }
      }
      CHECK(batches == loader.batch_count());
      loader.rewind();
    }
  }
  EvalLoader nothing(WindowSet(3), 2);
  Window out = window_of(6);
  CHECK(nothing.batch_count() == 0);
  CHECK_FALSE(nothing.next(out.tokens, out.targets));
}

TEST_CASE("the memory of a loader is known and does not grow", "[dataset]") {
  const Counted data(1000, 8);
  DataLoader loader(open_one({data.path}, 8), 4, 1, true);
  const size_t before = loader.memory_bytes();
  CHECK(before >= 1000 * sizeof(uint32_t));
  CHECK(before < 1000 * sizeof(uint32_t) + 1024);
  for (int i = 0; i < 600; ++i) next_batch(loader, 4, 8);
  CHECK(loader.memory_bytes() == before);
}

TEST_CASE("steps of epochs cover the data", "[dataset]") {
  CHECK(steps_of_epochs(1, 100, 10) == 10);
  CHECK(steps_of_epochs(1, 101, 10) == 11);
  CHECK(steps_of_epochs(3, 101, 10) == 31);
  CHECK(steps_of_epochs(1, 1, 10) == 1);
}

}  // namespace
}  // namespace strata::train
