// What forward keeps for backward changes what is computed again, and nothing else.

#include <cmath>
#include <functional>

#include "base/bytes.h"
#include "catch.h"
#include "gpu/host/host_device.h"
#include "model/counting_device.h"
#include "model/small_run.h"
#include "model/unit_run.h"

namespace strata::model {
namespace {

using pipeline::Pass;
using pipeline::SavedActivations;

constexpr SavedActivations kLevels[] = {SavedActivations::kNone, SavedActivations::kAttention,
                                        SavedActivations::kAll};

/// Two blocks. `narrow`: a feed-forward half smaller than the gradients of the attention half.
LlamaConfig two_blocks(bool tied, bool narrow) {
  LlamaConfig config = small_config(tied);
  config.num_hidden_layers = 2;
  if (narrow) {
    config.intermediate_size = 40;
    config.num_key_value_heads = config.num_attention_heads;
  }
  return config;
}

/// Lengths of documents; `padding` tokens follow them.
struct Documents {
  std::vector<int32_t> lengths;
  int32_t padding = 0;
};

std::vector<TestBatch> two_batches(const Documents& documents, int64_t vocabulary) {
  std::vector<int32_t> lengths = documents.lengths;
  if (documents.padding > 0) lengths.push_back(documents.padding);
  std::vector<TestBatch> batches;
  for (uint64_t i = 0; i < 2; ++i) {
    batches.push_back(TestBatch::random(lengths, vocabulary, i));
    if (documents.padding > 0) batches.back().offsets.pop_back();
  }
  return batches;
}

bool all_finite(std::span<const std::byte> bytes, DType dtype) {
  const size_t size = size_of(dtype);
  for (size_t i = 0; i < bytes.size(); i += size) {
    float value = 0;
    if (dtype == DType::kF32) {
      std::memcpy(&value, bytes.data() + i, size);
    } else {
      Bf16 half{};
      std::memcpy(&half, bytes.data() + i, size);
      value = to_float(half);
    }
    if (!std::isfinite(value)) return false;
  }
  return true;
}

bool all_finite(const UnitResults& results, DType dtype) {
  const auto finite = [](const std::vector<std::vector<std::byte>>& all, DType type) {
    return std::all_of(all.begin(), all.end(),
                       [&](const auto& bytes) { return all_finite(bytes, type); });
  };
  return finite(results.boundaries, dtype) && finite(results.boundary_gradients, dtype) &&
         finite(results.gradients, DType::kF32);
}

}  // namespace

TEST_CASE("what is saved changes no bit of outputs, input gradients and weight gradients") {
  const auto [tied, narrow] = GENERATE(table<bool, bool>({{false, false}, {true, true}}));
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const Documents documents = GENERATE(Documents{{19, 1, 33, 11}}, Documents{{17, 1, 33, 2}},
                                       Documents{{13, 6}, 12}, Documents{{1}});
  const auto device = gpu::create_host_device({.threads = 2});
  const LlamaConfig config = two_blocks(tied, narrow);
  const Llama llama(config, dtype, 64);
  const std::vector<TestBatch> batches = two_batches(documents, config.vocab_size);
  INFO("tied and narrow " << tied << ", " << name_of(dtype) << ", " << batches.front().tokens.size()
                          << " tokens");

  const auto run = [&](SavedActivations first, SavedActivations second) {
    // The embedding and the head have nothing to save, whatever they are told.
    UnitRun units(*device, llama, batches, {first, first, second, second});
    UnitResults results = units.forward_backward();
    INFO("blocks save " << pipeline::name_of(first) << ", " << pipeline::name_of(second));
    CHECK(units.guards_are_intact());
    CHECK(all_finite(results, dtype));
    return results;
  };
  const UnitResults none = run(SavedActivations::kNone, SavedActivations::kNone);
  for (const SavedActivations level : {SavedActivations::kAttention, SavedActivations::kAll}) {
    INFO(pipeline::name_of(level));
    const UnitResults saved = run(level, level);
    CHECK(saved.boundaries == none.boundaries);
    CHECK(saved.boundary_gradients == none.boundary_gradients);
    CHECK(saved.gradients == none.gradients);
    CHECK(saved.loss_sum == none.loss_sum);
  }
  CHECK(run(SavedActivations::kAll, SavedActivations::kNone) == none);
}

TEST_CASE("backward reads the saved activations, and forward fills them to their last piece") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const SavedActivations level = GENERATE(SavedActivations::kAttention, SavedActivations::kAll);
  const auto device = gpu::create_host_device({.threads = 2});
  const LlamaConfig config = two_blocks(false, false);
  const Llama llama(config, dtype, 64);
  const auto batches = two_batches({{17, 1, 33, 2}}, config.vocab_size);
  UnitRun units(*device, llama, batches,
                std::vector<SavedActivations>(llama.units().size(), level));
  REQUIRE(all_finite(units.forward_backward(), dtype));

  units.forward(0, 0);
  units.forward(1, 0);
  const std::vector<std::byte> written = units.saved(1)[0]->read();
  CHECK_FALSE(std::all_of(written.end() - 64, written.end(),
                          [](std::byte byte) { return byte == kPoison; }));
  units.backward(1, 0);
  REQUIRE(all_finite(units.gradient(1).read(), DType::kF32));
  units.saved(1)[0]->poison();
  units.backward(1, 0);
  CHECK_FALSE(all_finite(units.gradient(1).read(), DType::kF32));
}

TEST_CASE("the bytes saved are those of the activations named") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const LlamaConfig config = two_blocks(false, false);
  const Llama llama(config, dtype, 64);
  const int last = static_cast<int>(llama.units().size()) - 1;
  for (const int64_t tokens : {1, 53, 64}) {
    const auto piece = [&](int64_t width, size_t element) {
      return align_up(static_cast<size_t>(tokens * width) * element, size_t{64});
    };
    const int64_t query = config.num_attention_heads * config.head_dim;
    const int64_t qkv = query + 2 * config.num_key_value_heads * config.head_dim;
    const size_t attention = piece(qkv, size_of(dtype)) + piece(query, size_of(dtype)) +
                             piece(config.hidden_size, size_of(dtype)) +
                             piece(config.num_attention_heads, sizeof(float));
    const size_t gate_up = piece(2 * config.intermediate_size, size_of(dtype));
    CHECK(llama.saved_bytes(1, SavedActivations::kNone, tokens) == 0);
    CHECK(llama.saved_bytes(1, SavedActivations::kAttention, tokens) == attention);
    CHECK(llama.saved_bytes(2, SavedActivations::kAll, tokens) == attention + gate_up);
    for (const SavedActivations level : kLevels) {
      CHECK(llama.saved_bytes(0, level, tokens) == 0);
      CHECK(llama.saved_bytes(last, level, tokens) == 0);
    }
  }
}

TEST_CASE("saving spares backward the products that made what is saved") {
  const LlamaConfig config = two_blocks(false, false);
  const Llama llama(config, DType::kBf16, 64);
  const double t = 53;
  const double s = 21;
  const auto d = static_cast<double>(config.hidden_size);
  const auto f = static_cast<double>(config.intermediate_size);
  const auto query = static_cast<double>(config.num_attention_heads * config.head_dim);
  const auto kv = static_cast<double>(config.num_key_value_heads * config.head_dim);
  const auto flops = [&](Pass pass, SavedActivations saved) {
    return llama.matmul_flops(1, pass, 53, 21, saved);
  };
  const double none = flops(Pass::kBackward, SavedActivations::kNone);
  const double attention = flops(Pass::kBackward, SavedActivations::kAttention);
  const double all = flops(Pass::kBackward, SavedActivations::kAll);
  // Query, key and value, the output matrix, and the scores and the sum of the causal half.
  CHECK(none - attention ==
        2 * t * d * (query + 2 * kv) + 2 * t * query * d + 4 * query * t * (s + 1) / 2);
  CHECK(attention - all == 2 * t * d * 2 * f);
  CHECK(llama.matmul_flops(1, Pass::kBackward, 53, 21) == none);
  for (const SavedActivations level : kLevels) {
    CHECK(flops(Pass::kForward, level) == flops(Pass::kForward, SavedActivations::kNone));
  }
}

TEST_CASE("the work of each call is what its operators do") {
  const bool tied = GENERATE(false, true);
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const SavedActivations level = GENERATE(from_range(std::begin(kLevels), std::end(kLevels)));
  INFO(pipeline::name_of(level) << ", " << name_of(dtype) << ", tied " << tied);
  const auto host = gpu::create_host_device({.threads = 2});
  CountingDevice device(*host);
  const LlamaConfig config = two_blocks(tied, false);
  const Llama llama(config, dtype, 64);
  constexpr int64_t kTokens = 53;
  const auto batches = two_batches({{kTokens}}, config.vocab_size);
  UnitRun units(device, llama, batches, std::vector<SavedActivations>(llama.units().size(), level));

  const auto check = [&](int unit, Pass pass, const std::function<void()>& call) {
    device.work() = {};
    call();
    INFO("unit " << unit << ", pass " << static_cast<int>(pass));
    CHECK(device.work().matmul_flops == llama.matmul_flops(unit, pass, kTokens, kTokens, level));
    CHECK(device.work().other_bytes == llama.other_bytes(unit, pass, kTokens, level));
  };
  for (const int unit : {0, 1, 2}) check(unit, Pass::kForward, [&] { units.forward(unit, 0); });
  check(3, Pass::kLoss, [&] { units.loss(0, false); });
  check(3, Pass::kLossAndBackward, [&] { units.loss(0); });
  for (const int unit : {2, 1, 0}) check(unit, Pass::kBackward, [&] { units.backward(unit, 0); });
}

}  // namespace strata::model
