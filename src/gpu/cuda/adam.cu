// AdamW by cpu_adam's definition (cpu_adam/definition.h, docs/adam.md), to the same bits. Bytes a
// parameter: 26 with a bf16 weight and gradient (gradient 2; weight 2, residual 2, moments 8, each
// read and written), 28 with an fp32 gradient, 26 with an fp32 weight and bf16 gradient; 18 with
// bf16 moments, 14 with those of 8 bits. A thread takes 8 parameters and has 7 loads of 16 bytes in
// flight, 5 with bf16 moments (and 3 of 16 and 2 of 8 bytes with those of 8 bits).
//
// Segments: the launcher joins neighbours of one kind to runs, so that the kinds of runs alternate,
// and passes the ends of a few hundred runs as a kernel parameter. A thread finds its run by binary
// search in them; a shard of one layer has a handful of runs and takes one launch.
//
// Rounded moments: the 32 lanes of a warp have one block of kMomentBlock elements, whose largest
// magnitudes they find together; a block of threads lies in one chunk, whose random key one of its
// threads computes while the loads of all are under way.
#include <algorithm>

#include "base/error.h"
#include "cpu_adam/definition.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/reductions.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

using cpu_adam::MomentFormat;
using cpu_adam::Shard;
using cpu_adam::StepConstants;

constexpr unsigned kThreads = 256;
/// Elements of a block of threads, all in one chunk.
constexpr int64_t kTile = kThreads * kGroup;
static_assert(cpu_adam::kChunkElements % kTile == 0);
static_assert(cpu_adam::kMomentBlock == kWarp * kGroup);

/// So many runs cover one moment block at least, however short they are.
constexpr int kMaxRuns = cpu_adam::kMomentBlock + 1;

/// Run i ends at element ends[i] and begins where the run before ends, the first at `begin`, a
/// multiple of kMomentBlock; run 0 has weight decay if first_decays, and each other where the one
/// before has none.
struct Runs {
  int64_t begin = 0;
  int count = 0;
  bool first_decays = false;
  int64_t ends[kMaxRuns];

  [[nodiscard]] __host__ __device__ int64_t end() const { return ends[count - 1]; }

  /// The run that holds element i, which one of them does.
  [[nodiscard]] __device__ __forceinline__ int find(int64_t i) const {
    int low = 0;
    int high = count - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (i < ends[middle]) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
  [[nodiscard]] __device__ __forceinline__ float decay(int run, float decay) const {
    return (run % 2 == 0) == first_decays ? decay : 0.0F;
  }
};

/// n parameters on their way through the update, which leaves the root of moment2.
template <int n>
struct State {
  Floats<n> master, moment1, moment2, root2;
};

template <int n>
__device__ __forceinline__ Floats<n> decays_of(const Runs& runs, int64_t i, float decay) {
  int run = runs.find(i);
  Floats<n> decays;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    if (j > 0 && i + j == runs.ends[run] && run + 1 < runs.count) ++run;
    decays[j] = runs.decay(run, decay);
  }
  return decays;
}

/// cpu_adam::update_element, with the numbers of its operations.
template <int n>
__device__ __forceinline__ void update(State<n>& state, const Floats<n>& gradient,
                                       const StepConstants& constants, const Floats<n>& decay) {
  constexpr float kBound = cpu_adam::kGradientBound;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const float scaled = ptx::mul_rn(gradient[j], constants.gradient_scale);      // 1
    const float above = scaled < -kBound ? -kBound : scaled;                      // 2
    const float g = kBound < above ? kBound : above;                              // 2
    const float d = ptx::sub_rn(g, state.moment1[j]);                             // 3
    const float m = ptx::fma_rn(constants.one_minus_beta1, d, state.moment1[j]);  // 4
    const float t = ptx::fma_rn(g, g, -state.moment2[j]);                         // 5
    const float v = ptx::fma_rn(constants.one_minus_beta2, t, state.moment2[j]);  // 6
    const float r = ptx::sqrt_rn(v);                                              // 7
    const float q = ptx::div_rn(m, ptx::add_rn(r, constants.epsilon));            // 8, 9
    const float w = ptx::mul_rn(decay[j], state.master[j]);                       // 10
    state.master[j] =
        ptx::sub_rn(state.master[j], ptx::fma_rn(constants.step_size, q, w));  // 11, 12
    state.moment1[j] = m;
    state.moment2[j] = v;
    state.root2[j] = r;
  }
}

/// The 16-bit words of a Packed<Bf16, n>.
template <int n>
__device__ __forceinline__ uint32_t word(const Packed<Bf16, n>& packed, int i) {
  if constexpr (n == 1) {
    return packed.value.bits;
  } else {
    return packed.words[i / 2] >> (i % 2 * 16) & 0xffffU;
  }
}

template <int n>
__device__ __forceinline__ void set_word(Packed<Bf16, n>& packed, int i, uint32_t word) {
  if constexpr (n == 1) {
    packed.value.bits = static_cast<uint16_t>(word);
  } else {
    packed.words[i / 2] = i % 2 == 0 ? word : packed.words[i / 2] | word << 16;
  }
}

/// residual and residual_out as arrays whose elements can be loaded as weights are.
__device__ __forceinline__ const Bf16* as_bf16(const uint16_t* words) {
  return reinterpret_cast<const Bf16*>(words);
}
__device__ __forceinline__ Bf16* as_bf16(uint16_t* words) { return reinterpret_cast<Bf16*>(words); }

template <int n>
__device__ __forceinline__ Floats<n> join(const Packed<Bf16, n>& weight,
                                          const Packed<Bf16, n>& residual) {
  Floats<n> master;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    master[j] = join_master(
        {{static_cast<uint16_t>(word(weight, j))}, static_cast<uint16_t>(word(residual, j))});
  }
  return master;
}

template <int n>
__device__ __forceinline__ void split(const Floats<n>& master, Packed<Bf16, n>& weight,
                                      Packed<Bf16, n>& residual) {
#pragma unroll
  for (int j = 0; j < n; ++j) {
    const SplitMaster halves = split_master(master[j]);
    set_word(weight, j, halves.weight.bits);
    set_word(residual, j, halves.residual);
  }
}

template <class Weight, class Gradient, int n>
__device__ __forceinline__ void update_at(const Shard& shard, int64_t i,
                                          const StepConstants& constants, const Runs& runs) {
  const auto gradient = load<n>(static_cast<const Gradient*>(shard.gradient) + i);
  const auto weight = load<n>(static_cast<const Weight*>(shard.weight) + i);
  const auto moment1 = load<n>(static_cast<const float*>(shard.moment1) + i);
  const auto moment2 = load<n>(static_cast<const float*>(shard.moment2) + i);
  State<n> state{{}, unpack(moment1), unpack(moment2), {}};
  if constexpr (sizeof(Weight) == 2) {
    state.master = join(weight, load<n>(as_bf16(shard.residual) + i));
  } else {
    state.master = unpack(weight);
  }
  update(state, unpack(gradient), constants, decays_of<n>(runs, i, constants.decay));

  auto* weight_out = static_cast<Weight*>(shard.weight_out);
  if constexpr (sizeof(Weight) == 2) {
    Packed<Bf16, n> upper = {};
    Packed<Bf16, n> lower = {};
    split(state.master, upper, lower);
    store(weight_out + i, upper);
    store(as_bf16(shard.residual_out) + i, lower);
  } else {
    store_floats(weight_out + i, state.master);
  }
  store_floats(static_cast<float*>(shard.moment1_out) + i, state.moment1);
  store_floats(static_cast<float*>(shard.moment2_out) + i, state.moment2);
}

/// Elements [runs.begin, runs.end()): groups, then single ones; single ones only where not aligned.
template <class Weight, class Gradient>
__global__ void __launch_bounds__(kThreads)
    adam_elements(Shard shard, StepConstants constants, Runs runs, bool aligned) {
  const int64_t begin = runs.begin;
  const int64_t end = runs.end();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t groups = aligned ? (end - begin) / kGroup : 0;
  if (index < groups) {
    update_at<Weight, Gradient, kGroup>(shard, begin + index * kGroup, constants, runs);
  }
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  for (int64_t i = begin + groups * kGroup + index; i < end; i += threads) {
    update_at<Weight, Gradient, 1>(shard, i, constants, runs);
  }
}

/// A thread's part of arrays with rounded moments: `count` of 0 to kGroup elements from i on, which
/// may be accessed together if `whole`.
struct Part {
  int64_t i;
  int count;
  bool whole;
};

template <class T>
__device__ __forceinline__ Packed<T, kGroup> load_part(const T* from, const Part& part) {
  if (part.whole) return load<kGroup>(from + part.i);
  Packed<T, kGroup> packed = {};
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (j >= part.count) continue;
    if constexpr (sizeof(T) == 4) {
      packed.words[j] = std::bit_cast<uint32_t>(from[part.i + j]);
    } else if constexpr (sizeof(T) == 2) {
      set_word(packed, j, from[part.i + j].bits);
    } else {
      packed.words[j / 4] |= uint32_t{from[part.i + j]} << (j % 4 * 8);
    }
  }
  return packed;
}

template <class T>
__device__ __forceinline__ void store_part(T* to, const Part& part,
                                           const Packed<T, kGroup>& packed) {
  if (part.whole) return store(to + part.i, packed);
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    if (j >= part.count) continue;
    if constexpr (sizeof(T) == 4) {
      to[part.i + j] = std::bit_cast<T>(packed.words[j]);
    } else if constexpr (sizeof(T) == 2) {
      to[part.i + j].bits = static_cast<uint16_t>(word(packed, j));
    } else {
      to[part.i + j] = static_cast<uint8_t>(packed.words[j / 4] >> (j % 4 * 8));
    }
  }
}

__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const uint32_t other = ptx::shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

/// One moment of a thread's part, in the format in which it rests.
template <MomentFormat format, bool second>
struct Moment;

template <bool second>
struct Moment<MomentFormat::kBf16, second> {
  Packed<Bf16, kGroup> words;

  __device__ __forceinline__ void load(const void* moment, int64_t /*count*/, const Part& part) {
    words = load_part(static_cast<const Bf16*>(moment), part);
  }
  [[nodiscard]] __device__ __forceinline__ Floats<kGroup> decode() const { return unpack(words); }

  /// `root` is of moment2 and not needed here. All lanes call it, of a warp that has a whole moment
  /// block or its beginning.
  static __device__ __forceinline__ void round_and_store(void* moment, int64_t /*count*/,
                                                         const Part& part,
                                                         const Floats<kGroup>& values,
                                                         const Floats<kGroup>& /*root*/,
                                                         const uint32_t (&random)[kGroup]) {
    Packed<Bf16, kGroup> rounded = {};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      set_word(rounded, j,
               second ? cpu_adam::to_bf16_moment2(values[j], random[j])
                      : cpu_adam::to_bf16_moment1(values[j], random[j]));
    }
    store_part(static_cast<Bf16*>(moment), part, rounded);
  }
};

template <bool second>
struct Moment<MomentFormat::kInt8, second> {
  Packed<uint8_t, kGroup> codes;
  uint8_t scale;

  /// The codes of the part's chunk as an array that begins with the shard's first element, and the
  /// place of its block's scale.
  struct Place {
    int64_t first_code, scale;
  };
  static __device__ __forceinline__ Place place_of(int64_t count, const Part& part) {
    const int64_t chunk = part.i / cpu_adam::kChunkElements;
    const int64_t begin = chunk * cpu_adam::kChunkElements;
    const cpu_adam::Int8Chunk bytes = cpu_adam::int8_chunk(count, chunk);
    return {static_cast<int64_t>(bytes.codes_bytes) - begin,
            static_cast<int64_t>(bytes.scales_bytes) + (part.i - begin) / cpu_adam::kMomentBlock};
  }

  __device__ __forceinline__ void load(const void* moment, int64_t count, const Part& part) {
    codes = {};
    scale = 0;
    if (part.count == 0) return;
    const auto* bytes = static_cast<const uint8_t*>(moment);
    const Place place = place_of(count, part);
    codes = load_part(bytes + place.first_code, part);
    scale = bytes[place.scale];
  }

  [[nodiscard]] __device__ __forceinline__ Floats<kGroup> decode() const {
    const uint32_t base = cpu_adam::int8_base(scale);
    Floats<kGroup> values;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const auto code = static_cast<uint8_t>(codes.words[j / 4] >> (j % 4 * 8));
      values[j] =
          second ? cpu_adam::decode_moment2(code, base) : cpu_adam::decode_moment1(code, base);
    }
    return values;
  }

  static __device__ __forceinline__ void round_and_store(void* moment, int64_t count,
                                                         const Part& part,
                                                         const Floats<kGroup>& values,
                                                         const Floats<kGroup>& root,
                                                         const uint32_t (&random)[kGroup]) {
    const Floats<kGroup>& magnitudes = second ? root : values;
    uint32_t largest = 0;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint32_t bits = std::bit_cast<uint32_t>(magnitudes[j]) & 0x7fffffffU;
      if (j < part.count && bits > largest) largest = bits;
    }
    // The lanes' old scales are behind these shuffles, so that the new one may take their place.
    const uint8_t new_scale = cpu_adam::int8_scale(
        second ? cpu_adam::kInt8Shift2 : cpu_adam::kInt8Shift1, warp_max(largest));
    if (part.count == 0) return;
    const uint32_t base = cpu_adam::int8_base(new_scale);
    Packed<uint8_t, kGroup> rounded = {};
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      const uint8_t code = second ? cpu_adam::encode_moment2(magnitudes[j], base, random[j])
                                  : cpu_adam::encode_moment1(magnitudes[j], base, random[j]);
      rounded.words[j / 4] |= uint32_t{code} << (j % 4 * 8);
    }
    auto* bytes = static_cast<uint8_t*>(moment);
    const Place place = place_of(count, part);
    store_part(bytes + place.first_code, part, rounded);
    if (threadIdx.x % kWarp == 0) bytes[place.scale] = new_scale;
  }
};

/// Elements [runs.begin, runs.end()) with rounded moments, the end a multiple of kMomentBlock or
/// the shard's.
template <class Weight, class Gradient, MomentFormat format>
__global__ void __launch_bounds__(kThreads, 4)
    adam_rounded(Shard shard, StepConstants constants, Runs runs, bool aligned) {
  const int64_t tile = runs.begin / kTile + blockIdx.x;
  const int64_t i = tile * kTile + int64_t{threadIdx.x} * kGroup;
  const int64_t left = i < runs.begin ? 0 : runs.end() - i;
  const int count = left > kGroup ? kGroup : left > 0 ? static_cast<int>(left) : 0;
  const Part part{i, count, aligned && count == kGroup};

  const auto gradient = load_part(static_cast<const Gradient*>(shard.gradient), part);
  const auto weight = load_part(static_cast<const Weight*>(shard.weight), part);
  Moment<format, false> moment1;
  Moment<format, true> moment2;
  moment1.load(shard.moment1, shard.count, part);
  moment2.load(shard.moment2, shard.count, part);
  State<kGroup> state;
  if constexpr (sizeof(Weight) == 2) {
    state.master = join(weight, load_part(as_bf16(shard.residual), part));
  } else {
    state.master = unpack(weight);
  }

  auto* shared_key = reinterpret_cast<cpu_adam::RoundingKey*>(shared_memory());
  if (threadIdx.x == 0) {
    const auto chunk = static_cast<uint64_t>(tile * kTile / cpu_adam::kChunkElements);
    *shared_key = cpu_adam::rounding_key(shard.seed, shard.step, shard.first_chunk + chunk);
  }
  __syncthreads();
  const cpu_adam::RoundingKey key = *shared_key;
  uint32_t random[kGroup];
#pragma unroll
  for (int j = 0; j < kGroup; ++j) {
    random[j] = cpu_adam::rounding_bits(
        key, static_cast<uint32_t>(i % cpu_adam::kChunkElements) + static_cast<uint32_t>(j));
  }

  state.moment1 = moment1.decode();
  state.moment2 = moment2.decode();
  update(state, unpack(gradient), constants, decays_of<kGroup>(runs, i, constants.decay));

  auto* weight_out = static_cast<Weight*>(shard.weight_out);
  if constexpr (sizeof(Weight) == 2) {
    Packed<Bf16, kGroup> upper = {};
    Packed<Bf16, kGroup> lower = {};
    split(state.master, upper, lower);
    store_part(weight_out, part, upper);
    store_part(as_bf16(shard.residual_out), part, lower);
  } else {
    store_part(weight_out, part, pack<Weight>(state.master));
  }
  Moment<format, false>::round_and_store(shard.moment1_out, shard.count, part, state.moment1,
                                         state.root2, random);
  Moment<format, true>::round_and_store(shard.moment2_out, shard.count, part, state.moment2,
                                        state.root2, random);
}

template <class Weight, class Gradient>
void launch_runs_of(const AdamArgs& args, const Runs& runs, StreamHandle stream) {
  const Shard& shard = args.shard;
  const bool aligned =
      are_aligned(shard.gradient, shard.weight, shard.residual, shard.moment1, shard.moment2,
                  shard.weight_out, shard.residual_out, shard.moment1_out, shard.moment2_out);
  const auto run = [&](auto kernel, int64_t first, size_t shared_bytes) {
    launch("adam", kernel, grid_size(runs.end() - first, kTile), kThreads, shared_bytes, stream,
           shard, args.constants, runs, aligned);
  };
  const int64_t first = runs.begin / kTile * kTile;
  constexpr size_t kKeyBytes = sizeof(cpu_adam::RoundingKey);
  switch (shard.moment_format) {
    case MomentFormat::kF32:
      return run(adam_elements<Weight, Gradient>, runs.begin, 0);
    case MomentFormat::kBf16:
      return run(adam_rounded<Weight, Gradient, MomentFormat::kBf16>, first, kKeyBytes);
    case MomentFormat::kInt8:
      return run(adam_rounded<Weight, Gradient, MomentFormat::kInt8>, first, kKeyBytes);
  }
}

void launch_runs(const AdamArgs& args, const Runs& runs, StreamHandle stream) {
  const bool bf16_gradient = args.shard.gradient_dtype == DType::kBf16;
  if (args.shard.weight_dtype == DType::kBf16) {
    return bf16_gradient ? launch_runs_of<Bf16, Bf16>(args, runs, stream)
                         : launch_runs_of<Bf16, float>(args, runs, stream);
  }
  return bf16_gradient ? launch_runs_of<float, Bf16>(args, runs, stream)
                       : launch_runs_of<float, float>(args, runs, stream);
}

/// A place in the segment table, where the walk through it stands.
struct Place {
  int64_t segment = 0;
  int64_t begin = 0;  // the segment's first element
};

/// The runs from element `begin` on, of which as many as there is room for, up to a multiple of
/// kMomentBlock or the shard's end. `place` moves on to the segment of `begin`.
Runs runs_from(const AdamArgs& args, int64_t begin, Place& place) {
  const int64_t count = args.shard.count;
  Runs runs;
  runs.begin = begin;
  Place next = place;
  int64_t end = begin;
  for (; next.segment < args.segment_count && end < count; ++next.segment) {
    const cpu_adam::Segment& segment = args.segments[next.segment];
    const int64_t segment_end = next.begin + std::max<int64_t>(0, segment.count);
    if (segment.count > 0 && segment_end > begin) {
      const bool joins =
          runs.count > 0 && segment.decay == ((runs.count % 2 == 1) == runs.first_decays);
      if (!joins && runs.count == kMaxRuns) break;
      if (runs.count == 0) {
        runs.first_decays = segment.decay;
        place = next;
      }
      if (!joins) ++runs.count;
      end = std::min(count, segment_end);
      runs.ends[runs.count - 1] = end;
    }
    next.begin = segment_end;
  }
  STRATA_CHECK(end == count || runs.count == kMaxRuns,
               "segments must add up to the shard's elements");
  if (end < count) {
    end = end / cpu_adam::kMomentBlock * cpu_adam::kMomentBlock;
    while (runs.count > 1 && runs.ends[runs.count - 2] >= end) --runs.count;
    runs.ends[runs.count - 1] = end;
  }
  return runs;
}

}  // namespace

void adam(const AdamArgs& args, StreamHandle stream) {
  STRATA_CHECK(args.shard.count >= 0 && args.segment_count >= 0,
               "sizes of an operator must not be negative");
  Place place;
  for (int64_t begin = 0; begin < args.shard.count;) {
    const Runs runs = runs_from(args, begin, place);
    launch_runs(args, runs, stream);
    begin = runs.end();
  }
}

}  // namespace strata::gpu::cuda
