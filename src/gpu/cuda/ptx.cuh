// The instructions that kernels use and C++ has no word for, one function each. The emulator
// (tests/cuda_emulator) has a twin of this header in plain C++, so a kernel contains no assembly.
//
// Warp-wide functions are called by all 32 lanes together. Fragment layouts are those of the PTX
// ISA, "Matrix Fragments for mma.m16n8k16 with floating point type": with group = lane / 4 and
// quad = lane % 4,
//   a[0] row group, columns 2 quad and 2 quad + 1 (low half first); a[1] row group + 8;
//   a[2] and a[3] as a[0] and a[1], 8 columns on;
//   b[0] column group, rows 2 quad and 2 quad + 1; b[1] 8 rows on;
//   d[0], d[1] row group, columns 2 quad and 2 quad + 1; d[2], d[3] row group + 8.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace strata::gpu::cuda::ptx {

namespace internal {
inline constexpr unsigned kFullMask = 0xffffffffU;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
}  // namespace internal

// ldmatrix: matrix m is 8 rows of 16 bytes, whose 16-byte aligned addresses lanes 8m to 8m + 7 give
// (the addresses of further lanes are not read). out[m] of a lane holds elements 2 quad and
// 2 quad + 1 of row `group`; transposed, of column `group`.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(internal::shared_address(shared_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(internal::shared_address(shared_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&out)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(internal::shared_address(shared_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&out)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(internal::shared_address(shared_row))
               : "memory");
}

/// d += a b, for a 16x16 and b 16x8 in bf16, d in fp32.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Begins a copy of 16 bytes, both ends aligned to 16; writes zeros and reads nothing when not
/// `valid`. The bytes are there for the calling thread after the wait for their group, for the
/// block after a barrier that follows that wait.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(internal::shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(valid ? 16 : 0)
      : "memory");
}

/// Closes the group of the copies that this thread began since the last.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Blocks until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/// The value of lane `lane` % 32.
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(internal::kFullMask, value, lane);
}

/// The value of lane ^ `mask`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(internal::kFullMask, value, mask);
}

/// The value of lane + `delta`, the lane's own where there is none.
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int delta) {
  return __shfl_down_sync(internal::kFullMask, value, static_cast<unsigned>(delta));
}

/// The value of lane - `delta`, the lane's own where there is none.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int delta) {
  return __shfl_up_sync(internal::kFullMask, value, static_cast<unsigned>(delta));
}

/// Bit i is the predicate of lane i.
__device__ __forceinline__ unsigned ballot(bool predicate) {
  return __ballot_sync(internal::kFullMask, predicate);
}

__device__ __forceinline__ bool any(bool predicate) {
  return __any_sync(internal::kFullMask, predicate) != 0;
}

__device__ __forceinline__ bool all(bool predicate) {
  return __all_sync(internal::kFullMask, predicate) != 0;
}

// Approximations of the special function unit; subnormal inputs and results count as zero. Maximal
// errors by the PTX ISA: exp2 2 ulp, reciprocal 1 ulp, log2 2^-22 (absolute near 1).
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16-byte accesses, aligned to 16. The streaming ones are for what is read or written once: first
// to be evicted from the caches.
__device__ __forceinline__ uint4 load_16(const void* global) {
  return *static_cast<const uint4*>(global);
}

__device__ __forceinline__ uint4 load_16_streaming(const void* global) {
  return __ldcs(static_cast<const uint4*>(global));
}

__device__ __forceinline__ void store_16(void* global, uint4 value) {
  *static_cast<uint4*>(global) = value;
}

__device__ __forceinline__ void store_16_streaming(void* global, uint4 value) {
  __stcs(static_cast<uint4*>(global), value);
}

/// Two bf16, each rounded to nearest even; `low` in bits 0 to 15. A NaN becomes 0x7fff.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_bf16(uint32_t packed) {
  return __uint_as_float(packed << 16U);
}

__device__ __forceinline__ float high_bf16(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000U);
}

// IEEE operations, rounded to nearest even, that the compiler contracts with no other.
__device__ __forceinline__ float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub_rn(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div_rn(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float sqrt_rn(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }

/// Ends the kernel with an error that the stream's next synchronisation reports.
__device__ __forceinline__ void trap() { asm volatile("trap;"); }

/// As cp_async_16, of 4 bytes aligned to 4.
__device__ __forceinline__ void cp_async_4(void* shared, const void* global, bool valid = true) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(internal::shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(valid ? 4 : 0)
      : "memory");
}

}  // namespace strata::gpu::cuda::ptx
