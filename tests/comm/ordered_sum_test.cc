#include "comm/ordered_sum.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/bf16.h"
#include "catch.h"
#include "comm/collectives.h"

namespace strata::comm {
namespace {

TEST_CASE("ordered sum: goes from left to right in fp32 and is rounded once") {
  // (1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1.
  const float big = 1e8F;
  const float one = 1;
  const float minus = -1e8F;
  float out = 7;
  const void* left[] = {&big, &one, &minus};
  sum_in_order(left, 3, 1, DType::kF32, &out);
  CHECK(out == 0);
  const void* right[] = {&big, &minus, &one};
  sum_in_order(right, 3, 1, DType::kF32, &out);
  CHECK(out == 1);

  // 1 + 2^-9 + 2^-9 is 1 + 2^-8, halfway to the next bf16, 1 + 2^-7: to the even 1. With another
  // 2^-9 it is above halfway. Rounded at each step it would stay 1.
  const Bf16 unit = to_bf16(1);
  const Bf16 small = to_bf16(0x1p-9F);
  Bf16 rounded{};
  const void* halves[] = {&unit, &small, &small, &small};
  sum_in_order(halves, 3, 1, DType::kBf16, &rounded);
  CHECK(to_float(rounded) == 1);
  sum_in_order(halves, 4, 1, DType::kBf16, &rounded);
  CHECK(to_float(rounded) == 1 + 0x1p-7F);
}

TEST_CASE("ordered sum: has the reference's bits for every size, also over one of its inputs") {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t count : {0, 1, 511, 512, 513, 1024, 1500}) {
      for (const int ranks : {1, 2, 5}) {
        const std::vector<std::byte> expected =
            expected_sum(static_cast<uint64_t>(count), ranks, count, dtype);
        for (int over = -1; over < ranks; ++over) {
          std::vector<std::vector<std::byte>> memory;
          std::vector<const void*> inputs;
          for (int rank = 0; rank < ranks; ++rank) {
            const auto values = rank_values(static_cast<uint64_t>(count), rank, count, dtype);
            std::vector<std::byte> bytes(static_cast<size_t>(count) * size_of(dtype));
            for (size_t i = 0; i < values.size(); ++i) {
              const Bf16 narrow = to_bf16(values[i]);
              std::memcpy(bytes.data() + i * size_of(dtype),
                          dtype == DType::kBf16 ? static_cast<const void*>(&narrow) : &values[i],
                          size_of(dtype));
            }
            memory.push_back(std::move(bytes));
          }
          for (const auto& bytes : memory) inputs.push_back(bytes.data());
          std::vector<std::byte> apart(expected.size());
          std::vector<std::byte>& out = over < 0 ? apart : memory[static_cast<size_t>(over)];
          sum_in_order(inputs.data(), ranks, count, dtype, out.data());
          INFO(count << " of " << ranks << " ranks over " << over);
          CHECK(out == expected);
        }
      }
    }
  }
}

TEST_CASE("ordered sum: what is not finite stays so") {
  const float infinity = std::numeric_limits<float>::infinity();
  const float minus = -infinity;
  float out = 0;
  const void* opposite[] = {&infinity, &minus};
  sum_in_order(opposite, 2, 1, DType::kF32, &out);
  CHECK(std::isnan(out));
  const Bf16 largest{0x7f7f};
  Bf16 rounded{};
  const void* twice[] = {&largest, &largest};
  sum_in_order(twice, 2, 1, DType::kBf16, &rounded);
  CHECK(std::isinf(to_float(rounded)));
}

TEST_CASE("blocks of ranks: cover an array once, in order") {
  for (const int64_t count : {0, 1, 2, 3, 7, 8, 9, 1000}) {
    for (const int ranks : {1, 2, 3, 4, 7, 16}) {
      int64_t end = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Block block = block_of(count, ranks, rank);
        CHECK(block.first == end);
        CHECK(block.count >= 0);
        CHECK(block.count <= (count + ranks - 1) / ranks);
        end += block.count;
      }
      CHECK(end == count);
    }
  }
}

}  // namespace
}  // namespace strata::comm
