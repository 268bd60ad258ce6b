// The emulator's twin of src/gpu/cuda/ptx.cuh: same contracts, in plain C++. The trailing parameter
// of a function is where it was called, for diagnoses.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "cuda_emulator/kernel.h"

namespace strata::gpu::cuda::ptx {

using emulator::Location;

inline void ldmatrix_x4(uint32_t (&out)[4], const void* shared_row,
                        const Location& where = Location::current()) {
  emulator::load_matrices(out, 4, false, shared_row, where);
}
inline void ldmatrix_x4_trans(uint32_t (&out)[4], const void* shared_row,
                              const Location& where = Location::current()) {
  emulator::load_matrices(out, 4, true, shared_row, where);
}
inline void ldmatrix_x2(uint32_t (&out)[2], const void* shared_row,
                        const Location& where = Location::current()) {
  emulator::load_matrices(out, 2, false, shared_row, where);
}
inline void ldmatrix_x2_trans(uint32_t (&out)[2], const void* shared_row,
                              const Location& where = Location::current()) {
  emulator::load_matrices(out, 2, true, shared_row, where);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const Location& where = Location::current()) {
  emulator::multiply(d, a, b, where);
}

inline void cp_async_16(void* shared, const void* global, bool valid = true,
                        const Location& where = Location::current()) {
  emulator::copy_async(shared, global, 16, valid, where);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int pending>
void cp_async_wait() {
  emulator::wait_for_copies(pending);
}

namespace internal {
template <class T>
T exchange(T value, int source, const Location& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulator::exchange(bits, source, where);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline float flush_subnormal(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0F, x) : x;
}
}  // namespace internal

template <class T>
T shuffle(T value, int lane, const Location& where = Location::current()) {
  return internal::exchange(value, lane & 31, where);
}
template <class T>
T shuffle_xor(T value, int mask, const Location& where = Location::current()) {
  return internal::exchange(value, (emulator::lane_index() ^ mask) & 31, where);
}
template <class T>
T shuffle_down(T value, int delta, const Location& where = Location::current()) {
  const int lane = emulator::lane_index();
  return internal::exchange(value, lane + delta <= 31 ? lane + delta : lane, where);
}
template <class T>
T shuffle_up(T value, int delta, const Location& where = Location::current()) {
  const int lane = emulator::lane_index();
  return internal::exchange(value, lane >= delta ? lane - delta : lane, where);
}

inline unsigned ballot(bool predicate, const Location& where = Location::current()) {
  return emulator::vote(predicate, where);
}
inline bool any(bool predicate, const Location& where = Location::current()) {
  return emulator::vote(predicate, where) != 0;
}
inline bool all(bool predicate, const Location& where = Location::current()) {
  return emulator::vote(predicate, where) == 0xffffffffU;
}

inline float exp2_approx(float x) {
  return internal::flush_subnormal(std::exp2(internal::flush_subnormal(x)));
}
inline float log2_approx(float x) { return std::log2(internal::flush_subnormal(x)); }
inline float reciprocal_approx(float x) {
  return internal::flush_subnormal(1.0F / internal::flush_subnormal(x));
}

inline uint4 load_16(const void* global, const Location& where = Location::current()) {
  emulator::check_global(global, 16, 16, where);
  uint4 value;
  std::memcpy(&value, global, sizeof(value));  // The memory may hold objects of another type.
  return value;
}
inline uint4 load_16_streaming(const void* global, const Location& where = Location::current()) {
  return load_16(global, where);
}
inline void store_16(void* global, uint4 value, const Location& where = Location::current()) {
  emulator::check_global(global, 16, 16, where);
  std::memcpy(global, &value, sizeof(value));
}
inline void store_16_streaming(void* global, uint4 value,
                               const Location& where = Location::current()) {
  store_16(global, value, where);
}

namespace internal {
inline uint32_t round_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return 0x7fffU;
  return (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
}
}  // namespace internal

inline uint32_t pack_bf16(float low, float high) {
  return internal::round_to_bf16(low) | (internal::round_to_bf16(high) << 16U);
}
inline float low_bf16(uint32_t packed) { return std::bit_cast<float>(packed << 16U); }
inline float high_bf16(uint32_t packed) { return std::bit_cast<float>(packed & 0xffff0000U); }

inline float add_rn(float a, float b) { return a + b; }
inline float sub_rn(float a, float b) { return a - b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }
inline float sqrt_rn(float a) { return std::sqrt(a); }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }

/// Ends the kernel with an error that the stream's next synchronisation reports.
[[noreturn]] inline void trap() { throw failure("trap"); }

inline void cp_async_4(void* shared, const void* global, bool valid = true,
                       const Location& where = Location::current()) {
  emulator::copy_async(shared, global, 4, valid, where);
}

}  // namespace strata::gpu::cuda::ptx
