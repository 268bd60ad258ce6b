// Every fp32 pattern there is, through the split master and a step that does not move it.
#include <atomic>
#include <numeric>
#include <vector>

#include "base/parallel.h"
#include "catch.h"
#include "cpu_adam/split_master_fixture.h"

namespace strata::cpu_adam {
namespace {

TEST_CASE("all 2^32 fp32 patterns survive split, join and a step that does not move them") {
  constexpr int64_t kParts = 64;
  constexpr size_t kElements = kChunkElements;
  constexpr uint32_t kChunksOfPart = 2048;
  static_assert(kParts * kChunksOfPart * kElements == size_t{1} << 32);
  std::atomic<size_t> wrong = 0;
  tbb::task_arena arena;
  for_each_index(arena, kParts, [&](int64_t part) {
    StillParameters parameters(kElements, DType::kBf16, MomentFormat::kF32);
    std::vector<uint32_t> patterns(kElements);
    for (uint32_t chunk = 0; chunk < kChunksOfPart; ++chunk) {
      const auto first =
          (static_cast<uint32_t>(part) * kChunksOfPart + chunk) * uint32_t{kElements};
      std::iota(patterns.begin(), patterns.end(), first);
      wrong += parameters.count_wrong(patterns);
    }
  });
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace strata::cpu_adam
