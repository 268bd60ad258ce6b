#include "train/checkpoint.h"

#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/random.h"
#include "catch.h"
#include "pipeline/memory_state.h"
#include "train/checkpoint_tensors.h"
#include "train/export.h"
#include "train/thread_ranks.h"
#include "train/trainer_fixture.h"

namespace strata::train {
namespace {

using cpu_adam::kChunkElements;
using cpu_adam::kMomentBlock;
using cpu_adam::MomentFormat;
using pipeline::MemoryState;
using pipeline::StateKind;

constexpr std::array kKinds{StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1,
                            StateKind::kMoment2};

/// Units of three chunks, the last of them not of whole blocks in two.
model::LlamaConfig small_model() {
  model::LlamaConfig config;
  config.hidden_size = 96;
  config.intermediate_size = 200;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.vocab_size = 800;
  config.text =
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 96,
          "intermediate_size": 200, "num_hidden_layers": 1, "num_attention_heads": 6,
          "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 800,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "torch_dtype": "float32"})";
  return config;
}

/// The one-rank layout of an int8 moment has bytes that mean nothing: zeros, as in a run.
void clear_padding(std::vector<std::byte>& moment, int64_t count) {
  const int64_t chunk = count / kChunkElements;
  const int64_t tail = count % kChunkElements;
  if (tail == 0) return;
  const auto at = cpu_adam::int8_chunk(count, chunk);
  const int64_t blocks = (tail + kMomentBlock - 1) / kMomentBlock;
  std::fill(moment.begin() + static_cast<std::ptrdiff_t>(at.codes_bytes) + tail,
            moment.begin() + static_cast<std::ptrdiff_t>(at.scales_bytes), std::byte{0});
  std::fill(moment.begin() + static_cast<std::ptrdiff_t>(at.scales_bytes) + blocks, moment.end(),
            std::byte{0});
}

struct Fixture {
  explicit Fixture(DType dtype = DType::kBf16, MomentFormat moments = MomentFormat::kF32)
      : llama(small_model(), dtype, 64), whole(llama, moments) {
    state = {.step = 7,
             .optimizer_steps = 6,
             .tokens = 1234,
             .data = {2, 5},
             .seed = 42,
             .compute_dtype = dtype,
             .optimizer_state = moments,
             .data_fingerprint = "some"};
    CounterRandom random(9, 1);
    for (int unit = 0; unit < units(); ++unit) {
      for (const StateKind kind : kKinds) {
        std::vector<std::byte>& bytes = whole.bytes(unit, kind);
        for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next_u64());
        if (is_int8(kind)) clear_padding(bytes, count(unit));
      }
    }
  }

  [[nodiscard]] int units() const { return static_cast<int>(llama.units().size()); }
  [[nodiscard]] int64_t count(int unit) const {
    return llama.units()[static_cast<size_t>(unit)].parameter_count;
  }
  [[nodiscard]] bool is_int8(StateKind kind) const {
    return whole.moments() == MomentFormat::kInt8 &&
           (kind == StateKind::kMoment1 || kind == StateKind::kMoment2);
  }
  /// The directory of a checkpoint of that many ranks.
  [[nodiscard]] fs::path directory(const std::string& name) const {
    fs::create_directories(scratch.path(name));
    return scratch.path(name);
  }
  [[nodiscard]] std::vector<std::unique_ptr<MemoryState>> shards(int ranks) const {
    std::vector<std::unique_ptr<MemoryState>> list;
    for (int rank = 0; rank < ranks; ++rank) {
      list.push_back(std::make_unique<MemoryState>(llama, whole.moments(), ranks, rank));
    }
    return list;
  }
  std::vector<std::string> save(const fs::path& to,
                                const std::vector<std::unique_ptr<MemoryState>>& shards,
                                int replicas = 1) const {
    const int shard_ranks = static_cast<int>(shards.size());
    return ThreadRanks(shard_ranks * replicas).run([&](RankExchange& exchange) {
      // What other replicas hold is not looked at.
      MemoryState none(llama, whole.moments());
      const int rank = exchange.rank();
      save_checkpoint(to, state, llama,
                      rank < shard_ranks ? *shards[static_cast<size_t>(rank)] : none, 0, exchange,
                      shard_ranks);
    });
  }
  [[nodiscard]] fs::path one_rank() {
    const fs::path to = directory("one");
    save_checkpoint(to, state, llama, whole, 0);
    return checkpoint_path(to, 7);
  }
  /// The whole state, saved by so many ranks.
  [[nodiscard]] fs::path saved_by(int ranks) {
    const fs::path to = directory("by" + std::to_string(ranks));
    const auto held = shards(ranks);
    for (const auto& shard : held) load_checkpoint(one_rank(), llama, *shard);
    for (const std::string& message : save(to, held)) REQUIRE(message.empty());
    return checkpoint_path(to, 7);
  }

  TemporaryDirectory scratch;
  model::Llama llama;
  MemoryState whole;
  RunState state;
};

/// Whether the shard has just what the whole state has of its parameters.
void check_shard(const Fixture& fixture, const MemoryState& shard) {
  for (int unit = 0; unit < fixture.units(); ++unit) {
    const auto [first, held] = shard.shard(unit);
    for (const StateKind kind : kKinds) {
      const std::vector<std::byte>& all = fixture.whole.bytes(unit, kind);
      const std::vector<std::byte>& part = shard.bytes(unit, kind);
      int64_t wrong = 0;
      if (fixture.is_int8(kind)) {
        const int64_t padded =
            static_cast<int64_t>(part.size() /
                                 cpu_adam::moment_bytes(MomentFormat::kInt8, kChunkElements)) *
            kChunkElements;
        for (int64_t i = 0; i < held; ++i) {
          const auto code = [](int64_t count, int64_t element) {
            return cpu_adam::int8_chunk(count, element / kChunkElements).codes_bytes +
                   static_cast<size_t>(element % kChunkElements);
          };
          const auto scale = [](int64_t count, int64_t element) {
            return cpu_adam::int8_chunk(count, element / kChunkElements).scales_bytes +
                   static_cast<size_t>(element % kChunkElements / kMomentBlock);
          };
          const int64_t count = fixture.count(unit);
          wrong += part[code(padded, i)] != all[code(count, first + i)];
          wrong += part[scale(padded, i)] != all[scale(count, first + i)];
        }
      } else {
        const size_t size = all.size() / static_cast<size_t>(fixture.count(unit));
        const auto bytes = static_cast<size_t>(held) * size;
        wrong = !std::equal(part.begin(), part.begin() + static_cast<std::ptrdiff_t>(bytes),
                            all.begin() + first * static_cast<int64_t>(size));
        // What is padding was left alone.
        wrong += std::count_if(part.begin() + static_cast<std::ptrdiff_t>(bytes), part.end(),
                               [](std::byte byte) { return byte != pipeline::kUnwritten; });
      }
      INFO("unit " << unit << ", " << name_of(kind) << " from " << first << ", " << held);
      REQUIRE(wrong == 0);
    }
  }
}

void check_whole(const Fixture& fixture, const MemoryState& other) {
  for (int unit = 0; unit < fixture.units(); ++unit) {
    for (const StateKind kind : kKinds) {
      INFO("unit " << unit << ", " << name_of(kind));
      REQUIRE((other.bytes(unit, kind) == fixture.whole.bytes(unit, kind)));
    }
  }
}

void flip_byte(const fs::path& path, int64_t offset_bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(offset_bytes);
  const auto byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(offset_bytes);
  file.put(byte);
}

nlohmann::json run_file(const fs::path& checkpoint) {
  return nlohmann::json::parse(read_text_file(checkpoint / "trainer_state.json"));
}

}  // namespace

TEST_CASE("a checkpoint of any number of ranks is reopened on any other, bit for bit") {
  const MomentFormat moments =
      GENERATE(MomentFormat::kF32, MomentFormat::kBf16, MomentFormat::kInt8);
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  CAPTURE(name_of(moments), name_of(dtype));
  Fixture fixture(dtype, moments);
  const fs::path one = fixture.one_rank();
  for (const int from : {4, 3, 7}) {
    CAPTURE(from);
    const fs::path saved = fixture.saved_by(from);
    CHECK(list_checkpoints(saved.parent_path()) == std::vector{saved});
    CHECK(read_run_state(saved) == fixture.state);
    CHECK_NOTHROW(verify_masters(saved));
    CHECK(std::distance(fs::directory_iterator(saved), {}) == from + 2);
    for (const int to : {1, 2, 3, 4, 5}) {
      CAPTURE(to);
      for (const auto& shard : fixture.shards(to)) {
        load_checkpoint(saved, fixture.llama, *shard);
        if (to > 1) check_shard(fixture, *shard);
        if (to == 1) check_whole(fixture, *shard);
      }
    }
    // One rank that has it all writes what it would have written.
    MemoryState again(fixture.llama, moments);
    load_checkpoint(saved, fixture.llama, again);
    const fs::path back = fixture.directory("back" + std::to_string(from));
    save_checkpoint(back, fixture.state, fixture.llama, again, 0);
    for (const char* name : {"state.safetensors", "trainer_state.json", "config.json"}) {
      CHECK((read_text_file(checkpoint_path(back, 7) / name) == read_text_file(one / name)));
    }
  }
}

TEST_CASE("one rank's checkpoint keeps its files, and replicas write once") {
  Fixture fixture;
  const fs::path one = fixture.one_rank();
  CHECK(fixture.whole.updates_finished == 1);
  const nlohmann::json run = run_file(one);
  CHECK(run["format"] == 1);
  CHECK(run["xxh3_64"].size() == 4 * fixture.llama.tensors().size());
  CHECK(run["xxh3_64"]["weight.model.norm.weight"].get<std::string>().size() == 16);
  // no_shard: all ranks hold all.
  const auto held = fixture.shards(1);
  load_checkpoint(one, fixture.llama, *held.front());
  const fs::path data_parallel = fixture.directory("no_shard");
  for (const std::string& message : fixture.save(data_parallel, held, 3)) CHECK(message.empty());
  CHECK(read_text_file(checkpoint_path(data_parallel, 7) / "trainer_state.json") ==
        read_text_file(one / "trainer_state.json"));
  CHECK((bytes_of(checkpoint_path(data_parallel, 7)) == bytes_of(one)));
  // hybrid_shard: two groups of two.
  const auto halves = fixture.shards(2);
  for (const auto& shard : halves) load_checkpoint(one, fixture.llama, *shard);
  const fs::path hybrid = fixture.directory("hybrid");
  for (const std::string& message : fixture.save(hybrid, halves, 2)) CHECK(message.empty());
  CHECK(run_file(checkpoint_path(hybrid, 7)) == run_file(fixture.saved_by(2)));
  CHECK(run_file(checkpoint_path(hybrid, 7))["files"].size() == 2);
}

TEST_CASE("a rank reads what it needs, and damage is named where it matters") {
  Fixture fixture;
  const fs::path saved = fixture.saved_by(4);
  // Checksums of pieces so small that a slice has many.
  nlohmann::json run = run_file(saved);
  constexpr size_t kPieceBytes = 4096;
  run["piece_bytes"] = kPieceBytes;
  for (nlohmann::json& file : run["files"]) {
    const auto opened = model::SafetensorsFile::open(saved / file["name"].get<std::string>());
    for (auto& [name, slice] : file["slices"].items()) {
      const model::TensorInfo* info = opened.find(name);
      REQUIRE(info != nullptr);
      std::vector<std::byte> bytes(static_cast<size_t>(info->size_bytes));
      opened.read(*info, 0, bytes);
      std::string checksums;
      for (size_t at = 0; at < bytes.size(); at += kPieceBytes) {
        Checksum checksum;
        checksum.add(std::span(bytes).subspan(at, std::min(kPieceBytes, bytes.size() - at)));
        checksums += checksum.take();
      }
      // The same where the slice is one piece.
      if (bytes.size() <= kPieceBytes) CHECK(slice["xxh3_64"] == checksums);
      slice["xxh3_64"] = checksums;
    }
  }
  write_text_file_atomically(saved / "trainer_state.json", run.dump());
  const auto refusals = [&](int ranks) {
    std::vector<int> refused;
    for (int rank = 0; rank < ranks; ++rank) {
      MemoryState shard(fixture.llama, MomentFormat::kF32, ranks, rank);
      const std::string message = message_of([&] { load_checkpoint(saved, fixture.llama, shard); });
      if (message.empty()) {
        check_shard(fixture, shard);
      } else {
        CHECK_THAT(message, Catch::Contains("checksum of tensor 'moment2.lm_head.weight'") &&
                                Catch::Contains("state-00002-of-00004.safetensors") &&
                                Catch::Contains("resume from an older checkpoint"));
        refused.push_back(rank);
      }
    }
    return refused;
  };
  CHECK(refusals(16).empty());
  // The last byte of the second of four: in the eighth of sixteen.
  const fs::path file = saved / "state-00002-of-00004.safetensors";
  flip_byte(file, static_cast<int64_t>(fs::file_size(file)) - 1);
  CHECK(refusals(4) == std::vector{1});
  CHECK(refusals(16) == std::vector{7});
  CHECK_NOTHROW(verify_masters(saved));  // it is a moment
  MemoryState weights(fixture.llama, MomentFormat::kF32, 1, 0, /*training=*/false);
  CHECK_NOTHROW(load_checkpoint(saved, fixture.llama, weights));
  CHECK((weights.bytes(1, StateKind::kWeight) == fixture.whole.bytes(1, StateKind::kWeight)));

  flip_byte(saved / "state-00003-of-00004.safetensors",
            static_cast<int64_t>(fs::file_size(file)) / 20);
  CHECK_THROWS_WITH(verify_masters(saved), Catch::Contains("weight."));
}

TEST_CASE("a checkpoint whose files do not fit together is refused") {
  Fixture fixture;
  const fs::path saved = fixture.saved_by(3);
  const nlohmann::json good = run_file(saved);
  const auto refused = [&](const nlohmann::json& run, const std::string& words) {
    write_text_file_atomically(saved / "trainer_state.json", run.dump());
    MemoryState shard(fixture.llama, MomentFormat::kF32, 2, 1);
    CHECK_THAT(message_of([&] { load_checkpoint(saved, fixture.llama, shard); }),
               Catch::Contains(words) && Catch::Contains("older checkpoint"));
    CHECK(shard.bytes_written == 0);
  };
  nlohmann::json run = good;
  run["files"].erase(1);
  refused(run, "do not fit together");
  run = good;
  run["files"].erase(2);
  refused(run, "is damaged: tensor");
  run = good;
  run["files"][0]["slices"]["weight.lm_head.weight"]["first"] = 8;
  refused(run, "do not fit together");
  run = good;
  run["files"][0]["slices"]["weight.lm_head.weight"]["xxh3_64"] = "";
  refused(run, "do not fit together");
  run = good;
  run["files"][1]["name"] = "../other";
  refused(run, "../other");
  run = good;
  run.erase("files");
  refused(run, "broken");
  run = good;
  run["shapes"]["weight.lm_head.weight"] = {1, 2};
  refused(run, "weight.lm_head.weight");
  fs::remove(saved / "state-00002-of-00003.safetensors");
  refused(good, "state-00002");
  run["format"] = 3;
  write_text_file_atomically(saved / "trainer_state.json", run.dump());
  CHECK_THROWS_WITH(read_run_state(saved), Catch::Contains("format 3"));
  // Without it there is no checkpoint.
  fs::remove(saved / "trainer_state.json");
  CHECK(list_checkpoints(saved.parent_path()).empty());
}

TEST_CASE("a rank that cannot save ends the save of all, and leaves nothing") {
  Fixture fixture;
  const auto held = fixture.shards(3);
  for (const auto& shard : held) load_checkpoint(fixture.one_rank(), fixture.llama, *shard);
  const fs::path to = fixture.directory("failed");
  held[1]->bytes_until_failure = 100000;
  const std::vector<std::string> messages = fixture.save(to, held);
  for (const std::string& message : messages) CHECK(message == "rank 1: the state cannot be read");
  CHECK(fs::is_empty(to));
  held[1]->bytes_until_failure = SIZE_MAX;
  for (const std::string& message : fixture.save(to, held)) CHECK(message.empty());
  CHECK(list_checkpoints(to).size() == 1);
  for (const std::string& message : fixture.save(fixture.scratch.path("nowhere"), held)) {
    CHECK_FALSE(message.empty());
  }

  // Ranks that are a step apart have no state in common.
  const fs::path apart = fixture.directory("apart");
  const std::vector<std::string> refused = ThreadRanks(2).run([&](RankExchange& exchange) {
    RunState state = fixture.state;
    state.step += exchange.rank();
    save_checkpoint(apart, state, fixture.llama, *held[static_cast<size_t>(exchange.rank())], 0,
                    exchange, 1);
  });
  for (const std::string& message : refused) CHECK_THAT(message, Catch::Contains("same point"));
  CHECK(fs::is_empty(apart));
}

TEST_CASE("an export does not depend on how many ranks saved") {
  Fixture fixture;
  export_model(fixture.one_rank(), fixture.scratch.path("of-one"), {});
  export_model(fixture.saved_by(5), fixture.scratch.path("of-five"), {});
  CHECK((read_text_file(fixture.scratch.path("of-one/model.safetensors")) ==
         read_text_file(fixture.scratch.path("of-five/model.safetensors"))));
}

TEST_CASE("a run goes on from the files of several ranks to the same bits") {
  const Bench bench;
  TrainConfig config = bench.config("whole");
  config.optimizer_state = GENERATE(MomentFormat::kF32, MomentFormat::kInt8);
  config.save_steps = 5;
  Recorder whole;
  run(config, whole);
  const fs::path halfway = checkpoint_path(config.output_dir, 5);
  const model::Llama llama(model::read_llama_config(halfway), config.compute_dtype, 24);
  std::vector<std::unique_ptr<MemoryState>> held;
  for (int rank = 0; rank < 3; ++rank) {
    held.push_back(std::make_unique<MemoryState>(llama, config.optimizer_state, 3, rank));
    load_checkpoint(halfway, llama, *held.back());
  }
  config.output_dir = bench.output("resumed").string();
  fs::create_directory(config.output_dir);
  const RunState state = read_run_state(halfway);
  ThreadRanks(3).run([&](RankExchange& exchange) {
    save_checkpoint(config.output_dir, state, llama, *held[static_cast<size_t>(exchange.rank())], 0,
                    exchange, 3);
  });
  config.resume = "auto";
  Recorder resumed;
  CHECK(run(config, resumed).step == 10);
  CHECK(resumed.first_step == 5);
  CHECK((bytes_of(checkpoint_path(config.output_dir, 10)) ==
         bytes_of(checkpoint_path(bench.output("whole"), 10))));
}

}  // namespace strata::train
