#include "cuda_emulator/test_kernels.h"

#include <stdexcept>

#include "gpu/cuda/launch.cuh"
#include "gpu/cuda/ptx.cuh"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace strata::gpu::cuda::emulator::test {

namespace {

constexpr unsigned kThreads = 64;

__global__ void multiply_kernel(float* d, const uint32_t* a, const uint32_t* b) {
  const unsigned lane = threadIdx.x;
  uint32_t fragment_a[4];
  uint32_t fragment_b[2];
  float fragment_d[4];
  for (int i = 0; i < 4; ++i) fragment_a[i] = a[4 * lane + i];
  for (int i = 0; i < 2; ++i) fragment_b[i] = b[2 * lane + i];
  for (int i = 0; i < 4; ++i) fragment_d[i] = d[4 * lane + i];
  ptx::mma_m16n8k16_bf16(fragment_d, fragment_a, fragment_b);
  for (int i = 0; i < 4; ++i) d[4 * lane + i] = fragment_d[i];
}

__global__ void load_kernel(uint32_t* out, const uint16_t* shared, int shared_rows, const int* rows,
                            int count, bool transposed) {
  auto* memory = reinterpret_cast<uint16_t*>(shared_memory());
  const unsigned lane = threadIdx.x;
  for (int row = static_cast<int>(lane); row < shared_rows; row += 32) {
    for (int i = 0; i < 8; ++i) memory[8 * row + i] = shared[8 * row + i];
  }
  __syncwarp();
  const uint16_t* mine = memory + 8 * rows[lane];
  uint32_t four[4];
  uint32_t two[2];
  if (count == 4 && transposed) ptx::ldmatrix_x4_trans(four, mine);
  if (count == 4 && !transposed) ptx::ldmatrix_x4(four, mine);
  if (count == 2 && transposed) ptx::ldmatrix_x2_trans(two, mine);
  if (count == 2 && !transposed) ptx::ldmatrix_x2(two, mine);
  for (int i = 0; i < count; ++i) {
    out[static_cast<int>(lane) * count + i] = count == 4 ? four[i] : two[i % 2];
  }
}

__global__ void shuffle_kernel(ShuffleResults* out, int lane, int mask, int delta,
                               unsigned predicates) {
  const unsigned me = threadIdx.x;
  const bool predicate = (predicates >> me & 1U) != 0;
  out->indexed[me] = ptx::shuffle(static_cast<float>(me) + 0.5F, lane);
  out->exclusive_or[me] = ptx::shuffle_xor(1.0 / (me + 1), mask);
  out->down[me] = ptx::shuffle_down(uint64_t{me} << 40U, delta);
  out->up[me] = ptx::shuffle_up(-static_cast<int>(me), delta);
  out->ballots[me] = ptx::ballot(predicate);
  out->any[me] = ptx::any(predicate) ? 1 : 0;
  out->all[me] = ptx::all(predicate) ? 1 : 0;
}

__global__ void scalar_kernel(uint32_t* out, const float* x, const float* y, int count) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= count) return;
  uint32_t* mine = out + kScalarResults * static_cast<int64_t>(i);
  mine[0] = __float_as_uint(ptx::exp2_approx(x[i]));
  mine[1] = __float_as_uint(ptx::log2_approx(x[i]));
  mine[2] = __float_as_uint(ptx::reciprocal_approx(x[i]));
  mine[3] = ptx::pack_bf16(x[i], y[i]);
  mine[4] = __float_as_uint(ptx::add_rn(x[i], y[i]));
  mine[5] = __float_as_uint(ptx::sub_rn(x[i], y[i]));
  mine[6] = __float_as_uint(ptx::mul_rn(x[i], y[i]));
  mine[7] = __float_as_uint(ptx::div_rn(x[i], y[i]));
  mine[8] = __float_as_uint(ptx::sqrt_rn(x[i]));
  mine[9] = __float_as_uint(ptx::fma_rn(x[i], y[i], x[i]));
}

__global__ void index_kernel(uint64_t* out) {
  const uint64_t block = blockIdx.x + uint64_t{gridDim.x} * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint64_t thread =
      threadIdx.x + uint64_t{blockDim.x} * (threadIdx.y + blockDim.y * threadIdx.z);
  const uint64_t threads = uint64_t{blockDim.x} * blockDim.y * blockDim.z;
  uint64_t* mine = out + 2 * (block * threads + thread);
  mine[0] = threadIdx.x + 1000 * (threadIdx.y + uint64_t{1000} * threadIdx.z);
  mine[1] = blockIdx.x + 1000 * (blockIdx.y + uint64_t{1000} * blockIdx.z);
}

__global__ void reverse_kernel(int* out, const int* in, int barriers) {
  auto* buffer = reinterpret_cast<int*>(shared_memory());
  const unsigned me = threadIdx.x;
  const unsigned begin = blockIdx.x * kThreads;
  int value = in[begin + me];
  for (int round = 0; round < 3; ++round) {
    buffer[me] = value;
    if (barriers >= 1) __syncthreads();
    value = buffer[kThreads - 1 - me];
    if (barriers >= 2) __syncthreads();
  }
  out[begin + me] = value;
}

__global__ void reverse_warp_kernel(int* out, const int* in, bool synchronized) {
  auto* buffer = reinterpret_cast<int*>(shared_memory());
  buffer[threadIdx.x] = in[threadIdx.x];
  if (synchronized) __syncwarp();
  out[threadIdx.x] = buffer[31 - threadIdx.x];
}

__global__ void pipeline_kernel(uint4* out, const uint4* in, int tiles, Pipeline pipeline) {
  std::byte* buffers = shared_memory();
  const unsigned me = threadIdx.x;
  const unsigned other = kThreads - 1 - me;  // Copied by one thread, read by another.
  const auto begin_copy = [&](int tile) {
    if (tile < tiles) {
      ptx::cp_async_16(buffers + (tile % 2 * kThreads + me) * 16, in + tile * kThreads + me);
    }
    ptx::cp_async_commit();
  };
  begin_copy(0);
  for (int tile = 0; tile < tiles; ++tile) {
    begin_copy(tile + 1);
    if (pipeline == Pipeline::kWaitTooFew) {
      ptx::cp_async_wait<2>();
    } else if (pipeline != Pipeline::kNoWait) {
      ptx::cp_async_wait<1>();
    }
    __syncthreads();
    uint4 value;
    memcpy(&value, buffers + (tile % 2 * kThreads + other) * 16, 16);
    out[tile * kThreads + other] = value;
    if (pipeline != Pipeline::kNoBarrierBeforeReuse) __syncthreads();
  }
}

__global__ void zero_fill_kernel(uint4* out, const uint4* in) {
  std::byte* mine = shared_memory() + threadIdx.x * 16;
  const bool valid = threadIdx.x % 2 == 0;
  ptx::cp_async_16(mine, valid ? in + threadIdx.x : nullptr, valid);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  memcpy(out + threadIdx.x, mine, 16);
}

__global__ void mistake_kernel(Mistake mistake, std::byte* memory, size_t size_bytes) {
  std::byte* shared = shared_memory();
  const unsigned me = threadIdx.x;
  uint32_t fragment[4];
  uint4 on_stack[2] = {};
  switch (mistake) {
    case Mistake::kDivergentBarrier:
      if (me < 40) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case Mistake::kExitBeforeBarrier:
      if (me == 63) return;
      __syncthreads();
      break;
    case Mistake::kExitBeforeShuffle:
      if (me == 5) return;
      memory[me] = static_cast<std::byte>(ptx::shuffle_xor(static_cast<int>(me), 1));
      break;
    case Mistake::kBarrierAgainstShuffle:
      if (me == 7) __syncthreads();
      memory[me] = static_cast<std::byte>(ptx::shuffle_xor(static_cast<int>(me), 1));
      break;
    case Mistake::kTwoShuffles:
      if (me % 2 == 0) {
        memory[me] = static_cast<std::byte>(ptx::shuffle_xor(static_cast<int>(me), 1));
      } else {
        memory[me] = static_cast<std::byte>(ptx::shuffle_xor(static_cast<int>(me), 2));
      }
      break;
    case Mistake::kPartialWarp:
      memory[me] = static_cast<std::byte>(ptx::shuffle_xor(static_cast<int>(me), 1));
      break;
    case Mistake::kSharedWriteAfter:
      if (me == 0) shared[1024] = std::byte{1};
      break;
    case Mistake::kSharedWriteBefore:
      if (me == 0) *(shared - 1) = std::byte{1};
      break;
    case Mistake::kLoadPastEnd:
      if (me == 9) ptx::store_16(memory, ptx::load_16(memory + size_bytes - 8));
      break;
    case Mistake::kStorePastEnd:
      if (me == 9) ptx::store_16(memory + size_bytes + 8, uint4{});
      break;
    case Mistake::kMisaligned:
      ptx::store_16(memory + 8, uint4{});
      break;
    case Mistake::kAsyncFromHost:
      ptx::cp_async_16(shared + 16 * me, on_stack);
      break;
    case Mistake::kAsyncPastShared:
      ptx::cp_async_16(shared + 16 * (me + 1), memory);
      break;
    case Mistake::kMatrixPastShared:
      ptx::ldmatrix_x4(fragment, shared + 1024 - 16 * 30 + 16 * (me % 32));
      memory[me] = static_cast<std::byte>(fragment[0]);
      break;
    case Mistake::kThrows:
      if (me == 33) throw std::runtime_error("out of patience");
      break;
  }
}

__global__ void probe_kernel(unsigned* caught) {
#if defined(__SANITIZE_ADDRESS__)
  const std::byte* shared = shared_memory();
  *caught = static_cast<unsigned>(__asan_address_is_poisoned(shared - 1) +
                                  __asan_address_is_poisoned(shared + 100) +
                                  2 * (1 - __asan_address_is_poisoned(shared)) +
                                  2 * (1 - __asan_address_is_poisoned(shared + 99)));
#else
  *caught = 6;
#endif
}

__global__ void uninitialized_kernel(float* out) {
  auto* shared = reinterpret_cast<float*>(shared_memory());
  out[blockIdx.x * kThreads + threadIdx.x] = shared[threadIdx.x];
  shared[threadIdx.x] = 0;  // Not for the next block to find.
}

__global__ void poke_kernel(std::byte* memory, int64_t offset) { memory[offset] = std::byte{1}; }

__global__ void ticket_kernel(unsigned* out, unsigned* counter) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1U);
}

__global__ void step_kernel(unsigned* x, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) x[i] = x[i] * 3 + 1;
}

__global__ void nothing_kernel() {}

}  // namespace

void multiply_fragments(float* d, const uint32_t* a, const uint32_t* b, cudaStream_t stream) {
  launch("multiply_fragments", multiply_kernel, 1, 32, 0, stream, d, a, b);
}

void load_fragments(uint32_t* out, const uint16_t* shared, int shared_rows, const int* rows,
                    int count, bool transposed, cudaStream_t stream) {
  launch("load_fragments", load_kernel, 1, 32, static_cast<size_t>(shared_rows) * 16, stream, out,
         shared, shared_rows, rows, count, transposed);
}

void shuffles(ShuffleResults* out, int lane, int mask, int delta, unsigned predicates,
              cudaStream_t stream) {
  launch("shuffles", shuffle_kernel, 1, 32, 0, stream, out, lane, mask, delta, predicates);
}

void scalars(uint32_t* out, const float* x, const float* y, int count, cudaStream_t stream) {
  launch("scalars", scalar_kernel, grid_size(count, kThreads), kThreads, 0, stream, out, x, y,
         count);
}

void indices(uint64_t* out, dim3 grid, dim3 block, cudaStream_t stream) {
  launch("indices", index_kernel, grid, block, 0, stream, out);
}

void reverse_thrice(int* out, const int* in, unsigned blocks, int barriers, cudaStream_t stream) {
  launch("reverse_thrice", reverse_kernel, blocks, kThreads, kThreads * sizeof(int), stream, out,
         in, barriers);
}

void reverse_warp(int* out, const int* in, bool synchronized, cudaStream_t stream) {
  launch("reverse_warp", reverse_warp_kernel, 1, 32, 32 * sizeof(int), stream, out, in,
         synchronized);
}

void pipelined_copy(uint4* out, const uint4* in, int tiles, Pipeline pipeline,
                    cudaStream_t stream) {
  launch("pipelined_copy", pipeline_kernel, 1, kThreads, 2 * kThreads * 16, stream, out, in, tiles,
         pipeline);
}

void zero_filled_copy(uint4* out, const uint4* in, cudaStream_t stream) {
  launch("zero_filled_copy", zero_fill_kernel, 1, 32, 32 * 16, stream, out, in);
}

void make_mistake(Mistake mistake, std::byte* memory, size_t size_bytes, cudaStream_t stream) {
  launch("make_mistake", mistake_kernel, dim3(1, 2), mistake == Mistake::kPartialWarp ? 40 : 64,
         1024, stream, mistake, memory, size_bytes);
}

void probe_shared_ends(unsigned* caught, cudaStream_t stream) {
  launch("probe_shared_ends", probe_kernel, 1, 1, 100, stream, caught);
}

void read_uninitialized(float* out, cudaStream_t stream) {
  launch("read_uninitialized", uninitialized_kernel, 2, kThreads, kThreads * sizeof(float), stream,
         out);
}

void poke(std::byte* memory, int64_t offset, cudaStream_t stream) {
  launch("poke", poke_kernel, 1, 1, 0, stream, memory, offset);
}

void tickets(unsigned* out, unsigned* counter, unsigned blocks, cudaStream_t stream) {
  launch("tickets", ticket_kernel, blocks, kThreads, 0, stream, out, counter);
}

void step(unsigned* x, int64_t count, cudaStream_t stream) {
  launch("step", step_kernel, grid_size(count, kThreads), kThreads, 0, stream, x, count);
}

void nothing(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  launch("nothing", nothing_kernel, grid, block, shared_bytes, stream);
}

}  // namespace strata::gpu::cuda::emulator::test
