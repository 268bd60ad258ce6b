// Where the gradients of cross_entropy lie: what both devices must know before they begin.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "gpu/operators.h"

namespace strata::gpu {

/// The places that CrossEntropyArgs allows for dlogits.
enum class DlogitsPlace : uint8_t {
  kNone,
  kApart,
  kOverRows,  // each row within its logits: rows do not touch each other
  kPacked     // over logits, also those of earlier rows
};

/// Any other place is a programmer's error.
[[nodiscard]] inline DlogitsPlace dlogits_place(const CrossEntropyArgs& args) {
  if (args.dlogits == nullptr || args.rows <= 0) return DlogitsPlace::kNone;
  const int64_t size = static_cast<int64_t>(size_of(args.dtype));
  const int64_t logits_row = args.logits_stride * int64_t{sizeof(float)};
  const int64_t dlogits_row = args.dlogits_stride * size;
  if (args.dlogits != args.logits) {
    const auto span = [&](int64_t row_bytes, int64_t element_bytes) {
      return static_cast<uintptr_t>((args.rows - 1) * row_bytes + args.vocabulary * element_bytes);
    };
    const auto logits = reinterpret_cast<uintptr_t>(args.logits);
    const auto dlogits = reinterpret_cast<uintptr_t>(args.dlogits);
    STRATA_CHECK(dlogits + span(dlogits_row, size) <= logits ||
                     logits + span(logits_row, sizeof(float)) <= dlogits,
                 "dlogits must be logits or lie apart from it");
    return DlogitsPlace::kApart;
  }
  if (args.rows == 1 || dlogits_row == logits_row) return DlogitsPlace::kOverRows;
  STRATA_CHECK(dlogits_row <= logits_row,
               "rows of dlogits in the place of logits must not be further apart than theirs");
  return DlogitsPlace::kPacked;
}

}  // namespace strata::gpu
