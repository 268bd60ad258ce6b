// A rank's shard of one unit's state of one kind, addressed as if the rank held all of the unit: by
// the bytes that one rank alone would have. So what is saved does not depend on how many ranks
// save.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "pipeline/state_access.h"

namespace strata::train {

/// Holds nothing of the state itself. `access` must outlive it.
class UnitState {
 public:
  UnitState(pipeline::StateAccess& access, int unit, pipeline::StateKind kind, DType dtype);

  /// Of the unit's bytes, those of this rank: from begin_bytes to end_bytes. None where the rank's
  /// shard is empty, or it keeps no such state.
  [[nodiscard]] size_t begin_bytes() const noexcept { return begin_bytes_; }
  [[nodiscard]] size_t end_bytes() const noexcept { return end_bytes_; }

  /// A range within them. Bytes of a kInt8 moment that mean nothing are as the rank has them where
  /// it holds the whole unit, and zeros otherwise.
  void read(size_t begin_bytes, std::span<std::byte> out);
  void write(size_t begin_bytes, std::span<const std::byte> data);

 private:
  /// Calls `direct` and `tail` with what of a range lies before the last chunk and in it: the
  /// offset from where that begins, and a range of `size_bytes`' positions.
  template <class Direct, class Tail>
  void split(size_t begin_bytes, size_t size_bytes, Direct&& direct, Tail&& tail) const;
  void read_tail();
  void write_tail();

  pipeline::StateAccess& access_;
  int unit_;
  pipeline::StateKind kind_;
  size_t begin_bytes_ = 0, end_bytes_ = 0;
  // A padded shard has whole chunks of int8 codes, and a unit that ends within one a shorter chunk,
  // whose scales follow its codes sooner.
  size_t direct_end_bytes_ = 0;  // from here on the layouts differ
  int64_t tail_elements_ = 0;
  std::vector<std::byte> tail_, padded_tail_;  // the last chunk in both
};

}  // namespace strata::train
