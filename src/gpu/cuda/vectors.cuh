// Elements of either type as they lie in memory and as fp32 values, several at a time, so that an
// operator's formula is written once for its 16-byte accesses and for its scalar ones.
#pragma once

#include <bit>
#include <cstdint>

#include "base/bf16.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/ptx.cuh"

namespace strata::gpu::cuda {

/// Elements of a group: 16 bytes of bf16, twice that of fp32.
inline constexpr int kGroup = 8;

/// n elements of type T as stored. Loads and stores of n > 1 must be aligned to n elements, or 16
/// bytes where that is less.
template <class T, int n>
struct Packed {
  static_assert(n == 1 || n == 4 || n == 8);
  static constexpr int kWords = n * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];
};

template <>
struct Packed<Bf16, 1> {
  Bf16 value;
};

template <int n>
struct Floats {
  float values[n];
  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
  __device__ __forceinline__ const float& operator[](int i) const { return values[i]; }
};

template <int n, class T>
__device__ __forceinline__ Packed<T, n> load(const T* from) {
  Packed<T, n> packed;
  if constexpr (n * sizeof(T) == 2) {
    packed.value = *from;
  } else if constexpr (n * sizeof(T) == 4) {
    packed.words[0] = std::bit_cast<uint32_t>(*from);
  } else if constexpr (n * sizeof(T) == 8) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    packed.words[0] = words.x;
    packed.words[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < packed.kWords; i += 4) {
      const uint4 words = ptx::load_16(from + i * 4 / static_cast<int>(sizeof(T)));
      packed.words[i] = words.x;
      packed.words[i + 1] = words.y;
      packed.words[i + 2] = words.z;
      packed.words[i + 3] = words.w;
    }
  }
  return packed;
}

template <class T, int n>
__device__ __forceinline__ void store(T* to, const Packed<T, n>& packed) {
  if constexpr (n * sizeof(T) == 2) {
    *to = packed.value;
  } else if constexpr (n * sizeof(T) == 4) {
    *to = std::bit_cast<T>(packed.words[0]);
  } else if constexpr (n * sizeof(T) == 8) {
    *reinterpret_cast<uint2*>(to) = uint2{packed.words[0], packed.words[1]};
  } else {
#pragma unroll
    for (int i = 0; i < packed.kWords; i += 4) {
      ptx::store_16(
          to + i * 4 / static_cast<int>(sizeof(T)),
          uint4{packed.words[i], packed.words[i + 1], packed.words[i + 2], packed.words[i + 3]});
    }
  }
}

template <class T, int n>
__device__ __forceinline__ Floats<n> unpack(const Packed<T, n>& packed) {
  Floats<n> floats;
  if constexpr (n * sizeof(T) == 2) {
    floats[0] = to_float(packed.value);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < n; ++i) floats[i] = std::bit_cast<float>(packed.words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      floats[i] = ptx::low_bf16(packed.words[i / 2]);
      floats[i + 1] = ptx::high_bf16(packed.words[i / 2]);
    }
  }
  return floats;
}

/// bf16 by rounding to nearest even.
template <class T, int n>
__device__ __forceinline__ Packed<T, n> pack(const Floats<n>& floats) {
  Packed<T, n> packed;
  if constexpr (n * sizeof(T) == 2) {
    packed.value = Bf16{static_cast<uint16_t>(ptx::pack_bf16(floats[0], 0))};
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < n; ++i) packed.words[i] = std::bit_cast<uint32_t>(floats[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
      packed.words[i / 2] = ptx::pack_bf16(floats[i], floats[i + 1]);
    }
  }
  return packed;
}

template <int n, class T>
__device__ __forceinline__ Floats<n> load_floats(const T* from) {
  return unpack(load<n>(from));
}

template <class T, int n>
__device__ __forceinline__ void store_floats(T* to, const Floats<n>& floats) {
  store(to, pack<T>(floats));
}

/// Whether all of the pointers (null ones too) allow 16-byte accesses.
template <class... Pointers>
[[nodiscard]] bool are_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) | ...) % 16) == 0;
}

/// Threads of a block for `items` of work: whole warps, between one and `most`.
[[nodiscard]] inline unsigned threads_for(int64_t items, unsigned most) {
  if (items >= most) return most;
  return items <= 32 ? 32 : (static_cast<unsigned>(items) + 31) / 32 * 32;
}

}  // namespace strata::gpu::cuda
