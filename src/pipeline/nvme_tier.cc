#include "pipeline/nvme_tier.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"

namespace strata::pipeline {

/// The records, and before them the cache of one part of each kind.
class NvmeTier::Impl {
 public:
  Impl(const Plan& plan, const NvmeOptions& options, std::span<std::byte> host_arena)
      : records_(plan, options, host_arena), home_(plan.buffers.home) {}

  void submit(BufferId buffer, const NvmeRecords::Request& request) {
    require_flushed();
    ++uses_;
    records_.submit(records_.of(buffer), request);
  }
  void set_cache(const StateCache& cache);
  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out);
  void write_state(int unit, StateKind kind, size_t offset_bytes, std::span<const std::byte> data);
  void flush();
  void commit(std::span<const std::byte> metadata) {
    require_flushed();
    records_.commit(metadata);
  }
  void discard_shadows() {
    cached_.fill({});
    records_.discard_shadows();
  }

  [[nodiscard]] NvmeRecords& records() noexcept { return records_; }
  [[nodiscard]] nvme::Store& store() noexcept { return records_.store(); }

 private:
  struct CachedPart {
    int unit = -1;  // -1: nothing
    size_t part = 0;
    uint64_t uses = 0;  // what uses_ was when the part was put there
    bool is_dirty = false;
  };
  /// What of a range of state lies in one part.
  struct Piece {
    size_t part, offset_bytes, size_bytes;
  };

  [[nodiscard]] NvmeRecord& record(int unit, StateKind kind);
  [[nodiscard]] static Piece piece_at(const NvmeRecord& record, size_t offset_bytes,
                                      size_t size_bytes);
  /// The part's bytes in the cache, there for the taking where not `load`.
  [[nodiscard]] std::byte* cache_part(int unit, StateKind kind, size_t part, bool load);
  void write_back(StateKind kind);
  void require_flushed() const {
    STRATA_CHECK(std::none_of(cached_.begin(), cached_.end(),
                              [](const CachedPart& part) { return part.is_dirty; }),
                 "what was written to state was not flushed");
  }

  NvmeRecords records_;
  const std::vector<std::array<BufferId, kStateKinds>> home_;
  StateCache cache_{};
  std::array<CachedPart, kStateKinds> cached_{};
  // Requests of tasks. What is in the cache does not outlast one: it may have written to the part,
  // or to the memory, which is lent.
  std::atomic<uint64_t> uses_ = 0;
};

void NvmeTier::Impl::set_cache(const StateCache& cache) {
  require_flushed();
  for (const NvmeRecord& record : records_.all()) {
    if (record.parts() == 0) continue;
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      if (traffic_of(static_cast<StateKind>(kind)) != record.spec.kind || cache[kind].empty()) {
        continue;
      }
      const size_t largest = std::max(record.bytes_of(0), record.bytes_of(record.parts() - 1));
      STRATA_CHECK(std::bit_cast<uintptr_t>(cache[kind].data()) % kDriveAlignment == 0 &&
                       cache[kind].size() >= align_up(largest, kDriveAlignment),
                   "the cache holds one part of each kind");
    }
  }
  cache_ = cache;
  cached_.fill({});
}

NvmeRecord& NvmeTier::Impl::record(int unit, StateKind kind) {
  STRATA_CHECK(unit >= 0 && static_cast<size_t>(unit) < home_.size(), "no such unit");
  return records_.of(home_[static_cast<size_t>(unit)][static_cast<size_t>(kind)]);
}

NvmeTier::Impl::Piece NvmeTier::Impl::piece_at(const NvmeRecord& record, size_t offset_bytes,
                                               size_t size_bytes) {
  const size_t part = std::min(offset_bytes / record.part_bytes, record.parts() - 1);
  const size_t within = offset_bytes - part * record.part_bytes;
  STRATA_CHECK(within < record.bytes_of(part), "a range beyond the end of its state");
  return {part, within, std::min(size_bytes, record.bytes_of(part) - within)};
}

void NvmeTier::Impl::read_state(int unit, StateKind kind, size_t offset_bytes,
                                std::span<std::byte> out) {
  const NvmeRecord& of = record(unit, kind);
  while (!out.empty()) {
    const Piece piece = piece_at(of, offset_bytes, out.size());
    const std::byte* part = cache_part(unit, kind, piece.part, true);
    std::memcpy(out.data(), part + piece.offset_bytes, piece.size_bytes);
    out = out.subspan(piece.size_bytes);
    offset_bytes += piece.size_bytes;
  }
}

void NvmeTier::Impl::write_state(int unit, StateKind kind, size_t offset_bytes,
                                 std::span<const std::byte> data) {
  const NvmeRecord& of = record(unit, kind);
  while (!data.empty()) {
    const Piece piece = piece_at(of, offset_bytes, data.size());
    const bool is_whole = piece.size_bytes == of.bytes_of(piece.part);
    std::byte* part = cache_part(unit, kind, piece.part, !is_whole);
    std::memcpy(part + piece.offset_bytes, data.data(), piece.size_bytes);
    cached_[static_cast<size_t>(kind)].is_dirty = true;
    data = data.subspan(piece.size_bytes);
    offset_bytes += piece.size_bytes;
  }
}

std::byte* NvmeTier::Impl::cache_part(int unit, StateKind kind, size_t part, bool load) {
  const auto index = static_cast<size_t>(kind);
  CachedPart& cached = cached_[index];
  STRATA_CHECK(!cache_[index].empty(), "no cache was lent for this kind of state");
  std::byte* data = cache_[index].data();
  if (cached.unit == unit && cached.part == part && cached.uses == uses_) return data;
  write_back(kind);
  cached = {};
  if (load) records_.read_part(record(unit, kind), part, data);
  cached = {unit, part, uses_, false};
  return data;
}

void NvmeTier::Impl::write_back(StateKind kind) {
  CachedPart& cached = cached_[static_cast<size_t>(kind)];
  if (!cached.is_dirty) return;
  records_.write_part(record(cached.unit, kind), cached.part,
                      cache_[static_cast<size_t>(kind)].data());
  cached.is_dirty = false;
}

void NvmeTier::Impl::flush() {
  for (size_t kind = 0; kind < kStateKinds; ++kind) write_back(static_cast<StateKind>(kind));
  cached_.fill({});
}

NvmeTier::NvmeTier(const Plan& plan, const NvmeOptions& options, std::span<std::byte> host_arena)
    : impl_(std::make_unique<Impl>(plan, options, host_arena)) {}
NvmeTier::~NvmeTier() = default;

void NvmeTier::read_async(BufferId buffer, size_t offset_bytes, std::byte* data, size_t size_bytes,
                          nvme::Priority priority, uint64_t tag, nvme::StoreSink sink) {
  impl_->submit(buffer, {.operation = nvme::Operation::kRead,
                         .offset_bytes = offset_bytes,
                         .data = data,
                         .size_bytes = size_bytes,
                         .priority = priority,
                         .tag = tag,
                         .sink = sink});
}

void NvmeTier::write_async(BufferId buffer, size_t offset_bytes, const std::byte* data,
                           size_t size_bytes, nvme::Priority priority, uint64_t tag,
                           nvme::StoreSink sink) {
  impl_->submit(buffer, {.operation = nvme::Operation::kWrite,
                         .offset_bytes = offset_bytes,
                         .data = const_cast<std::byte*>(data),  // a write only reads from it
                         .size_bytes = size_bytes,
                         .priority = priority,
                         .tag = tag,
                         .sink = sink});
}

void NvmeTier::set_cache(const StateCache& cache) { impl_->set_cache(cache); }
void NvmeTier::read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out) {
  impl_->read_state(unit, kind, offset_bytes, out);
}
void NvmeTier::write_state(int unit, StateKind kind, size_t offset_bytes,
                           std::span<const std::byte> data) {
  impl_->write_state(unit, kind, offset_bytes, data);
}
void NvmeTier::flush() { impl_->flush(); }
void NvmeTier::commit(std::span<const std::byte> metadata) { impl_->commit(metadata); }
void NvmeTier::discard_shadows() { impl_->discard_shadows(); }
bool NvmeTier::has_shadows() const { return impl_->records().has_shadows(); }

uint64_t NvmeTier::generation() const noexcept { return impl_->store().generation(); }
std::span<const std::byte> NvmeTier::metadata() const noexcept { return impl_->store().metadata(); }

std::array<nvme::TrafficBytes, nvme::kTrafficKinds> NvmeTier::traffic() const {
  std::array<nvme::TrafficBytes, nvme::kTrafficKinds> sums{};
  const auto add = [&](const nvme::Store& store) {
    for (size_t d = 0; d < store.drives(); ++d) {
      const nvme::DriveStatistics statistics = store.drive(d).statistics();
      for (size_t kind = 0; kind < sums.size(); ++kind) {
        sums[kind].read += statistics.bytes[kind].read;
        sums[kind].written += statistics.bytes[kind].written;
      }
    }
  };
  add(impl_->store());
  if (const nvme::Store* scratch = impl_->records().scratch_store()) add(*scratch);
  return sums;
}

uint64_t NvmeTier::bytes_read() const {
  uint64_t sum = 0;
  for (const nvme::TrafficBytes& kind : traffic()) sum += kind.read;
  return sum;
}

uint64_t NvmeTier::bytes_written() const {
  uint64_t sum = 0;
  for (const nvme::TrafficBytes& kind : traffic()) sum += kind.written;
  return sum;
}

uint64_t NvmeTier::bytes_written_total() const noexcept {
  return static_cast<uint64_t>(impl_->store().bytes_written_total());
}
const std::vector<std::string>& NvmeTier::notes() const noexcept { return impl_->store().notes(); }
std::optional<std::string> NvmeTier::first_error() const {
  const nvme::Store* scratch = impl_->records().scratch_store();
  const auto error = impl_->store().first_error();
  return error || scratch == nullptr ? error : scratch->first_error();
}
const nvme::Store& NvmeTier::store() const noexcept { return impl_->store(); }
void NvmeTier::close() {
  impl_->store().close();
  if (nvme::Store* scratch = impl_->records().scratch_store()) scratch->close();
}

}  // namespace strata::pipeline
