#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/parallel.h"
#include "gpu/host/attention_rows.h"
#include "gpu/host/chunks.h"
#include "gpu/host/kernels.h"
#include "gpu/host/serial_gemm.h"

// Queries are taken in blocks of positions. The query heads of one key head make up consecutive
// rows of a block, so that they share its copies of keys and values, and the rows that see a block
// of keys are the last ones. Rows and keys of blocks are dense copies, padded with zeros to
// multiples of 64: few shapes to compile, and the faster kernels of serial_gemm.h.

namespace strata::gpu::host {
namespace {

/// Rows of a query block, and keys of a key block. Of 128 to 512 x 64 to 256, these are within a
/// few percent of the best at head_dim 64 and 128: smaller ones copy more, larger ones compute more
/// of what causality hides.
constexpr int64_t kQueryRows = 256;
constexpr int64_t kKeys = 128;
constexpr int64_t kRowMultiple = 64;
static_assert(kKeys % kKeyMultiple == 0);

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

/// What both directions know of the call.
struct Geometry {
  explicit Geometry(const AttentionArgs& args)
      : group(args.kv_heads > 0 ? args.heads / args.kv_heads : 0),
        head_dim(args.head_dim),
        element_bytes(static_cast<int64_t>(size_of(args.dtype))),
        positions(std::max<int64_t>(1, kQueryRows / std::max<int64_t>(1, group))),
        rows(round_up(std::min(positions, args.max_sequence) * group, kRowMultiple)),
        keys(std::min(kKeys, round_up(args.max_sequence, kKeyMultiple))),
        padded_sequence(round_up(args.max_sequence, kKeyMultiple)) {}

  [[nodiscard]] int64_t blocks_of(int64_t length) const { return ceil_div(length, positions); }
  [[nodiscard]] size_t bytes(int64_t elements) const {
    return static_cast<size_t>(elements * element_bytes);
  }

  int64_t group;  // query heads of a key head
  int64_t head_dim;
  int64_t element_bytes;
  int64_t positions;  // of a query block
  int64_t rows;       // of the largest query block, padded
  int64_t keys;       // of the largest key block, padded
  int64_t padded_sequence;
};

/// Hands out parts of a thread's scratch memory; from a null start, adds up their sizes.
class Carver {
 public:
  explicit Carver(std::byte* start) : start_(start) {}

  template <class T>
  T* take(int64_t count, size_t element_bytes = sizeof(T)) {
    std::byte* part = start_ == nullptr ? nullptr : start_ + used_bytes_;
    used_bytes_ += align_up(static_cast<size_t>(count) * element_bytes, 64);
    return reinterpret_cast<T*>(part);
  }
  std::byte* take_bytes(size_t size_bytes) {
    return take<std::byte>(static_cast<int64_t>(size_bytes));
  }
  [[nodiscard]] size_t used_bytes() const { return used_bytes_; }

 private:
  std::byte* start_;
  size_t used_bytes_ = 0;
};

/// A query block with what is kept for each of its rows.
struct ForwardScratch {
  ForwardScratch(const Geometry& g, std::byte* start) {
    Carver carver(start);
    q = carver.take_bytes(g.bytes(g.rows * g.head_dim));
    k = carver.take_bytes(g.bytes(g.keys * g.head_dim));
    v = carver.take_bytes(g.bytes(g.keys * g.head_dim));
    probabilities = carver.take_bytes(g.bytes(g.rows * g.keys));
    scores = carver.take<float>(g.rows * g.keys);
    sums = carver.take<float>(g.rows * g.head_dim);
    softmax = carver.take<OnlineSoftmax>(g.rows);
    used_bytes = carver.used_bytes();
  }

  std::byte *q, *k, *v;      // [rows or keys, head_dim]
  std::byte* probabilities;  // [rows, keys]
  float* scores;             // [rows, keys]
  float* sums;               // [rows, head_dim], of weighted values
  OnlineSoftmax* softmax;    // [rows]
  size_t used_bytes;
};

/// A whole sequence of one key head, and a query block.
struct BackwardScratch {
  BackwardScratch(const Geometry& g, std::byte* start) {
    Carver carver(start);
    k = carver.take_bytes(g.bytes(g.padded_sequence * g.head_dim));
    v = carver.take_bytes(g.bytes(g.padded_sequence * g.head_dim));
    dk = carver.take<float>(g.padded_sequence * g.head_dim);
    dv = carver.take<float>(g.padded_sequence * g.head_dim);
    q = carver.take_bytes(g.bytes(g.rows * g.head_dim));
    dout = carver.take_bytes(g.bytes(g.rows * g.head_dim));
    dq = carver.take<float>(g.rows * g.head_dim);
    rounded = carver.take_bytes(g.bytes(g.rows * g.keys));
    probabilities = carver.take<float>(g.rows * g.keys);
    gradients = carver.take<float>(g.rows * g.keys);
    log_sum_exp = carver.take<float>(g.rows);
    delta = carver.take<float>(g.rows);
    used_bytes = carver.used_bytes();
  }

  std::byte *k, *v;                  // [padded_sequence, head_dim]
  float *dk, *dv;                    // [padded_sequence, head_dim]
  std::byte *q, *dout;               // [rows, head_dim]
  float* dq;                         // [rows, head_dim]
  std::byte* rounded;                // [rows, keys]: probabilities, then gradients of scores
  float *probabilities, *gradients;  // [rows, keys]
  float *log_sum_exp, *delta;        // [rows]
  size_t used_bytes;
};

/// One kind of product for every size of block: multiples of 64 rows and keys.
class BlockGemms {
 public:
  template <class ShapeOf>
  BlockGemms(const Geometry& g, ShapeOf shape_of) : key_sizes_(g.keys / kKeyMultiple) {
    for (int64_t rows = kRowMultiple; rows <= g.rows; rows += kRowMultiple) {
      for (int64_t keys = kKeyMultiple; keys <= g.keys; keys += kKeyMultiple) {
        gemms_.push_back(SerialGemm::find(shape_of(rows, keys)));
      }
    }
  }

  [[nodiscard]] const SerialGemm& of(int64_t rows, int64_t keys) const {
    return gemms_[static_cast<size_t>((rows / kRowMultiple - 1) * key_sizes_ + keys / kKeyMultiple -
                                      1)];
  }

 private:
  int64_t key_sizes_;
  std::vector<SerialGemm> gemms_;
};

/// [rows, keys] = [rows, head_dim] * [keys, head_dim]^T: scores, and gradients of probabilities.
BlockGemms score_gemms(const Geometry& g, DType dtype) {
  return BlockGemms(g, [&](int64_t rows, int64_t keys) {
    return GemmShape{.m = rows,
                     .n = keys,
                     .k = g.head_dim,
                     .dtype = dtype,
                     .c_dtype = DType::kF32,
                     .transpose_b = true,
                     .a_stride = g.head_dim,
                     .b_stride = g.head_dim,
                     .c_stride = keys};
  });
}

/// [rows, head_dim] (+)= [rows, keys] * [keys, head_dim]: out and dq.
BlockGemms query_gemms(const Geometry& g, DType dtype, bool accumulate) {
  return BlockGemms(g, [&](int64_t rows, int64_t keys) {
    return GemmShape{.m = rows,
                     .n = g.head_dim,
                     .k = keys,
                     .dtype = dtype,
                     .c_dtype = DType::kF32,
                     .accumulate = accumulate,
                     .a_stride = keys,
                     .b_stride = g.head_dim,
                     .c_stride = g.head_dim};
  });
}

/// [keys, head_dim] += [rows, keys]^T * [rows, head_dim]: dk and dv.
BlockGemms key_gemms(const Geometry& g, DType dtype) {
  return BlockGemms(g, [&](int64_t rows, int64_t keys) {
    return GemmShape{.m = keys,
                     .n = g.head_dim,
                     .k = rows,
                     .dtype = dtype,
                     .c_dtype = DType::kF32,
                     .transpose_a = true,
                     .accumulate = true,
                     .a_stride = keys,
                     .b_stride = g.head_dim,
                     .c_stride = g.head_dim};
  });
}

/// A sequence and the tensors of its tokens.
struct Sequence {
  int64_t first_token = 0;
  int64_t length = 0;
};

Sequence sequence_of(const AttentionArgs& args, int64_t index) {
  const int64_t first = args.sequence_offsets[index];
  const int64_t end = args.sequence_offsets[index + 1];
  STRATA_CHECK(0 <= first && first <= end && end <= args.tokens && end - first <= args.max_sequence,
               "sequence offsets must ascend within the tokens, by no more than max_sequence");
  return {.first_token = first, .length = end - first};
}

/// Copies `positions` rows of `width` elements to dense ones, and zeros up to `padded_elements`.
void gather(const void* from, int64_t stride, int64_t positions, int64_t width,
            int64_t padded_elements, const Geometry& g, std::byte* to) {
  const auto* source = static_cast<const std::byte*>(from);
  for (int64_t i = 0; i < positions; ++i) {
    std::memcpy(to + g.bytes(i * width), source + g.bytes(i * stride), g.bytes(width));
  }
  std::memset(to + g.bytes(positions * width), 0, g.bytes(padded_elements - positions * width));
}

/// Rounds `positions` dense rows of `width` to rows of `stride`.
void scatter(const float* from, int64_t positions, int64_t width, DType dtype, void* to,
             int64_t stride, const Geometry& g) {
  for (int64_t i = 0; i < positions; ++i) {
    scale_row(width, 1.0F, from + i * width, dtype,
              static_cast<std::byte*>(to) + g.bytes(i * stride));
  }
}

template <class Pointer>
Pointer* offset(Pointer* base, int64_t elements, const Geometry& g) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const std::byte, std::byte>;
  return static_cast<Byte*>(base) + g.bytes(elements);
}

/// The query block `index` of a sequence and a key head.
struct QueryBlock {
  QueryBlock(const Geometry& g, const Sequence& sequence, int64_t kv_head, int64_t index)
      : first_position(index * g.positions),
        positions(std::min(g.positions, sequence.length - first_position)),
        used_rows(positions * g.group),
        rows(round_up(used_rows, kRowMultiple)),
        first_token(sequence.first_token + first_position),
        first_head(kv_head * g.group) {}

  int64_t first_position, positions, used_rows, rows;
  int64_t first_token, first_head;
};

/// The part of a query block that sees the key block from `first_key` on: its last rows.
ScoreBlock score_block(const Geometry& g, const AttentionArgs& args, const QueryBlock& block,
                       int64_t first_key) {
  const int64_t positions_before = std::max<int64_t>(0, first_key - block.first_position);
  const int64_t first_row = positions_before * g.group / kRowMultiple * kRowMultiple;
  const int64_t end = block.first_position + block.positions;
  return {.rows = block.rows - first_row,
          .keys = std::min(g.keys, round_up(end - first_key, kKeyMultiple)),
          .first_row = first_row,
          .used_rows = block.used_rows,
          .group = g.group,
          .first_position = block.first_position,
          .first_key = first_key,
          .scale = args.scale,
          .dtype = args.dtype};
}

class Forward {
 public:
  explicit Forward(const AttentionArgs& args)
      : args_(args),
        g_(args),
        score_(score_gemms(g_, args.dtype)),
        weigh_(query_gemms(g_, args.dtype, false)),
        weigh_more_(query_gemms(g_, args.dtype, true)) {}

  void run(const Sequence& sequence, int64_t kv_head, int64_t index, std::byte* scratch) const {
    const ForwardScratch s(g_, scratch);
    const QueryBlock block(g_, sequence, kv_head, index);
    const int64_t d = g_.head_dim;
    gather(offset(args_.q, block.first_token * args_.qkv_stride + block.first_head * d, g_),
           args_.qkv_stride, block.positions, g_.group * d, block.rows * d, g_, s.q);
    std::fill_n(s.softmax, block.rows,
                OnlineSoftmax{.max = -std::numeric_limits<float>::infinity(), .sum = 0});

    const int64_t end = block.first_position + block.positions;
    for (int64_t first_key = 0; first_key < end; first_key += g_.keys) {
      const ScoreBlock scores = score_block(g_, args_, block, first_key);
      const int64_t token = sequence.first_token + first_key;
      const int64_t from = token * args_.qkv_stride + kv_head * d;
      const int64_t keys = std::min(g_.keys, end - first_key);
      gather(offset(args_.k, from, g_), args_.qkv_stride, keys, d, scores.keys * d, g_, s.k);
      gather(offset(args_.v, from, g_), args_.qkv_stride, keys, d, scores.keys * d, g_, s.v);
      float* sums = s.sums + scores.first_row * d;
      score_.of(scores.rows, scores.keys).run(offset(s.q, scores.first_row * d, g_), s.k, s.scores);
      softmax_block(scores, s.scores, s.softmax + scores.first_row, sums, d, s.probabilities);
      // The first block, which all rows see, sets the sums.
      (first_key == 0 ? weigh_ : weigh_more_)
          .of(scores.rows, scores.keys)
          .run(s.probabilities, s.v, sums);
    }

    for (int64_t row = 0; row < block.used_rows; ++row) {
      const int64_t token = block.first_token + row / g_.group;
      const int64_t head = block.first_head + row % g_.group;
      const OnlineSoftmax& softmax = s.softmax[row];
      scale_row(d, 1.0F / softmax.sum, s.sums + row * d, args_.dtype,
                offset(args_.out, (token * args_.heads + head) * d, g_));
      args_.log_sum_exp[head * args_.tokens + token] = softmax.max + std::log(softmax.sum);
    }
  }

 private:
  const AttentionArgs args_;
  const Geometry g_;
  const BlockGemms score_, weigh_, weigh_more_;
};

class Backward {
 public:
  explicit Backward(const AttentionBackwardArgs& args)
      : args_(args),
        forward_(args.forward),
        g_(args.forward),
        score_(score_gemms(g_, forward_.dtype)),
        to_query_(query_gemms(g_, forward_.dtype, false)),
        to_query_more_(query_gemms(g_, forward_.dtype, true)),
        to_keys_(key_gemms(g_, forward_.dtype)) {}

  /// All gradients of one key head in one sequence, query blocks in order.
  void run(const Sequence& sequence, int64_t kv_head, std::byte* scratch) const {
    const BackwardScratch s(g_, scratch);
    const int64_t d = g_.head_dim;
    const int64_t padded = round_up(sequence.length, kKeyMultiple) * d;
    const int64_t from = sequence.first_token * forward_.qkv_stride + kv_head * d;
    gather(offset(forward_.k, from, g_), forward_.qkv_stride, sequence.length, d, padded, g_, s.k);
    gather(offset(forward_.v, from, g_), forward_.qkv_stride, sequence.length, d, padded, g_, s.v);
    std::fill_n(s.dk, padded, 0.0F);
    std::fill_n(s.dv, padded, 0.0F);

    for (int64_t i = 0; i < g_.blocks_of(sequence.length); ++i) {
      add_block(QueryBlock(g_, sequence, kv_head, i), s);
    }

    const int64_t to = sequence.first_token * args_.dqkv_stride + kv_head * d;
    scatter(s.dk, sequence.length, d, forward_.dtype, offset(args_.dk, to, g_), args_.dqkv_stride,
            g_);
    scatter(s.dv, sequence.length, d, forward_.dtype, offset(args_.dv, to, g_), args_.dqkv_stride,
            g_);
  }

 private:
  void load_block(const QueryBlock& block, const BackwardScratch& s) const {
    const int64_t d = g_.head_dim;
    const int64_t width = g_.group * d;
    const int64_t padded = block.rows * d;
    const int64_t dense = (block.first_token * forward_.heads + block.first_head) * d;
    gather(offset(forward_.q, block.first_token * forward_.qkv_stride + block.first_head * d, g_),
           forward_.qkv_stride, block.positions, width, padded, g_, s.q);
    gather(offset(args_.dout, dense, g_), forward_.heads * d, block.positions, width, padded, g_,
           s.dout);
    for (int64_t row = 0; row < block.used_rows; ++row) {
      const int64_t token = block.first_token + row / g_.group;
      const int64_t head = block.first_head + row % g_.group;
      s.log_sum_exp[row] = forward_.log_sum_exp[head * forward_.tokens + token];
      s.delta[row] = dot_row(d, forward_.dtype, offset(s.dout, row * d, g_),
                             offset(forward_.out, (token * forward_.heads + head) * d, g_));
    }
    std::fill(s.log_sum_exp + block.used_rows, s.log_sum_exp + block.rows, 0.0F);
    std::fill(s.delta + block.used_rows, s.delta + block.rows, 0.0F);
  }

  /// Writes dq of a query block and adds its part to dk and dv.
  void add_block(const QueryBlock& block, const BackwardScratch& s) const {
    const int64_t d = g_.head_dim;
    load_block(block, s);
    const int64_t end = block.first_position + block.positions;
    for (int64_t first_key = 0; first_key < end; first_key += g_.keys) {
      const ScoreBlock scores = score_block(g_, forward_, block, first_key);
      const int64_t row = scores.first_row;
      const std::byte* q = offset(s.q, row * d, g_);
      const std::byte* dout = offset(s.dout, row * d, g_);
      const std::byte* k = offset(s.k, first_key * d, g_);
      const std::byte* v = offset(s.v, first_key * d, g_);
      const SerialGemm& score = score_.of(scores.rows, scores.keys);
      const SerialGemm& to_keys = to_keys_.of(scores.rows, scores.keys);

      score.run(q, k, s.probabilities);
      recompute_softmax_block(scores, s.log_sum_exp + row, s.probabilities, s.rounded);
      to_keys.run(s.rounded, dout, s.dv + first_key * d);
      score.run(dout, v, s.gradients);
      softmax_gradient_block(scores, s.probabilities, s.gradients, s.delta + row, s.rounded);
      to_keys.run(s.rounded, q, s.dk + first_key * d);
      (first_key == 0 ? to_query_ : to_query_more_)
          .of(scores.rows, scores.keys)
          .run(s.rounded, k, s.dq + row * d);
    }
    scatter(s.dq, block.positions, g_.group * d, forward_.dtype,
            offset(args_.dq, block.first_token * args_.dqkv_stride + block.first_head * d, g_),
            args_.dqkv_stride, g_);
  }

  const AttentionBackwardArgs args_;
  const AttentionArgs& forward_ = args_.forward;
  const Geometry g_;
  const BlockGemms score_, to_query_, to_query_more_, to_keys_;
};

/// The first token after all sequences.
int64_t tokens_used(const AttentionArgs& args) {
  return args.sequences > 0 ? args.sequence_offsets[args.sequences] : 0;
}

/// Zeros `width` elements of each row of tokens in no sequence.
void zero_unused(const AttentionArgs& args, void* rows, int64_t stride, int64_t width,
                 const Geometry& g) {
  for (int64_t token = tokens_used(args); token < args.tokens; ++token) {
    std::memset(offset(rows, token * stride, g), 0, g.bytes(width));
  }
}

bool is_empty(const AttentionArgs& args) {
  return args.tokens == 0 || args.heads == 0 || args.head_dim == 0;
}

/// Inside the arena, where a thread's index says which scratch is its own.
std::byte* scratch_of_this_thread(void* scratch, size_t thread_bytes) {
  const int thread = tbb::this_task_arena::current_thread_index();
  return static_cast<std::byte*>(scratch) + static_cast<size_t>(thread) * thread_bytes;
}

}  // namespace

size_t attention_scratch_bytes(const AttentionArgs& args, int threads) {
  return ForwardScratch(Geometry(args), nullptr).used_bytes * static_cast<size_t>(threads);
}

void attention(const AttentionArgs& args, tbb::task_arena& arena) {
  if (is_empty(args)) return;
  const Geometry g(args);
  for (int64_t head = 0; head < args.heads; ++head) {
    float* row = args.log_sum_exp + head * args.tokens;
    std::fill(row + tokens_used(args), row + args.tokens, 0.0F);
  }
  zero_unused(args, args.out, args.heads * args.head_dim, args.heads * args.head_dim, g);
  if (args.max_sequence == 0) return;

  const size_t thread_bytes = attention_scratch_bytes(args, 1);
  const Forward forward(args);
  for_each_index(arena, args.sequences * args.kv_heads, [&](int64_t task) {
    const Sequence sequence = sequence_of(args, task / args.kv_heads);
    const int64_t blocks = g.blocks_of(sequence.length);
    for_each_index(arena, blocks, [&](int64_t i) {
      // The last blocks see the most keys: they go first, for threads to end at about one time.
      forward.run(sequence, task % args.kv_heads, blocks - 1 - i,
                  scratch_of_this_thread(args.scratch, thread_bytes));
    });
  });
}

size_t attention_backward_scratch_bytes(const AttentionBackwardArgs& args, int threads) {
  return BackwardScratch(Geometry(args.forward), nullptr).used_bytes * static_cast<size_t>(threads);
}

void attention_backward(const AttentionBackwardArgs& args, tbb::task_arena& arena) {
  const AttentionArgs& forward = args.forward;
  if (is_empty(forward)) return;
  const Geometry g(forward);
  zero_unused(forward, args.dq, args.dqkv_stride, forward.heads * forward.head_dim, g);
  zero_unused(forward, args.dk, args.dqkv_stride, forward.kv_heads * forward.head_dim, g);
  zero_unused(forward, args.dv, args.dqkv_stride, forward.kv_heads * forward.head_dim, g);
  if (forward.max_sequence == 0) return;

  const size_t thread_bytes = attention_backward_scratch_bytes(args, 1);
  const Backward backward(args);
  for_each_index(arena, forward.sequences * forward.kv_heads, [&](int64_t task) {
    backward.run(sequence_of(forward, task / forward.kv_heads), task % forward.kv_heads,
                 scratch_of_this_thread(forward.scratch, thread_bytes));
  });
}

}  // namespace strata::gpu::host
