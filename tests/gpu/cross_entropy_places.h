// The places of dlogits that CrossEntropyArgs allows and those that it forbids, for the tests of
// both devices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gpu/operators.h"

namespace strata::gpu {

inline constexpr int64_t kPlacesRows = 3;
inline constexpr int64_t kPlacesVocabulary = 8;
inline constexpr int64_t kPlacesStride = 10;  // of logits

struct DlogitsCase {
  const char* what;
  bool allowed;
  DType dtype;
  int64_t rows;
  int64_t offset_bytes;  // of dlogits from logits
  int64_t dlogits_stride;
};

/// Logits of 3 rows take 112 bytes; in bf16, gradients as far apart as logits have a stride of 20.
inline constexpr DlogitsCase kDlogitsCases[] = {
    {"bf16, each row over its logits", true, DType::kBf16, kPlacesRows, 0, 20},
    {"bf16, packed without gaps", true, DType::kBf16, kPlacesRows, 0, 8},
    {"bf16, packed by one element", true, DType::kBf16, kPlacesRows, 0, 19},
    {"bf16, further apart than logits", false, DType::kBf16, kPlacesRows, 0, 21},
    {"one row is not apart from any", true, DType::kBf16, 1, 0, 21},
    {"fp32, each row over its logits", true, DType::kF32, kPlacesRows, 0, 10},
    {"fp32, packed without gaps", true, DType::kF32, kPlacesRows, 0, 8},
    {"fp32, further apart than logits", false, DType::kF32, kPlacesRows, 0, 11},
    {"behind the last logit", true, DType::kF32, kPlacesRows, 112, 8},
    {"over the last logit", false, DType::kF32, kPlacesRows, 108, 8},
    {"in the second half of each row", false, DType::kBf16, kPlacesRows, 16, 20},
    {"before the first logit", true, DType::kF32, kPlacesRows, -112, 10},
    {"over the first logit", false, DType::kF32, kPlacesRows, -108, 10},
};

/// The arguments of a case, of memory that `logits` has in its middle third.
struct DlogitsArgs {
  explicit DlogitsArgs(const DlogitsCase& c)
      : memory(360), targets(kPlacesRows, 1), losses(kPlacesRows) {
    float* logits = memory.data() + 120;
    args = {.rows = c.rows,
            .vocabulary = kPlacesVocabulary,
            .dtype = c.dtype,
            .logits = logits,
            .logits_stride = kPlacesStride,
            .targets = targets.data(),
            .loss_sum = &loss,
            .dlogits = reinterpret_cast<std::byte*>(logits) + c.offset_bytes,
            .dlogits_stride = c.dlogits_stride,
            .scratch = losses.data()};
  }
  std::vector<float> memory;
  std::vector<int32_t> targets;
  std::vector<double> losses;
  double loss = 0;
  CrossEntropyArgs args;
};

}  // namespace strata::gpu
