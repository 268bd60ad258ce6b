#include "model/weights.h"

#include <cstring>

#include "catch.h"
#include "model/small_run.h"
#include "pipeline/memory_state.h"
#include "temporary_directory.h"

namespace strata::model {

using cpu_adam::MomentFormat;
using pipeline::MemoryState;
using pipeline::StateKind;

namespace {

/// Whether the shards of so many ranks have what one rank's state has, and cleared moments.
void check_shards(const Llama& llama, const MemoryState& whole,
                  const std::vector<MemoryState>& shards) {
  for (const MemoryState& shard : shards) {
    for (int unit = 0; unit < static_cast<int>(llama.units().size()); ++unit) {
      const auto [first, count] = shard.shard(unit);
      const int64_t all = llama.units()[static_cast<size_t>(unit)].parameter_count;
      for (const StateKind kind : {StateKind::kWeight, StateKind::kResidual}) {
        const std::vector<std::byte>& expected = whole.bytes(unit, kind);
        const auto size = static_cast<int64_t>(expected.size()) / all;
        INFO("unit " << unit << ", " << name_of(kind) << " from " << first << ", " << count);
        REQUIRE(std::equal(expected.begin() + first * size,
                           expected.begin() + (first + count) * size,
                           shard.bytes(unit, kind).begin()));
      }
      for (const StateKind kind : {StateKind::kMoment1, StateKind::kMoment2}) {
        const std::vector<std::byte>& moment = shard.bytes(unit, kind);
        REQUIRE(std::all_of(moment.begin(), moment.end(),
                            [](std::byte byte) { return byte == std::byte{0}; }));
      }
    }
  }
}

std::vector<MemoryState> shards_of(const Llama& llama, MomentFormat moments, int ranks) {
  std::vector<MemoryState> shards;
  for (int rank = 0; rank < ranks; ++rank) shards.emplace_back(llama, moments, ranks, rank);
  return shards;
}

}  // namespace

TEST_CASE("what weights begin as does not depend on how many ranks hold them") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const MomentFormat moments = GENERATE(MomentFormat::kF32, MomentFormat::kInt8);
  const Llama llama(parted_config(false), dtype, 64);
  MemoryState whole(llama, moments);
  initialize_weights(5, llama, whole);
  for (const int ranks : {2, 3, 5}) {
    std::vector<MemoryState> shards = shards_of(llama, moments, ranks);
    for (MemoryState& shard : shards) {
      initialize_weights(5, llama, shard);
      // No more than its part of them: 4 bytes of weight, and moments.
      size_t kept = 0;
      for (int unit = 0; unit < static_cast<int>(llama.units().size()); ++unit) {
        kept += static_cast<size_t>(shard.shard(unit).count) * 4 +
                shard.bytes(unit, StateKind::kMoment1).size() * 2;
      }
      CHECK(shard.bytes_written == kept);
    }
    check_shards(llama, whole, shards);
  }
}

TEST_CASE("loaded weights do not depend on how many ranks hold them") {
  const Llama llama(parted_config(true), DType::kBf16, 64);
  const TemporaryDirectory directory;
  std::vector<TensorHeader> headers;
  std::vector<float> values;
  for (const TensorPlace& place : llama.tensors()) {
    headers.push_back({place.tensor.name, ElementType::kF32, place.tensor.shape});
    for (int64_t i = 0; i < place.tensor.elements(); ++i) {
      values.push_back(0.001F * static_cast<float>(values.size()));
    }
  }
  SafetensorsWriter writer(directory.path("model.safetensors"), headers);
  writer.write(std::as_bytes(std::span(values)));
  writer.finish();
  const CheckpointReader reader = CheckpointReader::open(directory.path());
  MemoryState whole(llama, MomentFormat::kF32);
  load_weights(reader, llama, whole);
  for (const int ranks : {2, 4}) {
    std::vector<MemoryState> shards = shards_of(llama, MomentFormat::kF32, ranks);
    for (MemoryState& shard : shards) load_weights(reader, llama, shard);
    check_shards(llama, whole, shards);
  }
}

}  // namespace strata::model
