// add and cast. Bytes an element: add 6 in bf16 (two read, one written), cast 6 between the types.
// A thread has 8 loads of 16 bytes in flight in add, 4 in cast: groups a block's width apart.
#include <type_traits>

#include "base/error.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/vectors.cuh"

namespace strata::gpu::cuda {
namespace {

constexpr unsigned kThreads = 256;
/// Groups of a thread whose input is of this type: 64 bytes of each array.
constexpr int groups_of_thread(size_t element_size) { return 8 / static_cast<int>(element_size); }
template <class T>
inline constexpr int kGroupsOfThread = groups_of_thread(sizeof(T));

/// The k-th group of the calling thread.
template <class T>
__device__ __forceinline__ int64_t group_of_thread(int k) {
  return (int64_t{blockIdx.x} * kGroupsOfThread<T> + k) * kThreads + threadIdx.x;
}

/// The elements after the last group are dealt out over the grid one by one, so this is all of them
/// where groups is 0.
template <class Body>
__device__ __forceinline__ void for_each_left_over(int64_t groups, int64_t count,
                                                   const Body& body) {
  for (int64_t i = groups * kGroup + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    body(i);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) add_elements(AddArgs args, int64_t groups) {
  const auto* a = static_cast<const T*>(args.a);
  const auto* b = static_cast<const T*>(args.b);
  auto* out = static_cast<T*>(args.out);
  Packed<T, kGroup> as[kGroupsOfThread<T>] = {};
  Packed<T, kGroup> bs[kGroupsOfThread<T>] = {};
#pragma unroll
  for (int k = 0; k < kGroupsOfThread<T>; ++k) {
    const int64_t group = group_of_thread<T>(k);
    if (group < groups) {
      as[k] = load<kGroup>(a + group * kGroup);
      bs[k] = load<kGroup>(b + group * kGroup);
    }
  }
#pragma unroll
  for (int k = 0; k < kGroupsOfThread<T>; ++k) {
    const int64_t group = group_of_thread<T>(k);
    if (group < groups) {
      Floats<kGroup> sum = unpack(as[k]);
      const Floats<kGroup> added = unpack(bs[k]);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) sum[j] += added[j];
      store_floats(out + group * kGroup, sum);
    }
  }
  for_each_left_over(groups, args.count, [&](int64_t i) {
    const float sum = load_floats<1>(a + i)[0] + load_floats<1>(b + i)[0];
    store_floats(out + i, Floats<1>{sum});
  });
}

template <class Out, class In, int n>
__device__ __forceinline__ Packed<Out, n> convert(const Packed<In, n>& in) {
  if constexpr (std::is_same_v<In, Out>) {
    return in;
  } else {
    return pack<Out>(unpack(in));
  }
}

template <class In, class Out>
__global__ void __launch_bounds__(kThreads) cast_elements(CastArgs args, int64_t groups) {
  const auto* in = static_cast<const In*>(args.in);
  auto* out = static_cast<Out*>(args.out);
  Packed<In, kGroup> kept[kGroupsOfThread<In>] = {};
#pragma unroll
  for (int k = 0; k < kGroupsOfThread<In>; ++k) {
    const int64_t group = group_of_thread<In>(k);
    if (group < groups) kept[k] = load<kGroup>(in + group * kGroup);
  }
#pragma unroll
  for (int k = 0; k < kGroupsOfThread<In>; ++k) {
    const int64_t group = group_of_thread<In>(k);
    if (group < groups) store(out + group * kGroup, convert<Out>(kept[k]));
  }
  for_each_left_over(groups, args.count,
                     [&](int64_t i) { store(out + i, convert<Out>(load<1>(in + i))); });
}

template <class Kernel, class Args>
void launch_elements(const char* name, Kernel kernel, const Args& args, DType in_dtype,
                     bool aligned, StreamHandle stream) {
  STRATA_CHECK(args.count >= 0, "sizes of an operator must not be negative");
  const int64_t groups = aligned ? args.count / kGroup : 0;
  const int64_t per_block = int64_t{kThreads} * kGroup * groups_of_thread(size_of(in_dtype));
  launch(name, kernel, grid_size(args.count, per_block), kThreads, 0, stream, args, groups);
}

}  // namespace

void add(const AddArgs& args, StreamHandle stream) {
  launch_elements("add", args.dtype == DType::kBf16 ? add_elements<Bf16> : add_elements<float>,
                  args, args.dtype, are_aligned(args.a, args.b, args.out), stream);
}

void cast(const CastArgs& args, StreamHandle stream) {
  const bool from_bf16 = args.in_dtype == DType::kBf16;
  const bool to_bf16 = args.out_dtype == DType::kBf16;
  launch_elements("cast",
                  from_bf16 ? (to_bf16 ? cast_elements<Bf16, Bf16> : cast_elements<Bf16, float>)
                            : (to_bf16 ? cast_elements<float, Bf16> : cast_elements<float, float>),
                  args, args.in_dtype, are_aligned(args.in, args.out), stream);
}

}  // namespace strata::gpu::cuda
