// The warp-wide operations, by the layouts of the PTX ISA.
#include "cuda_emulator/kernel.h"

#include <array>
#include <bit>
#include <cstring>

#include "cuda_emulator/block.h"

namespace strata::gpu::cuda::emulator {

namespace {

struct Exchange {
  uint64_t value;
  int source;
  uint64_t result;
};

struct Vote {
  bool predicate;
  unsigned result;
};

struct LoadMatrices {
  std::array<uint16_t, 8> row;
  uint32_t* out;
  int count;
  bool transposed;
};

struct Multiply {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

template <class T>
T& operand(Lane& lane) {
  return *static_cast<T*>(lane.operand);
}

void exchange_all(Lane* lanes) {
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    auto& mine = operand<Exchange>(lanes[i]);
    mine.result = operand<Exchange>(lanes[mine.source]).value;
  }
}

void vote_all(Lane* lanes) {
  unsigned ballot = 0;
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    if (operand<Vote>(lanes[i]).predicate) ballot |= 1U << i;
  }
  for (unsigned i = 0; i < kWarpLanes; ++i) operand<Vote>(lanes[i]).result = ballot;
}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix": lane 8 m + r gives row r of matrix m; a
// lane receives elements 2 (lane % 4) and the next of row lane / 4; with .trans of that column.
void load_all(Lane* lanes) {
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    const auto& mine = operand<LoadMatrices>(lanes[i]);
    const unsigned group = i / 4;
    const unsigned quad = i % 4;
    for (unsigned m = 0; m < static_cast<unsigned>(mine.count); ++m) {
      const auto element = [&](unsigned k) -> uint32_t {
        const unsigned row = mine.transposed ? 2 * quad + k : group;
        const unsigned column = mine.transposed ? group : 2 * quad + k;
        return operand<LoadMatrices>(lanes[8 * m + row]).row[column];
      };
      mine.out[m] = element(0) | element(1) << 16U;
    }
  }
}

float low(uint32_t pair) { return std::bit_cast<float>(pair << 16U); }
float high(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000U); }

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type". The order of the sum is
// not documented; here it is that of k, each product exact and each addition rounded.
void multiply_all(Lane* lanes) {
  std::array<std::array<float, 16>, 16> a;
  std::array<std::array<float, 8>, 16> b;
  std::array<std::array<float, 8>, 16> d;
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    const auto& mine = operand<Multiply>(lanes[i]);
    const unsigned group = i / 4;
    const unsigned pair = 2 * (i % 4);
    for (unsigned r = 0; r < 4; ++r) {
      auto* to = &a[group + r % 2 * 8][pair + r / 2 * 8];
      to[0] = low(mine.a[r]);
      to[1] = high(mine.a[r]);
    }
    for (unsigned r = 0; r < 2; ++r) {
      b[pair + 8 * r][group] = low(mine.b[r]);
      b[pair + 8 * r + 1][group] = high(mine.b[r]);
      d[group + 8 * r][pair] = mine.d[2 * r];
      d[group + 8 * r][pair + 1] = mine.d[2 * r + 1];
    }
  }
  for (unsigned row = 0; row < 16; ++row) {
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (unsigned i = 0; i < kWarpLanes; ++i) {
    const auto& mine = operand<Multiply>(lanes[i]);
    for (unsigned r = 0; r < 2; ++r) {
      mine.d[2 * r] = d[i / 4 + 8 * r][2 * (i % 4)];
      mine.d[2 * r + 1] = d[i / 4 + 8 * r][2 * (i % 4) + 1];
    }
  }
}

}  // namespace

void perform(Meeting meeting, Lane* lanes) {
  switch (meeting) {
    case Meeting::kExchange:
      return exchange_all(lanes);
    case Meeting::kVote:
      return vote_all(lanes);
    case Meeting::kLoadMatrices:
      return load_all(lanes);
    case Meeting::kMultiply:
      return multiply_all(lanes);
    case Meeting::kNone:
    case Meeting::kBlock:
    case Meeting::kWarp:
      return;
  }
}

void synchronize_block(const Location& where) {
  KernelRun::current().meet(Meeting::kBlock, nullptr, where);
}

void synchronize_warp(const Location& where) {
  KernelRun::current().meet(Meeting::kWarp, nullptr, where);
}

uint64_t exchange(uint64_t value, int source, const Location& where) {
  Exchange mine{value, source, 0};
  KernelRun::current().meet(Meeting::kExchange, &mine, where);
  return mine.result;
}

unsigned vote(bool predicate, const Location& where) {
  Vote mine{predicate, 0};
  KernelRun::current().meet(Meeting::kVote, &mine, where);
  return mine.result;
}

void load_matrices(uint32_t* out, int count, bool transposed, const void* row,
                   const Location& where) {
  LoadMatrices mine{{}, out, count, transposed};
  KernelRun& run = KernelRun::current();
  if (lane_index() < 8 * count) run.read_row(mine.row.data(), row, where);
  run.meet(Meeting::kLoadMatrices, &mine, where);
}

void multiply(float* d, const uint32_t* a, const uint32_t* b, const Location& where) {
  Multiply mine{d, a, b};
  KernelRun::current().meet(Meeting::kMultiply, &mine, where);
}

void copy_async(void* shared, const void* global, size_t size_bytes, bool valid,
                const Location& where) {
  KernelRun::current().copy_async(shared, global, size_bytes, valid, where);
}

void commit_copies() { KernelRun::current().commit_copies(); }

void wait_for_copies(int pending) { KernelRun::current().wait_for_copies(pending); }

void check_global(const void* pointer, size_t size_bytes, size_t alignment, const Location& where) {
  KernelRun::current().check_global(pointer, size_bytes, alignment, where);
}

std::byte* block_shared_memory() { return KernelRun::current().shared_memory(); }

int lane_index() { return KernelRun::current().lane_index(); }

}  // namespace strata::gpu::cuda::emulator
