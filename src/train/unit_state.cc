#include "train/unit_state.h"

#include <algorithm>

#include "base/error.h"

namespace strata::train {

using cpu_adam::kChunkElements;
using cpu_adam::kMomentBlock;
using cpu_adam::MomentFormat;
using pipeline::StateKind;

UnitState::UnitState(pipeline::StateAccess& access, int unit, StateKind kind, DType dtype)
    : access_(access), unit_(unit), kind_(kind) {
  const pipeline::ElementRange shard = access.shard(unit);
  const size_t kept_bytes = access.state_size_bytes(unit, kind);
  if (shard.count == 0 || kept_bytes == 0) return;
  const auto bytes_of = [&](int64_t count) {
    return pipeline::state_bytes(kind, count, dtype, access.moments());
  };
  const bool is_int8 = (kind == StateKind::kMoment1 || kind == StateKind::kMoment2) &&
                       access.moments() == MomentFormat::kInt8;
  STRATA_CHECK(!is_int8 || shard.first % kChunkElements == 0,
               "a shard of int8 moments begins with a chunk");
  begin_bytes_ = bytes_of(shard.first);
  end_bytes_ = bytes_of(shard.first + shard.count);
  direct_end_bytes_ = end_bytes_;
  STRATA_CHECK(kept_bytes >= end_bytes_ - begin_bytes_, "a shard's state is all there");
  if (!is_int8 || kept_bytes == bytes_of(shard.count)) return;
  STRATA_CHECK(kept_bytes % bytes_of(kChunkElements) == 0, "a padded shard has whole chunks");
  tail_elements_ = shard.count % kChunkElements;
  if (tail_elements_ == 0) return;
  tail_.resize(bytes_of(tail_elements_));
  padded_tail_.resize(bytes_of(kChunkElements));
  direct_end_bytes_ = end_bytes_ - tail_.size();
}

template <class Direct, class Tail>
void UnitState::split(size_t begin_bytes, size_t size_bytes, Direct&& direct, Tail&& tail) const {
  STRATA_CHECK(begin_bytes >= begin_bytes_ && begin_bytes + size_bytes <= end_bytes_,
               "a range of the rank's shard");
  const size_t before =
      std::min(size_bytes, direct_end_bytes_ - std::min(begin_bytes, direct_end_bytes_));
  if (before > 0) direct(begin_bytes - begin_bytes_, before);
  if (before < size_bytes) tail(begin_bytes + before - direct_end_bytes_, before);
}

void UnitState::read(size_t begin_bytes, std::span<std::byte> out) {
  split(
      begin_bytes, out.size(),
      [&](size_t offset, size_t size) {
        access_.read_state(unit_, kind_, offset, out.first(size));
      },
      [&](size_t offset, size_t done) {
        read_tail();
        const auto from = std::span(tail_).subspan(offset, out.size() - done);
        std::copy(from.begin(), from.end(), out.begin() + static_cast<std::ptrdiff_t>(done));
      });
}

void UnitState::write(size_t begin_bytes, std::span<const std::byte> data) {
  split(
      begin_bytes, data.size(),
      [&](size_t offset, size_t size) {
        access_.write_state(unit_, kind_, offset, data.first(size));
      },
      [&](size_t offset, size_t done) {
        if (offset > 0 || data.size() - done < tail_.size()) read_tail();
        std::copy(data.begin() + static_cast<std::ptrdiff_t>(done), data.end(),
                  tail_.begin() + static_cast<std::ptrdiff_t>(offset));
        write_tail();
      });
}

void UnitState::read_tail() {
  access_.read_state(unit_, kind_, direct_end_bytes_ - begin_bytes_, padded_tail_);
  const auto blocks = (tail_elements_ + kMomentBlock - 1) / kMomentBlock;
  std::fill(tail_.begin(), tail_.end(), std::byte{0});
  std::copy_n(padded_tail_.begin(), tail_elements_, tail_.begin());
  std::copy_n(padded_tail_.begin() + kChunkElements, blocks, tail_.begin() + blocks * kMomentBlock);
}

void UnitState::write_tail() {
  const auto blocks = (tail_elements_ + kMomentBlock - 1) / kMomentBlock;
  std::fill(padded_tail_.begin(), padded_tail_.end(), std::byte{0});
  std::copy_n(tail_.begin(), tail_elements_, padded_tail_.begin());
  std::copy_n(tail_.begin() + blocks * kMomentBlock, blocks, padded_tail_.begin() + kChunkElements);
  access_.write_state(unit_, kind_, direct_end_bytes_ - begin_bytes_, padded_tail_);
}

}  // namespace strata::train
