// Flash attention of the CUDA device against double precision, and to the same bits in every lane
// order: the tensor core kernels (bf16, head dimensions 64, 96, 128 and 256) and the plain ones.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/random.h"
#include "gpu/attention_reference.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda_memory.h"

namespace strata::gpu::cuda {
namespace {

using attention_reference::Case;
using attention_reference::check;
using attention_reference::Inputs;
using attention_reference::kSeed;
using attention_reference::Results;
using attention_reference::Values;

/// Device memory that starts `offset` elements from where memory is aligned.
DeviceMemory on_device(const Values& values, int64_t offset = 0) {
  std::vector<std::byte> bytes(values.size_bytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return DeviceMemory(bytes, static_cast<size_t>(offset) * size_of(values.dtype()));
}

void download(const DeviceMemory& from, Values& to) {
  const std::vector<std::byte> bytes = from.download<std::byte>();
  REQUIRE(bytes.size() == to.size_bytes());
  if (!bytes.empty()) std::memcpy(to.data(), bytes.data(), bytes.size());
}

/// A forward and a backward call. Inputs and results are `offset` elements off alignment.
Results run(const Case& test, const Inputs& inputs, int64_t offset = 0) {
  Results results(test);
  const DeviceMemory offsets(inputs.offsets);
  const DeviceMemory qkv = on_device(inputs.qkv, offset);
  const DeviceMemory dout = on_device(inputs.dout, offset);
  const DeviceMemory out = on_device(results.out, offset);
  const DeviceMemory dqkv = on_device(results.dqkv, offset);
  const DeviceMemory log_sum_exp(results.log_sum_exp);
  const auto at = [&](const DeviceMemory& memory, int64_t element) {
    return memory.data<std::byte>() + static_cast<size_t>(element) * size_of(test.dtype);
  };

  AttentionBackwardArgs backward{.forward = {.tokens = test.tokens(),
                                             .heads = test.heads,
                                             .kv_heads = test.kv_heads,
                                             .head_dim = test.head_dim,
                                             .sequences = static_cast<int64_t>(test.lengths.size()),
                                             .max_sequence = test.max_sequence(),
                                             .dtype = test.dtype,
                                             .scale = test.scale(),
                                             .sequence_offsets = offsets.data<int32_t>(),
                                             .q = qkv.data(),
                                             .k = at(qkv, test.k_offset()),
                                             .v = at(qkv, test.v_offset()),
                                             .qkv_stride = test.width(),
                                             .out = out.data(),
                                             .log_sum_exp = log_sum_exp.data<float>()},
                                 .dout = dout.data(),
                                 .dq = dqkv.data(),
                                 .dk = at(dqkv, test.k_offset()),
                                 .dv = at(dqkv, test.v_offset()),
                                 .dqkv_stride = test.width()};
  const TestStream stream;
  const DeviceMemory scratch(attention_scratch_bytes(backward.forward));
  backward.forward.scratch = scratch.data();
  attention(backward.forward, stream.handle());
  const DeviceMemory backward_scratch(attention_backward_scratch_bytes(backward));
  backward.forward.scratch = backward_scratch.data();
  attention_backward(backward, stream.handle());
  stream.synchronize();

  download(out, results.out);
  download(dqkv, results.dqkv);
  results.log_sum_exp = log_sum_exp.download<float>();
  return results;
}

void check(const Case& test, int64_t offset = 0) {
  const Inputs inputs(test);
  check(test, inputs, in_every_lane_order([&] { return run(test, inputs, offset); }));
}

TEST_CASE("flash attention agrees with double precision", "[cuda_attention]") {
  if (!have_device()) return;
  const int64_t head_dim = GENERATE(64, 96, 128, 256);
  check({.heads = 1, .head_dim = head_dim, .lengths = {1, 63, 64, 65, 0, 130}, .unused_tokens = 5});
  check({.heads = 4, .kv_heads = 1, .head_dim = head_dim, .lengths = {17, 66}});
  check({.heads = 8, .kv_heads = 8, .head_dim = head_dim, .lengths = {31}});
  check({.heads = 8, .kv_heads = 2, .head_dim = head_dim, .lengths = {3, 34}, .unused_tokens = 1});
}

TEST_CASE("flash attention agrees with double precision over many tiles", "[cuda_attention]") {
  if (!have_device()) return;
  const int64_t head_dim = GENERATE(64, 96, 128, 256);
  check({.heads = 1, .head_dim = head_dim, .lengths = {257}});
}

TEST_CASE("attention agrees with double precision where tensor cores do not serve",
          "[cuda_attention]") {
  if (!have_device()) return;
  for (const int64_t head_dim : {1, 16, 40, 64}) {
    for (const DType dtype : kDTypes) {
      if (dtype == DType::kBf16 && head_dim == 64) continue;
      check({.heads = 3,
             .kv_heads = 1,
             .head_dim = head_dim,
             .lengths = {1, 0, 31, 32, 67},
             .unused_tokens = 3,
             .dtype = dtype});
    }
  }
}

TEST_CASE("attention takes unaligned tensors and negative scales", "[cuda_attention]") {
  if (!have_device()) return;
  const Case test{.heads = 4, .kv_heads = 2, .head_dim = 64, .lengths = {5, 40}};
  check(test, 1);
  Case negative = test;
  negative.negative_scale = true;
  check(negative);
}

TEST_CASE("attention finds its sequence among many", "[cuda_attention]") {
  if (!have_device()) return;
  CounterRandom random(kSeed, 3);
  for (const DType dtype : kDTypes) {
    Case test{.heads = 1, .head_dim = 64, .unused_tokens = 40, .dtype = dtype};
    for (int i = 0; i < 60; ++i) {
      test.lengths.push_back(static_cast<int32_t>(random.next_below(3) * random.next_below(12)));
    }
    test.lengths.push_back(140);
    check(test);
  }
}

TEST_CASE("attention keeps large scores apart", "[cuda_attention]") {
  // Scores of several hundred that grow along the sequence: exp of them would overflow, and the
  // reference of a row moves from tile to tile.
  if (!have_device()) return;
  const int64_t head_dim = GENERATE(32, 64, 128, 256);
  const Case test{.heads = 1,
                  .head_dim = head_dim,
                  .lengths = {170},
                  .dtype = head_dim == 32 ? DType::kF32 : DType::kBf16};
  Inputs inputs(test);
  for (int64_t i = 0; i < inputs.qkv.size(); ++i) {
    if (i % test.width() < test.v_offset()) {
      const double growth = 2 + static_cast<double>(i / test.width()) / 32;
      inputs.qkv.set(i, static_cast<float>(growth * inputs.qkv[i]));
    }
  }
  check(test, inputs, run(test, inputs));
}

TEST_CASE("a token affects no token before it and no other sequence", "[cuda_attention]") {
  if (!have_device()) return;
  const Case test{.heads = 2, .kv_heads = 1, .head_dim = 64, .lengths = {40, 200, 30}};
  const Results before = run(test, Inputs(test));
  const int64_t changed = 40 + GENERATE(0, 1, 32, 63, 64, 127, 128, 199);
  Inputs inputs(test);
  for (int64_t i = 0; i < test.width(); ++i) inputs.qkv.set(changed * test.width() + i, 30.0F);
  const Results after = run(test, inputs);
  const int64_t width = test.heads * test.head_dim;
  for (int64_t token = 0; token < test.tokens(); ++token) {
    bool differs = false;
    for (int64_t i = token * width; i < (token + 1) * width; ++i) {
      differs = differs || after.out[i] != before.out[i];
    }
    INFO("token " << token << " with token " << changed << " changed");
    if (token < changed || token >= 240) CHECK_FALSE(differs);
    if (token == changed) CHECK(differs);
  }
}

TEST_CASE("attention without tokens, sequences or keys", "[cuda_attention]") {
  if (!have_device()) return;
  for (const int64_t head_dim : {16, 64}) {
    check({.head_dim = head_dim, .lengths = {}, .unused_tokens = 0});
    check({.head_dim = head_dim, .lengths = {}, .unused_tokens = 5});
    check({.head_dim = head_dim, .lengths = {0, 0}, .unused_tokens = 5});
  }
}

}  // namespace
}  // namespace strata::gpu::cuda
