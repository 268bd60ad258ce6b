#include <oneapi/tbb/global_control.h>
#include <oneapi/tbb/task_arena.h>

#include <cstdint>
#include <vector>

#include "base/random.h"
#include "catch.h"
#include "gpu/attention_reference.h"
#include "gpu/host/kernels.h"
#include "trials.h"

namespace strata::gpu {
namespace {

using namespace attention_reference;

/// The tensors of a forward and a backward call.
struct Tensors : Inputs, Results {
  explicit Tensors(const Case& test) : Inputs(test), Results(test) {}

  void run(const Case& test, int threads) {
    tbb::task_arena arena(threads);
    AttentionArgs args{.tokens = test.tokens(),
                       .heads = test.heads,
                       .kv_heads = test.kv_heads,
                       .head_dim = test.head_dim,
                       .sequences = static_cast<int64_t>(test.lengths.size()),
                       .max_sequence = test.max_sequence(),
                       .dtype = test.dtype,
                       .scale = test.scale(),
                       .sequence_offsets = offsets.data(),
                       .q = qkv.data(),
                       .k = qkv.at(test.k_offset()),
                       .v = qkv.at(test.v_offset()),
                       .qkv_stride = test.width(),
                       .out = out.data(),
                       .log_sum_exp = log_sum_exp.data()};
    scratch.assign(host::attention_scratch_bytes(args, threads), '\xff');
    args.scratch = scratch.data();
    host::attention(args, arena);

    AttentionBackwardArgs backward{.forward = args,
                                   .dout = dout.data(),
                                   .dq = dqkv.data(),
                                   .dk = dqkv.at(test.k_offset()),
                                   .dv = dqkv.at(test.v_offset()),
                                   .dqkv_stride = test.width()};
    scratch.assign(host::attention_backward_scratch_bytes(backward, threads), '\xff');
    backward.forward.scratch = scratch.data();
    host::attention_backward(backward, arena);
  }

  std::vector<char> scratch;
};

void check(const Case& test, int threads = 2) {
  Tensors tensors(test);
  tensors.run(test, threads);
  check(test, tensors, tensors);
}

TEST_CASE("attention agrees with double precision", "[attention]") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  const int64_t head_dim = GENERATE(16, 64, 96, 128);
  for (const int64_t group : {1, 4, 8}) {
    if (kSanitized && group == 8) continue;
    check({.heads = 2 * group,
           .kv_heads = 2,
           .head_dim = head_dim,
           .lengths = {70, 1, 0, 33},
           .unused_tokens = 3,
           .dtype = dtype});
  }
}

TEST_CASE("attention agrees with double precision at the edges of its blocks", "[attention]") {
  const DType dtype = GENERATE(DType::kBf16, DType::kF32);
  for (const int32_t length : {1, 2, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 515}) {
    check({.heads = 1, .head_dim = 16, .lengths = {length}, .dtype = dtype});
    check({.heads = 3, .head_dim = 8, .lengths = {length}, .dtype = dtype});
  }
}

TEST_CASE("attention agrees with double precision on random shapes", "[attention]") {
  CounterRandom random(kSeed, 3);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random.next_below(bound)); };
  for (int i = 0; i < 12; ++i) {
    Case test{.kv_heads = 1 + below(3), .head_dim = 1 + below(40), .unused_tokens = below(4)};
    test.heads = test.kv_heads * (1 + below(7));
    const int64_t sequences = below(5);
    for (int64_t s = 0; s < sequences; ++s) {
      test.lengths.push_back(static_cast<int32_t>(below(2) * below(200)));
    }
    test.dtype = below(3) == 0 ? DType::kF32 : DType::kBf16;
    check(test);
  }
}

TEST_CASE("attention's bits do not depend on the number of threads", "[attention]") {
  // Else no more threads than cores.
  const tbb::global_control more_threads(tbb::global_control::max_allowed_parallelism, 3);
  const Case test{.heads = 8,
                  .kv_heads = 2,
                  .head_dim = 32,
                  .lengths = {150, 3, 290, 1, 64},
                  .unused_tokens = 2};
  Tensors one(test);
  one.run(test, 1);
  for (const int threads : {2, 3}) {
    for (int repeat = 0; repeat < 3; ++repeat) {
      Tensors many(test);
      many.run(test, threads);
      CHECK(many.out == one.out);
      CHECK(many.dqkv == one.dqkv);
      CHECK(many.log_sum_exp == one.log_sum_exp);
    }
  }
}

TEST_CASE("a token affects no token before it and no other sequence", "[attention]") {
  const Case test{.heads = 4, .kv_heads = 2, .head_dim = 16, .lengths = {40, 200, 30}};
  Tensors before(test);
  before.run(test, 2);
  const int64_t changed = 40 + GENERATE(0, 1, 63, 64, 127, 128, 199);
  Tensors after(test);
  for (int64_t i = 0; i < test.width(); ++i) {
    after.qkv.set(changed * test.width() + i, 30.0F);
  }
  after.run(test, 2);
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

TEST_CASE("attention keeps large scores apart", "[attention]") {
  // Scores of several hundred: exp of them would overflow without the maximum taken off.
  const Case test{.heads = 2, .head_dim = 64, .lengths = {200}, .dtype = DType::kF32};
  Tensors tensors(test);
  for (int64_t i = 0; i < tensors.qkv.size(); ++i) {
    if (i % test.width() < test.v_offset()) {
      tensors.qkv.set(i, static_cast<float>(8 * tensors.qkv[i]));
    }
  }
  tensors.run(test, 2);
  const Reference expected = reference(test, tensors);
  CHECK(wrong_elements(tensors.out, expected.out) == 0);
  CHECK(wrong_elements(tensors.dqkv, expected.dqkv) == 0);
}

TEST_CASE("attention without tokens, sequences or keys", "[attention]") {
  check({.lengths = {}, .unused_tokens = 0});
  check({.lengths = {}, .unused_tokens = 5});
  check({.lengths = {0, 0}, .unused_tokens = 5});
}

}  // namespace
}  // namespace strata::gpu
