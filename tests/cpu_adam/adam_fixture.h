// What the tests of cpu_adam share: SIMD targets, states in every format, values to fill them with,
// and the definition of a step written out a second time.
#pragma once

#include <hwy/highway.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/random.h"
#include "catch.h"
#include "cpu_adam/adam.h"
#include "cpu_adam/definition.h"
#include "cpu_adam/moments.h"

namespace strata::cpu_adam {

inline constexpr uint64_t kSeed = 0x5eed;

/// Makes one SIMD target of this machine the only one while it lives.
class OnlyTarget {
 public:
  explicit OnlyTarget(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  ~OnlyTarget() {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  OnlyTarget(const OnlyTarget&) = delete;
  OnlyTarget& operator=(const OnlyTarget&) = delete;
};

/// Calls body() once for each SIMD target that this build has and this machine can run.
template <class Body>
void for_each_target(const Body& body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    INFO("SIMD target " << hwy::TargetName(target));
    const OnlyTarget only(target);
    body();
  }
}

struct Types {
  DType weight, gradient;
};
inline constexpr Types kAllTypes[] = {{DType::kBf16, DType::kBf16},
                                      {DType::kBf16, DType::kF32},
                                      {DType::kF32, DType::kBf16},
                                      {DType::kF32, DType::kF32}};

/// An array that starts `offset` elements into an allocation of exactly the size needed, so that a
/// sanitizer sees the first element touched beyond it.
template <class T>
class Array {
 public:
  explicit Array(size_t count, size_t offset = 0) : offset_(offset), values_(count + offset) {}
  T* data() { return values_.data() + offset_; }
  const T* data() const { return values_.data() + offset_; }
  T& operator[](size_t i) { return data()[i]; }
  const T& operator[](size_t i) const { return data()[i]; }
  size_t size() const { return values_.size() - offset_; }
  bool same_bits(const Array& other) const {
    return size() == other.size() &&
           (size() == 0 || std::memcmp(data(), other.data(), size() * sizeof(T)) == 0);
  }
  void copy_from(const Array& other) { std::copy_n(other.data(), size(), data()); }

 private:
  size_t offset_;
  std::vector<T> values_;
};

struct Values {
  std::vector<float> master, moment1, moment2, gradient;
  size_t size() const { return master.size(); }
};

/// What a step changes: `count` parameters with moments in `format`. With an offset, each array
/// starts at another one.
struct State {
  State(size_t elements, DType dtype, MomentFormat moments, size_t offset = 0)
      : count(elements),
        weight_dtype(dtype),
        format(moments),
        weight16(dtype == DType::kBf16 ? count : 0, offset),
        residual(dtype == DType::kBf16 ? count : 0, mixed(offset, 3)),
        weight32(dtype == DType::kF32 ? count : 0, offset),
        moment1(moment_bytes(format, static_cast<int64_t>(count)),
                mixed(offset, 5) * element_bytes()),
        moment2(moment_bytes(format, static_cast<int64_t>(count)),
                mixed(offset, 7) * element_bytes()) {}

  State(const Values& values, DType dtype, MomentFormat moments, size_t offset = 0)
      : State(values.size(), dtype, moments, offset) {
    for (size_t i = 0; i < count; ++i) set_master(i, values.master[i]);
    set_moment(false, values.moment1);
    set_moment(true, values.moment2);
  }

  float master(size_t i) const {
    return weight_dtype == DType::kF32 ? weight32[i]
                                       : join_master({Bf16{weight16[i]}, residual[i]});
  }
  void set_master(size_t i, float value) {
    if (weight_dtype == DType::kF32) {
      weight32[i] = value;
    } else {
      weight16[i] = split_master(value).weight.bits;
      residual[i] = split_master(value).residual;
    }
  }
  void* weight() {
    return weight_dtype == DType::kF32 ? static_cast<void*>(weight32.data()) : weight16.data();
  }

  Array<std::byte>& moment(bool second) { return second ? moment2 : moment1; }
  const Array<std::byte>& moment(bool second) const { return second ? moment2 : moment1; }
  /// One moment of all elements, decoded.
  std::vector<float> decoded(bool second) const {
    std::vector<float> values(count);
    load_elements(second, static_cast<int64_t>(count), format, moment(second).data(), 0, values);
    return values;
  }
  /// Encodes, rounding to nearest.
  void set_moment(bool second, std::span<const float> values) {
    for (size_t begin = 0; begin < count; begin += kMomentBlock) {
      const size_t size = std::min(size_t{kMomentBlock}, count - begin);
      store_block(second, static_cast<int64_t>(count), format, moment(second).data(),
                  static_cast<int64_t>(begin), values.subspan(begin, size), nullptr);
    }
  }
  bool same_bits(const State& other) const {
    return weight16.same_bits(other.weight16) && residual.same_bits(other.residual) &&
           weight32.same_bits(other.weight32) && moment1.same_bits(other.moment1) &&
           moment2.same_bits(other.moment2);
  }
  /// The same values, in arrays that keep their offsets.
  void copy_from(const State& other) {
    weight16.copy_from(other.weight16);
    residual.copy_from(other.residual);
    weight32.copy_from(other.weight32);
    moment1.copy_from(other.moment1);
    moment2.copy_from(other.moment2);
  }

  size_t count;
  DType weight_dtype;
  MomentFormat format;
  Array<uint16_t> weight16, residual;
  Array<float> weight32;
  Array<std::byte> moment1, moment2;

 private:
  static size_t mixed(size_t offset, size_t factor) {
    return offset == 0 ? 0 : (offset * factor + 1) % 16;
  }
  size_t element_bytes() const { return moment_bytes(MomentFormat::kF32, 1) >> unsigned(format); }
};

struct Gradient {
  Gradient(size_t count, DType type, size_t offset = 0)
      : dtype(type),
        values16(type == DType::kBf16 ? count : 0, offset),
        values32(type == DType::kF32 ? count : 0, offset) {}
  Gradient(const std::vector<float>& values, DType type, size_t offset = 0)
      : Gradient(values.size(), type, offset) {
    for (size_t i = 0; i < values.size(); ++i) set(i, values[i]);
  }
  void set(size_t i, float value) {
    if (dtype == DType::kF32) {
      values32[i] = value;
    } else {
      // Not to nearest: the largest fp32 value must stay finite.
      values16[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
  }
  float operator[](size_t i) const {
    return dtype == DType::kF32 ? values32[i] : to_float(Bf16{values16[i]});
  }
  const void* data() const {
    return dtype == DType::kF32 ? static_cast<const void*>(values32.data()) : values16.data();
  }

  DType dtype;
  Array<uint16_t> values16;
  Array<float> values32;
};

inline Shard make_shard(const Gradient& gradient, State& in, State& out) {
  return {.count = static_cast<int64_t>(in.count),
          .weight_dtype = in.weight_dtype,
          .gradient_dtype = gradient.dtype,
          .moment_format = in.format,
          .gradient = gradient.data(),
          .weight = in.weight(),
          .residual = in.residual.data(),
          .moment1 = in.moment1.data(),
          .moment2 = in.moment2.data(),
          .weight_out = out.weight(),
          .residual_out = out.residual.data(),
          .moment1_out = out.moment1.data(),
          .moment2_out = out.moment2.data(),
          .first_chunk = 5,
          .seed = kSeed,
          .step = 3};
}

/// update(), with what shard's step, seed and chunks say, written out once more: element after
/// element, with the layout and the rounding as docs/adam.md has them.
inline void update_by_the_book(const Shard& shard, const Gradient& gradient, const State& in,
                               State& out, std::span<const Segment> segments,
                               const StepConstants& constants) {
  std::vector<float> m = in.decoded(false);
  std::vector<float> v = in.decoded(true);
  size_t segment = 0;
  int64_t left = segments.empty() ? 0 : segments[0].count;
  for (size_t i = 0; i < in.count; ++i) {
    while (left == 0) left = segments[++segment].count;
    --left;
    const float decay = segments[segment].decay ? constants.decay : 0.0F;
    const Element element =
        update_element({in.master(i), m[i], v[i]}, gradient[i], constants, decay);
    out.set_master(i, element.master);
    m[i] = element.moment1;
    v[i] = element.moment2;
  }
  const auto random = [&](size_t i) {
    const auto key = rounding_key(shard.seed, shard.step, shard.first_chunk + i / 32768);
    return rounding_bits(key, static_cast<uint32_t>(i % 32768));
  };
  for (const bool second : {false, true}) {
    const std::vector<float>& values = second ? v : m;
    std::byte* bytes = out.moment(second).data();
    if (in.format == MomentFormat::kF32) {
      if (in.count > 0) std::memcpy(bytes, values.data(), in.count * sizeof(float));
    } else if (in.format == MomentFormat::kBf16) {
      for (size_t i = 0; i < in.count; ++i) {
        const uint16_t half =
            second ? to_bf16_moment2(values[i], random(i)) : to_bf16_moment1(values[i], random(i));
        std::memcpy(bytes + 2 * i, &half, 2);
      }
    } else {
      for (size_t block = 0; block < in.count; block += 256) {
        const size_t chunk = block / 32768;
        const size_t chunk_end = std::min((chunk + 1) * 32768, in.count);
        const size_t blocks_of_chunk = (chunk_end - chunk * 32768 + 255) / 256;
        std::byte* codes = bytes + chunk * (32768 + 128);
        float largest = 0;
        for (size_t i = block; i < std::min(block + 256, in.count); ++i) {
          largest = std::max(largest, second ? std::sqrt(values[i]) : std::abs(values[i]));
        }
        const uint8_t scale = int8_scale(second ? 19 : 20, std::bit_cast<uint32_t>(largest));
        codes[blocks_of_chunk * 256 + block % 32768 / 256] = std::byte{scale};
        for (size_t i = block; i < std::min(block + 256, in.count); ++i) {
          const uint32_t base = int8_base(scale);
          codes[i % 32768] =
              std::byte{second ? encode_moment2(std::sqrt(values[i]), base, random(i))
                               : encode_moment1(values[i], base, random(i))};
        }
      }
    }
  }
}

/// A random sign and exponent in [low, high).
inline float random_scale(CounterRandom& random, int low, int high) {
  const auto span = static_cast<uint64_t>(high - low);
  const int exponent = low + static_cast<int>(random.next_below(span));
  const double magnitude = std::ldexp(1 + random.next_uniform(), exponent);
  return static_cast<float>(random.next_below(2) == 0 ? magnitude : -magnitude);
}

/// Finite values of every kind below 2^limit: the usual, zeros of both signs, subnormal and huge.
inline float random_of_any_kind(CounterRandom& random, int limit) {
  switch (random.next_below(8)) {
    case 0:
      return 0.0F;
    case 1:
      return -0.0F;
    case 2:
      return random_scale(random, -149, -126);  // subnormal
    case 3:
      return random_scale(random, limit - 8, limit);
    case 4:
      return random_scale(random, -126, limit);
    default:
      return static_cast<float>(random.next_normal());
  }
}

/// Everything that the contract allows: finite gradients and parameters, |moment1| below 2^63,
/// moment2 below 2^126. Blocks in turn hold all kinds side by side and values of one magnitude.
inline Values values_of_any_kind(size_t count, uint64_t stream) {
  CounterRandom random(kSeed, stream);
  Values values{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count),
                std::vector<float>(count)};
  for (size_t i = 0; i < count; ++i) {
    values.master[i] = random_of_any_kind(random, 127);
    values.gradient[i] = random_of_any_kind(random, 127);
    values.moment1[i] = random_of_any_kind(random, 63);
    values.moment2[i] = std::abs(random_of_any_kind(random, 126));
    if (i / 256 % 2 == 1) {
      const int exponent = static_cast<int>(i / 512 % 80) - 60;
      values.gradient[i] = random_scale(random, exponent - 12, exponent);
      values.moment1[i] = random_scale(random, exponent - 12, exponent);
      values.moment2[i] = std::abs(random_scale(random, 2 * exponent - 24, 2 * exponent));
    }
  }
  return values;
}

/// Values as in training: |update| is near the learning rate, the moments fit the gradients.
inline Values values_as_in_training(size_t count, uint64_t stream) {
  CounterRandom random(kSeed, stream);
  Values values;
  for (size_t i = 0; i < count; ++i) {
    const double size = std::pow(10, -6 * random.next_uniform());
    values.master.push_back(static_cast<float>(0.02 * random.next_normal()));
    values.moment1.push_back(static_cast<float>(0.3 * size * random.next_normal()));
    values.moment2.push_back(static_cast<float>(size * size * (0.2 + random.next_uniform())));
    values.gradient.push_back(static_cast<float>(size * random.next_normal()));
  }
  return values;
}

inline StepConstants some_constants() {
  return step_constants({.learning_rate = 1e-3, .weight_decay = 0.1}, 3, 0.37);
}

}  // namespace strata::cpu_adam
