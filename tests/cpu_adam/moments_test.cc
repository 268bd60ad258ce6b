// The formats of the moments: layout, ranges, errors, conversions.
#include "cpu_adam/moments.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/adam_fixture.h"

namespace strata::cpu_adam {
namespace {

constexpr uint32_t kAllOnes = 0xffffffffU;

/// Everything about kInt8 that differs between the moments. For moment2 the values are roots.
struct Codec {
  bool second;
  int shift;
  uint32_t largest_code;

  uint8_t encode(float value, uint32_t base, uint32_t random) const {
    return second ? encode_moment2(value, base, random) : encode_moment1(value, base, random);
  }
  float decode(uint8_t code, uint32_t base) const {
    // The root of a rounded square is the number squared.
    return second ? std::sqrt(decode_moment2(code, base)) : decode_moment1(code, base);
  }
  /// From the code below |value| to the one above.
  float step(float value, uint32_t base) const {
    const float above = std::abs(value) + std::bit_cast<float>(base);
    const uint32_t below = std::bit_cast<uint32_t>(above) >> shift << shift;
    return std::bit_cast<float>(below + (1U << shift)) - std::bit_cast<float>(below);
  }
};
constexpr Codec kCodecs[] = {{false, kInt8Shift1, 127}, {true, kInt8Shift2, 255}};

float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

TEST_CASE("chunks of kInt8 moments are contiguous and as long as moment_bytes says") {
  const auto bytes = [](int64_t count) { return moment_bytes(MomentFormat::kInt8, count); };
  CHECK(bytes(0) == 0);
  CHECK(bytes(1) == 320);  // a block, a scale, 63 bytes of padding
  CHECK(bytes(256) == 320);
  CHECK(bytes(257) == 576);
  CHECK(bytes(kChunkElements) == 32768 + 128);
  CHECK(bytes(kChunkElements + 1) == 32768 + 128 + 320);
  CHECK(moment_bytes(MomentFormat::kBf16, 77) == 154);
  CHECK(moment_bytes(MomentFormat::kF32, 77) == 308);
  for (const int64_t count : {int64_t{1}, int64_t{300}, kChunkElements, 3 * kChunkElements + 700}) {
    CAPTURE(count);
    size_t end = 0;
    for (int64_t chunk = 0; chunk * kChunkElements < count; ++chunk) {
      const Int8Chunk at = int8_chunk(count, chunk);
      const int64_t elements = std::min(kChunkElements, count - chunk * kChunkElements);
      const auto blocks = static_cast<size_t>((elements + 255) / 256);
      CHECK(at.codes_bytes == end);
      CHECK(at.scales_bytes == end + blocks * 256);
      end = (at.scales_bytes + blocks + 63) / 64 * 64;
    }
    CHECK(end == bytes(count));
  }
}

TEST_CASE("every kInt8 code at every scale is exact in fp32, and above the last") {
  for (const Codec& codec : kCodecs) {
    for (uint32_t scale = 0; scale <= 190; ++scale) {
      const uint32_t base = int8_base(static_cast<uint8_t>(scale));
      REQUIRE(codec.decode(0, base) == 0);
      for (uint32_t code = 1; code <= codec.largest_code; ++code) {
        const double exact = static_cast<double>(from_bits(base + (code << codec.shift))) -
                             static_cast<double>(from_bits(base));
        const float value = codec.decode(static_cast<uint8_t>(code), base);
        if (value != exact) FAIL("code " << code << ", scale " << scale << ": " << value);
        if (codec.second) {
          const float square = decode_moment2(static_cast<uint8_t>(code), base);
          if (!std::isnormal(square)) FAIL("code " << code << ", scale " << scale);
        } else {
          REQUIRE(codec.decode(static_cast<uint8_t>(code | 0x80U), base) == -value);
        }
        // And comes back, whatever the random bits.
        const uint8_t again = codec.encode(value, base, kAllOnes);
        if (again != code || codec.encode(value, base, 0) != code) FAIL("code " << code);
      }
    }
    CHECK(codec.decode(static_cast<uint8_t>(codec.largest_code), int8_base(0)) > 0);
  }
}

TEST_CASE("a kInt8 scale holds the block's largest, and is hardly ever larger than need be") {
  for (const Codec& codec : kCodecs) {
    const uint32_t boundary = (1U << 23) - (1U << codec.shift) - (1U << 9);
    size_t wrong = 0;
    for (const uint32_t exponent : {1U, 70U, 81U, 82U, 83U, 84U, 100U, 127U, 150U, 188U, 189U}) {
      // Every fraction near the boundary between two scales, and some of the others.
      for (uint32_t fraction = 0; fraction < 1U << 23;) {
        const float largest = from_bits((exponent << 23) + fraction);
        const uint8_t scale = int8_scale(codec.shift, bits_of(largest));
        const uint32_t base = int8_base(scale);
        const auto last = static_cast<uint8_t>(codec.largest_code);
        // Rounded up by all that there is, it still has a code, the next one.
        const float up = codec.decode(codec.encode(largest, base, kAllOnes), base);
        const float down = codec.decode(codec.encode(largest, base, 0), base);
        const float step = codec.step(largest, base);
        const bool holds = largest <= codec.decode(last, base) && up >= down && up <= down + step &&
                           std::abs(up - largest) <= step;
        // The next smaller scale would hold it at most by its own f(0).
        const uint32_t smaller = int8_base(static_cast<uint8_t>(scale - 1));
        const bool least = scale == kInt8SmallestScale ||
                           largest >= codec.decode(last, smaller) - from_bits(smaller);
        wrong += !holds || !least;
        const bool near = fraction + 3000 > boundary && fraction < boundary + 3000;
        fraction += near ? 1 : 997;
      }
    }
    CAPTURE(codec.second);
    CHECK(wrong == 0);
  }
}

TEST_CASE("cleared memory is the moments of a run's beginning") {
  for (const MomentFormat format : kMomentFormats) {
    const State state(70'000, DType::kBf16, format);
    for (const bool second : {false, true}) {
      for (const float value : state.decoded(second)) REQUIRE(bits_of(value) == 0);
    }
  }
}

/// Encodes a block with random bits, and gives it back decoded; moment2 as its root.
std::vector<float> through_block(const Codec& codec, const std::vector<float>& values,
                                 RoundingKey key) {
  std::vector<float> stored = values;
  if (codec.second) {
    for (float& value : stored) value *= value;
  }
  const auto count = static_cast<int64_t>(values.size());
  std::vector<std::byte> bytes(moment_bytes(MomentFormat::kInt8, count));
  store_block(codec.second, count, MomentFormat::kInt8, bytes.data(), 0, stored, &key);
  std::vector<float> decoded(values.size());
  load_elements(codec.second, count, MomentFormat::kInt8, bytes.data(), 0, decoded);
  if (codec.second) {
    for (float& value : decoded) value = std::sqrt(value);
  }
  return decoded;
}

TEST_CASE("blocks of zeros, and of one huge element among small ones") {
  for (const Codec& codec : kCodecs) {
    CAPTURE(codec.second);
    const RoundingKey key = rounding_key(kSeed, 1, 1);
    const float smallest = codec.second ? codec.decode(1, int8_base(0)) : 0;
    for (const float value : through_block(codec, std::vector<float>(256), key)) {
      REQUIRE(value == smallest);
    }
    for (const float huge : {1.0F, 0x1p-40F, 0x1p63F}) {
      std::vector<float> values(256, huge * 0x1p-20F);
      values[77] = huge;
      const std::vector<float> decoded = through_block(codec, values, key);
      const float step = codec.step(0, int8_base(int8_scale(codec.shift, bits_of(huge))));
      size_t zeros = 0;
      for (size_t i = 0; i < 256; ++i) {
        if (i == 77) continue;
        zeros += decoded[i] == 0;
        REQUIRE((decoded[i] == 0 || decoded[i] == step));
      }
      // Below the first code moment1 is there now and then; the denominator of moment2 never is 0.
      CHECK((codec.second ? zeros == 0 : zeros > 50 && zeros < 255));
      CHECK(std::abs(decoded[77] - huge) <
            codec.step(huge, int8_base(int8_scale(codec.shift, bits_of(huge)))));
    }
  }
}

/// How far the mean of many roundings is from the value, in standard errors, and the largest error
/// of one in units of what it may be.
struct Bias {
  double sum = 0, variance = 0, largest = 0;
  /// `below` and `unit`: the grid's value below `exact`, and the distance to the next.
  void add(double rounded, double exact, double below, double unit) {
    const double fraction = (exact - below) / unit;
    sum += (rounded - exact) / unit;
    variance += fraction * (1 - fraction);
    largest = std::max(largest, std::abs(rounded - exact) / unit);
  }
  double standard_errors() const { return variance > 0 ? std::abs(sum) / std::sqrt(variance) : 0; }
};

TEST_CASE("kBf16 rounds without bias, by less than a unit in the last place") {
  constexpr int kKeys = 4096;
  for (const bool second : {false, true}) {
    for (const int exponent : {-130, -126, -40, 0, 40, 60}) {
      Bias all;
      double worst_element = 0;
      CounterRandom random(kSeed, 21);
      for (uint32_t i = 0; i < 256; ++i) {
        float value = random_scale(random, exponent, exponent + 1);
        if (second) value = std::abs(value);
        const float below = from_bits(bits_of(value) & 0xffff0000U);
        const float next = from_bits((bits_of(value) & 0xffff0000U) + 0x10000U);
        Bias element;
        for (int k = 0; k < kKeys; ++k) {
          const uint32_t bits = rounding_bits(rounding_key(kSeed, k, 3), i);
          const uint16_t half =
              second ? to_bf16_moment2(value, bits) : to_bf16_moment1(value, bits);
          const double sign = value < 0 ? -1 : 1;
          element.add(sign * to_float(Bf16{half}), sign * value, sign * below,
                      std::abs(next - below));
        }
        worst_element = std::max(worst_element, element.standard_errors());
        all.sum += element.sum;
        all.variance += element.variance;
        all.largest = std::max(all.largest, element.largest);
      }
      CAPTURE(second, exponent, worst_element, all.standard_errors(), all.largest);
      CHECK(worst_element < 5);
      CHECK(all.standard_errors() < 5);
      CHECK(all.largest < 1);
    }
  }
}

TEST_CASE("kInt8 rounds without bias, by less than a code, down to the range's bottom") {
  constexpr int kKeys = 4096;
  for (const Codec& codec : kCodecs) {
    for (const float largest : {0x1p-43F, 1.9F, 0x1.7p62F}) {
      // Element k is about 2^(-k / 14) of the largest: the last are below the first code.
      std::vector<float> values(256);
      CounterRandom random(kSeed, 22);
      for (size_t k = 0; k < 256; ++k) {
        const double size =
            std::exp2(-static_cast<double>(k) / 14) * (0.95 + 0.05 * random.next_uniform());
        values[k] = static_cast<float>(largest * (k == 0 ? 1 : size));
        if (!codec.second && k % 3 == 1) values[k] = -values[k];
        // What is stored is the square, rounded: its root is the value to be met.
        if (codec.second) values[k] = std::sqrt(values[k] * values[k]);
      }
      const uint32_t base = int8_base(int8_scale(codec.shift, bits_of(largest)));
      std::vector<Bias> elements(256);
      for (int k = 0; k < kKeys; ++k) {
        const std::vector<float> decoded = through_block(codec, values, rounding_key(kSeed, k, 4));
        for (size_t i = 0; i < 256; ++i) {
          const double exact = std::abs(values[i]);
          const double step = codec.step(values[i], base);
          const double above = exact + from_bits(base);
          const double below = std::floor(above / step) * step - from_bits(base);
          const double sign = values[i] < 0 ? -1 : 1;
          elements[i].add(sign * decoded[i], exact, below, step);
        }
      }
      // By sixteenths of the block: magnitudes.
      for (size_t group = 0; group < 16; ++group) {
        Bias all;
        double worst_element = 0;
        for (size_t i = group * 16; i < (group + 1) * 16; ++i) {
          // Below its first code, moment2 is the first code.
          if (codec.second && std::abs(values[i]) < codec.step(0, base)) continue;
          all.sum += elements[i].sum;
          all.variance += elements[i].variance;
          all.largest = std::max(all.largest, elements[i].largest);
          worst_element = std::max(worst_element, elements[i].standard_errors());
        }
        CAPTURE(codec.second, largest, group, worst_element, all.standard_errors(), all.largest);
        CHECK(worst_element < 5);
        CHECK(all.standard_errors() < 5);
        CHECK(all.largest < 1);
      }
    }
  }
}

/// The base of element i's block, of moments with these exact values.
uint32_t base_of_block(const std::vector<float>& values, size_t i, bool second) {
  const size_t begin = i / 256 * 256;
  float largest = 0;
  for (size_t k = begin; k < std::min(begin + 256, values.size()); ++k) {
    largest = std::max(largest, second ? std::sqrt(values[k]) : std::abs(values[k]));
  }
  return int8_base(int8_scale(kCodecs[second].shift, bits_of(largest)));
}

TEST_CASE("a step's stored moments are, on average, those of an exact step") {
  constexpr size_t kCount = 600;
  constexpr int kSeeds = 2000;
  const Values values = values_as_in_training(kCount, 23);
  const Gradient gradient(values.gradient, DType::kF32);
  const Segment segment{kCount, true};
  for (const MomentFormat format : {MomentFormat::kBf16, MomentFormat::kInt8}) {
    State in(values, DType::kBf16, format);
    State exact(values, DType::kBf16, MomentFormat::kF32);
    for (const bool second : {false, true}) exact.set_moment(second, in.decoded(second));
    update_chunk(make_shard(gradient, exact, exact), 0, {&segment, 1}, some_constants());
    const std::vector<float> targets[] = {exact.decoded(false), exact.decoded(true)};
    std::vector<double> sums[] = {std::vector<double>(kCount), std::vector<double>(kCount)};
    std::vector<double> squares[] = {std::vector<double>(kCount), std::vector<double>(kCount)};
    State out(kCount, DType::kBf16, format);
    Shard shard = make_shard(gradient, in, out);
    for (int k = 0; k < kSeeds; ++k) {
      shard.seed = static_cast<uint64_t>(k);
      update_chunk(shard, 0, {&segment, 1}, some_constants());
      for (const bool second : {false, true}) {
        const std::vector<float> decoded = out.decoded(second);
        for (size_t i = 0; i < kCount; ++i) {
          const bool root = second && format == MomentFormat::kInt8;
          const double value = root ? std::sqrt(decoded[i]) : decoded[i];
          const double target = targets[second][i];
          const double error = value - (root ? std::sqrt(target) : target);
          sums[second][i] += error;
          squares[second][i] += error * error;
        }
      }
    }
    for (const bool second : {false, true}) {
      double worst = 0;
      for (size_t i = 0; i < kCount; ++i) {
        // Of values far below the first code none may have been rounded up: one is not many.
        double unit = std::abs(targets[second][i]) / 128;
        if (format == MomentFormat::kInt8) {
          unit = kCodecs[second].step(0, base_of_block(targets[second], i, second));
          if (second && std::sqrt(targets[1][i]) < unit) continue;  // there it is the first code
        }
        worst = std::max(worst,
                         std::abs(sums[second][i]) / std::sqrt(squares[second][i] + unit * unit));
      }
      CAPTURE(name_of(format), second, worst);
      CHECK(worst > 1);
      CHECK(worst < 5);
    }
  }
}

TEST_CASE("moments convert to fp32 and back without loss, and otherwise to nearest") {
  tbb::task_arena one(1);
  tbb::task_arena two(2);
  const auto convert = [&](bool second, const State& in, State& out, tbb::task_arena& arena) {
    convert_moment(arena, second, static_cast<int64_t>(in.count), in.format,
                   in.moment(second).data(), out.format, out.moment(second).data());
  };
  for (const size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{257},
                             size_t{32768}, size_t{70'000}}) {
    const Values values = values_of_any_kind(count, 24);
    const Gradient gradient(values.gradient, DType::kBf16);
    const Segment segment{static_cast<int64_t>(count), true};
    for (const MomentFormat from : kMomentFormats) {
      // What a step leaves: rounded at random, not to nearest.
      State source(values, DType::kBf16, from);
      update(two, make_shard(gradient, source, source), {&segment, 1}, some_constants());
      for (const bool second : {false, true}) {
        CAPTURE(count, name_of(from), second);
        const std::vector<float> exact = source.decoded(second);
        State floats(count, DType::kBf16, MomentFormat::kF32);
        convert(second, source, floats, two);
        const std::vector<float> decoded = floats.decoded(second);
        REQUIRE((count == 0 || std::memcmp(decoded.data(), exact.data(), count * 4) == 0));
        State back(count, DType::kBf16, from);
        convert(second, floats, back, two);
        REQUIRE(back.moment(second).same_bits(source.moment(second)));

        for (const MomentFormat to : kMomentFormats) {
          CAPTURE(name_of(to));
          State target(count, DType::kBf16, to);
          State target_by_one(count, DType::kBf16, to);
          convert(second, source, target, two);
          convert(second, source, target_by_one, one);
          REQUIRE(target.same_bits(target_by_one));
          const std::vector<float> got = target.decoded(second);
          size_t wrong = 0;
          for (size_t block = 0; block < count; block += 256) {
            const Codec& codec = kCodecs[second];
            const uint32_t base = base_of_block(exact, block, second);
            for (size_t i = block; i < std::min(block + 256, count); ++i) {
              if (to == MomentFormat::kF32) {
                wrong += got[i] != exact[i];
              } else if (to == MomentFormat::kBf16) {
                const uint32_t below = bits_of(exact[i]) & 0xffff0000U;
                const float unit = std::abs(from_bits(below + 0x10000U) - from_bits(below));
                wrong += !(std::abs(got[i] - exact[i]) <= unit / 2);
              } else {
                const float value = second ? std::sqrt(exact[i]) : exact[i];
                const float met = second ? std::sqrt(got[i]) : got[i];
                const float step = codec.step(value, base);
                const bool first_code = second && value < step && met == codec.step(0, base);
                wrong += !(std::abs(met - value) <= step * 0.50001F || first_code);
              }
            }
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata::cpu_adam
