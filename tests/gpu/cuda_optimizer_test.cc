// The CUDA kernels that work element by element: add, cast, the end of a gradient's accumulation
// and AdamW, the last two to cpu_adam's bits.
#include <oneapi/tbb/task_arena.h>

#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "cpu_adam/adam.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda_memory.h"

namespace strata::gpu::cuda {
namespace {

constexpr uint64_t kSeed = 0xada;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Around groups of 8, blocks of 256 x 8 and of 256 x 32.
constexpr int64_t kCounts[] = {0, 1, 7, 8, 9, 100, 2047, 2048, 2049, 8191, 8192, 8193, 20003};

TEST_CASE("cuda add is the sum rounded once, also in place", "[cuda]") {
  if (!have_device()) return;
  const TestStream stream;
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 1);
    for (const int64_t count : kCounts) {
      for (const int64_t offset : {0, 1}) {
        INFO(count << " of " << name_of(dtype) << ", misaligned by " << offset);
        const Tensor a = Tensor::normal(dtype, count, random);
        const Tensor b = Tensor::normal(dtype, count, random);
        Tensor expected(dtype, count);
        for (int64_t i = 0; i < count; ++i) expected.set(i, a[i] + b[i]);
        enum class Out { kA, kB, kSeparate };
        for (const Out where : {Out::kA, Out::kB, Out::kSeparate}) {
          const Tensor sum = in_every_lane_order([&] {
            const DeviceMemory a_(a, offset);
            const DeviceMemory b_(b);
            const DeviceMemory separate(a.bytes().size());
            const DeviceMemory& out = where == Out::kA ? a_ : where == Out::kB ? b_ : separate;
            add({.count = count, .dtype = dtype, .a = a_.data(), .b = b_.data(), .out = out.data()},
                stream.handle());
            stream.synchronize();
            return out.download(dtype);
          });
          const bool same = sum == expected;
          REQUIRE(same);
        }
      }
    }
  }
}

/// Random bit patterns, and those where rounding to bf16 changes its ways.
Tensor all_sorts_of_floats(int64_t count, CounterRandom& random) {
  constexpr uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x00000001, 0x00008000, 0x00008001,
                                   0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7f7fff,
                                   0x7f7f8000, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7f800001,
                                   0xff80ffff, 0x7fc00000, 0x7fffffff, 0xffffffff};
  Tensor tensor(DType::kF32, count);
  for (int64_t i = 0; i < count; ++i) {
    const auto special = random.next_below(2) == 0;
    tensor.set(i, std::bit_cast<float>(special ? kSpecial[random.next_below(std::size(kSpecial))]
                                               : static_cast<uint32_t>(random.next_u64())));
  }
  return tensor;
}

TEST_CASE("cuda cast converts every bit pattern as to_bf16 and to_float do", "[cuda]") {
  if (!have_device()) return;
  const TestStream stream;
  CounterRandom random(kSeed, 2);
  for (const DType in_dtype : kDTypes) {
    for (const DType out_dtype : kDTypes) {
      for (const int64_t count : kCounts) {
        for (const int64_t offset : {0, 1}) {
          INFO(count << " of " << name_of(in_dtype) << " to " << name_of(out_dtype));
          const Tensor sorts = all_sorts_of_floats(count, random);
          Tensor in(in_dtype, count);
          Tensor expected(out_dtype, count);
          for (int64_t i = 0; i < count; ++i) {
            in.set(i, sorts[i]);
            expected.set(i, in[i]);
          }
          const Tensor out = in_every_lane_order([&] {
            const DeviceMemory in_(in, offset);
            const DeviceMemory out_(expected.bytes().size());
            cast({.count = count,
                  .in_dtype = in_dtype,
                  .out_dtype = out_dtype,
                  .in = in_.data(),
                  .out = out_.data()},
                 stream.handle());
            stream.synchronize();
            return out_.download(out_dtype);
          });
          int64_t wrong = -1;
          for (int64_t i = 0; i < count; ++i) {
            // Which NaN is the hardware's business.
            const bool same = std::isnan(expected[i]) ? std::isnan(out[i])
                                                      : std::bit_cast<uint32_t>(expected[i]) ==
                                                            std::bit_cast<uint32_t>(out[i]);
            if (!same) wrong = i;
          }
          REQUIRE(wrong < 0);
        }
      }
    }
  }
}

struct Finished {
  Tensor gradient;
  double sum_of_squares = 0;
  bool operator==(const Finished& other) const {
    return gradient == other.gradient &&
           std::bit_cast<uint64_t>(sum_of_squares) == std::bit_cast<uint64_t>(other.sum_of_squares);
  }
};

Finished run_finish_gradient(const Tensor& accumulated, DType dtype, int64_t offset,
                             const TestStream& stream) {
  const DeviceMemory accumulated_(accumulated, offset);
  const DeviceMemory gradient(index(accumulated.count()) * size_of(dtype));
  const DeviceMemory sum(sizeof(double));
  FinishGradientArgs args{.count = accumulated.count(),
                          .gradient_dtype = dtype,
                          .accumulated = accumulated_.data<float>(),
                          .gradient = gradient.data(),
                          .sum_of_squares = sum.data<double>()};
  const DeviceMemory scratch(finish_gradient_scratch_bytes(args));
  args.scratch = scratch.data();
  finish_gradient(args, stream.handle());
  stream.synchronize();
  return {gradient.download(dtype), sum.download<double>()[0]};
}

TEST_CASE("cuda finish_gradient rounds and sums squares to cpu_adam's bits", "[cuda]") {
  if (!have_device()) return;
  const TestStream stream;
  tbb::task_arena arena(1);
  for (const DType dtype : kDTypes) {
    CounterRandom random(kSeed, 3);
    // Around lanes, tiles of 4096, parts of 32768 elements.
    for (const int64_t count : {0, 1, 15, 16, 17, 4095, 4096, 4097, 32767, 32768, 32769, 70001}) {
      for (const int64_t offset : {0, 1}) {
        if (offset == 1 && count > 5000) continue;
        INFO(count << " of " << name_of(dtype) << ", misaligned by " << offset);
        const Tensor accumulated = Tensor::normal(DType::kF32, count, random);
        Tensor expected(dtype, count);
        for (int64_t i = 0; i < count; ++i) expected.set(i, accumulated[i]);
        const Finished result = in_every_lane_order(
            [&] { return run_finish_gradient(accumulated, dtype, offset, stream); });
        const bool same = result.gradient == expected;
        REQUIRE(same);
        const double sum = cpu_adam::sum_of_squares(arena, expected.bytes().data(), dtype, count);
        REQUIRE(std::bit_cast<uint64_t>(result.sum_of_squares) == std::bit_cast<uint64_t>(sum));
      }
    }
  }
}

TEST_CASE("cuda finish_gradient has cpu_adam's bits in all 256 parts", "[cuda]") {
  if (!have_device()) return;
  const TestStream stream;
  tbb::task_arena arena(2);
  CounterRandom random(kSeed, 4);
  // Just more than 256 smallest parts, so that the parts grow.
  constexpr int64_t kCount = int64_t{256} * 32768 + 100;
  Tensor accumulated(DType::kF32, kCount);
  for (int64_t i = 0; i < kCount; ++i) {
    accumulated.set(i, static_cast<float>(random.next_below(1 << 20)) * 0x1p-17F - 3);
  }
  Tensor expected(DType::kBf16, kCount);
  for (int64_t i = 0; i < kCount; ++i) expected.set(i, accumulated[i]);
  const Finished result = run_finish_gradient(accumulated, DType::kBf16, 0, stream);
  const bool same = result.gradient == expected;
  REQUIRE(same);
  const double sum = cpu_adam::sum_of_squares(arena, expected.bytes().data(), DType::kBf16, kCount);
  REQUIRE(std::bit_cast<uint64_t>(result.sum_of_squares) == std::bit_cast<uint64_t>(sum));
}

TEST_CASE("cuda finish_gradient shows infinities, NaNs and values beyond bf16", "[cuda]") {
  if (!have_device()) return;
  const TestStream stream;
  for (const DType dtype : kDTypes) {
    for (const int64_t at : {int64_t{0}, int64_t{31}, int64_t{40000}}) {
      Tensor accumulated(DType::kF32, 40001);
      const auto sum = [&](float value) {
        accumulated.set(at, value);
        return run_finish_gradient(accumulated, dtype, 0, stream).sum_of_squares;
      };
      REQUIRE(std::isnan(sum(kNaN)));
      REQUIRE(sum(-kInfinity) == std::numeric_limits<double>::infinity());
      // The largest float rounds to infinity in bf16; its square is finite in double.
      REQUIRE(std::isinf(sum(std::numeric_limits<float>::max())) == (dtype == DType::kBf16));
    }
  }
}

// AdamW

using cpu_adam::MomentFormat;

/// Arrays of a shard and what an update makes of them; what it does not write stays 0xff.
struct AdamState {
  AdamState(DType weight_dtype, MomentFormat format, int64_t count)
      : weight(weight_dtype, count),
        residual(weight_dtype == DType::kBf16 ? index(count) : 0),
        moment1(cpu_adam::moment_bytes(format, count), std::byte{0xff}),
        moment2(moment1) {}
  Tensor weight;
  std::vector<uint16_t> residual;
  std::vector<std::byte> moment1, moment2;
  bool operator==(const AdamState&) const = default;
};

struct AdamCase {
  AdamCase(DType weight_dtype, DType gradient_dtype, MomentFormat moment_format, int64_t count,
           CounterRandom& random)
      : format(moment_format),
        gradient(Tensor::normal(gradient_dtype, count, random)),
        old(weight_dtype, moment_format, count),
        seed(random.next_u64()),
        first_chunk(random.next_below(1000)),
        step(1 + static_cast<int64_t>(random.next_below(1000))) {
    Tensor moment1(DType::kF32, count);
    Tensor moment2(DType::kF32, count);
    for (int64_t i = 0; i < count; ++i) {
      const auto master = static_cast<float>(random.next_normal());
      if (weight_dtype == DType::kBf16) {
        const SplitMaster split = split_master(master);
        old.weight.set(i, to_float(split.weight));
        old.residual[index(i)] = split.residual;
      } else {
        old.weight.set(i, master);
      }
      // Subnormal numbers, zeros and large gradients too.
      const auto size =
          static_cast<float>(std::exp2(static_cast<double>(random.next_below(200)) - 150));
      const auto kind = random.next_below(8);
      if (kind == 0) gradient.set(i, gradient[i] * size);
      if (kind == 1) gradient.set(i, 0);
      if (kind == 2) gradient.set(i, std::numeric_limits<float>::max() / 4);
      moment1.set(i, kind == 3 ? 0 : static_cast<float>(random.next_normal()) * size);
      moment2.set(i, kind == 3 ? 0 : static_cast<float>(random.next_uniform()) * size);
    }
    tbb::task_arena arena(1);
    const auto encode = [&](bool second, const Tensor& from, std::vector<std::byte>& to) {
      cpu_adam::convert_moment(arena, second, count, MomentFormat::kF32, from.bytes().data(),
                               format, to.data());
    };
    encode(false, moment1, old.moment1);
    encode(true, moment2, old.moment2);
  }

  cpu_adam::Shard shard() const {
    return {.count = gradient.count(),
            .weight_dtype = old.weight.dtype(),
            .gradient_dtype = gradient.dtype(),
            .moment_format = format,
            .first_chunk = first_chunk,
            .seed = seed,
            .step = step};
  }

  AdamState reference(const std::vector<cpu_adam::Segment>& segments,
                      const cpu_adam::StepConstants& constants) const {
    AdamState out(old.weight.dtype(), format, gradient.count());
    cpu_adam::Shard s = shard();
    s.gradient = gradient.bytes().data();
    s.weight = old.weight.bytes().data();
    s.residual = old.residual.data();
    s.moment1 = old.moment1.data();
    s.moment2 = old.moment2.data();
    s.weight_out = out.weight.bytes().data();
    s.residual_out = out.residual.data();
    s.moment1_out = out.moment1.data();
    s.moment2_out = out.moment2.data();
    cpu_adam::update_reference(s, segments, constants);
    return out;
  }

  /// On the device, in place or not. In place, the bytes between a moment's codes and scales are
  /// the old ones, 0xff as elsewhere.
  AdamState run(const std::vector<cpu_adam::Segment>& segments,
                const cpu_adam::StepConstants& constants, bool in_place, int64_t offset) const {
    const DeviceMemory gradient_(gradient, offset);
    const DeviceMemory weight(old.weight);
    const DeviceMemory residual(old.residual);
    const DeviceMemory moment1(old.moment1);
    const DeviceMemory moment2(old.moment2);
    const DeviceMemory weight_out(old.weight.bytes().size());
    const DeviceMemory residual_out(old.residual.size() * sizeof(uint16_t));
    const DeviceMemory moment1_out(old.moment1.size());
    const DeviceMemory moment2_out(old.moment2.size());
    AdamArgs args{.shard = shard(),
                  .segments = segments.data(),
                  .segment_count = static_cast<int64_t>(segments.size()),
                  .constants = constants};
    args.shard.gradient = gradient_.data();
    args.shard.weight = weight.data();
    args.shard.residual = residual.data<uint16_t>();
    args.shard.moment1 = moment1.data();
    args.shard.moment2 = moment2.data();
    args.shard.weight_out = (in_place ? weight : weight_out).data();
    args.shard.residual_out = (in_place ? residual : residual_out).data<uint16_t>();
    args.shard.moment1_out = (in_place ? moment1 : moment1_out).data();
    args.shard.moment2_out = (in_place ? moment2 : moment2_out).data();
    adam(args, stream.handle());
    stream.synchronize();
    AdamState out(old.weight.dtype(), format, gradient.count());
    out.weight = (in_place ? weight : weight_out).download(old.weight.dtype());
    out.residual = (in_place ? residual : residual_out).download<uint16_t>();
    out.moment1 = (in_place ? moment1 : moment1_out).download<std::byte>();
    out.moment2 = (in_place ? moment2 : moment2_out).download<std::byte>();
    return out;
  }

  MomentFormat format;
  Tensor gradient;
  AdamState old;
  uint64_t seed, first_chunk;
  int64_t step;
  TestStream stream;
};

cpu_adam::StepConstants constants_of_step(int64_t step, double gradient_scale) {
  return cpu_adam::step_constants({.learning_rate = 3e-3, .weight_decay = 0.1}, step,
                                  gradient_scale);
}

/// Segments of random sizes, some empty, that add up to at least `count`.
std::vector<cpu_adam::Segment> random_segments(int64_t count, int64_t longest,
                                               CounterRandom& random) {
  std::vector<cpu_adam::Segment> segments;
  for (int64_t end = 0; end < count;) {
    const auto length = static_cast<int64_t>(random.next_below(index(longest) + 1));
    segments.push_back({length, random.next_below(2) == 0});
    end += length;
  }
  return segments;
}

template <class Body>
void for_each_types_of_adam(Body body) {
  for (const MomentFormat format : cpu_adam::kMomentFormats) {
    for (const DType weight_dtype : kDTypes) {
      for (const DType gradient_dtype : kDTypes) {
        INFO(name_of(weight_dtype) << " weights, " << name_of(gradient_dtype) << " gradients, "
                                   << cpu_adam::name_of(format) << " moments, seed " << kSeed);
        body(weight_dtype, gradient_dtype, format);
      }
    }
  }
}

TEST_CASE("cuda adam has the bits of cpu_adam::update_reference", "[cuda]") {
  if (!have_device()) return;
  for_each_types_of_adam([](DType weight_dtype, DType gradient_dtype, MomentFormat format) {
    CounterRandom random(kSeed, 5);
    int64_t step = 0;
    std::vector<int64_t> counts(std::begin(kCounts), std::end(kCounts));
    if (format != MomentFormat::kF32) counts.insert(counts.end(), {255, 256, 257, 511, 32769});
    for (const int64_t count : counts) {
      ++step;
      const AdamCase c(weight_dtype, gradient_dtype, format, count, random);
      const auto segments = random_segments(count, count / 3 + 5, random);
      const auto constants = constants_of_step(step, step % 2 == 0 ? 1.0 : 0.37);
      for (const int64_t offset : {0, 1}) {
        if (offset == 1 && count > 10000) continue;
        INFO(count << " in " << segments.size() << " segments, misaligned by " << offset);
        const AdamState updated =
            in_every_lane_order([&] { return c.run(segments, constants, step % 3 == 0, offset); });
        const AdamState expected = c.reference(segments, constants);
        CHECK(updated.weight == expected.weight);
        CHECK(updated.residual == expected.residual);
        CHECK(updated.moment1 == expected.moment1);
        REQUIRE(updated.moment2 == expected.moment2);
      }
    }
  });
}

TEST_CASE("cuda adam finds its way through many short segments", "[cuda]") {
  if (!have_device()) return;
  for_each_types_of_adam([](DType weight_dtype, DType gradient_dtype, MomentFormat format) {
    CounterRandom random(kSeed, 6);
    // More runs than one launch takes, of fewer elements than a thread takes, and few long ones.
    for (const int64_t longest : {1, 3, 20, 700}) {
      const AdamCase c(weight_dtype, gradient_dtype, format, 3001, random);
      const auto segments = random_segments(3001, longest, random);
      const auto constants = constants_of_step(7, 1.0);
      INFO(segments.size() << " segments");
      const bool same = c.run(segments, constants, true, 0) == c.reference(segments, constants);
      REQUIRE(same);
    }
  });
}

TEST_CASE("cuda adam takes segments that alternate from element to element", "[cuda]") {
  if (!have_device()) return;
  for_each_types_of_adam([](DType weight_dtype, DType gradient_dtype, MomentFormat format) {
    CounterRandom random(kSeed, 7);
    // The fullest table: 257 runs reach one element beyond a moment block.
    const AdamCase c(weight_dtype, gradient_dtype, format, 1030, random);
    std::vector<cpu_adam::Segment> segments;
    for (int64_t i = 0; i < 1030; ++i) {
      segments.push_back({1, i % 2 == 1});
      if (i % 5 == 0) segments.push_back({0, true});
    }
    const auto constants = constants_of_step(3, 1.0);
    const bool same = in_every_lane_order([&] { return c.run(segments, constants, true, 0); }) ==
                      c.reference(segments, constants);
    REQUIRE(same);
  });
}

TEST_CASE("cuda adam starts from cleared moments", "[cuda]") {
  if (!have_device()) return;
  for_each_types_of_adam([](DType weight_dtype, DType gradient_dtype, MomentFormat format) {
    CounterRandom random(kSeed, 8);
    AdamCase c(weight_dtype, gradient_dtype, format, 777, random);
    c.old.moment1.assign(c.old.moment1.size(), std::byte{0});
    c.old.moment2.assign(c.old.moment2.size(), std::byte{0});
    const std::vector<cpu_adam::Segment> segments{{777, true}};
    const auto constants = constants_of_step(1, 1.0);
    AdamState expected = c.reference(segments, constants);
    const AdamState updated = c.run(segments, constants, false, 0);
    const bool same = updated == expected;
    REQUIRE(same);
  });
}

}  // namespace
}  // namespace strata::gpu::cuda
