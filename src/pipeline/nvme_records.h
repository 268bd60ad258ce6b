// The records of a plan's buffers in an nvme::Store, and requests for their parts. Under NvmeTier,
// whose header says what holds for threads, memory and sinks.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nvme/aligned_buffer.h"
#include "nvme/store.h"
#include "pipeline/plan.h"

namespace strata::pipeline {

struct NvmeOptions {
  std::vector<nvme::StoreDirectory> directories;
  bool open_existing = false;  // the store of an earlier run with the same records
  /// Of nvme::Store::generations(), to open that store at: the newest, or the one before, and then
  /// the newest is gone for good.
  std::optional<uint64_t> generation{};
  nvme::BackendFactory backend = nvme::open_backend;
};

[[nodiscard]] nvme::Traffic traffic_of(StateKind kind) noexcept;

/// A buffer on NVMe and its record.
struct NvmeRecord {
  nvme::RecordSpec spec;
  nvme::Store* store = nullptr;
  int index = -1;         // in the store
  size_t size_bytes = 0;  // in the store
  size_t part_bytes = 0;  // of all parts but the last
  size_t stride_bytes = 0;
  /// [part]: since the last commit; with one slot: ever. Empty for activations.
  std::vector<uint8_t> written;

  [[nodiscard]] bool has_two_slots() const noexcept { return spec.slots == nvme::Slots::kTwo; }
  [[nodiscard]] size_t parts() const noexcept { return written.size(); }
  [[nodiscard]] size_t bytes_of(size_t part) const noexcept {
    return part + 1 < parts() ? part_bytes : size_bytes - part * stride_bytes;
  }
  [[nodiscard]] bool has_shadow() const noexcept;
};

class NvmeRecords {
 public:
  NvmeRecords(const Plan& plan, const NvmeOptions& options, std::span<std::byte> host_arena);
  NvmeRecords(const NvmeRecords&) = delete;
  NvmeRecords& operator=(const NvmeRecords&) = delete;

  [[nodiscard]] NvmeRecord& of(BufferId buffer);
  [[nodiscard]] const std::vector<NvmeRecord>& all() const noexcept { return records_; }

  struct Request {
    nvme::Operation operation = nvme::Operation::kRead;
    size_t offset_bytes = 0;
    std::byte* data = nullptr;
    size_t size_bytes = 0;
    nvme::Priority priority = nvme::Priority::kStateRead;
    uint64_t tag = 0;
    nvme::StoreSink sink;
  };
  /// A whole part of state, or all of an activation. Reads the committed version, or where there is
  /// none, what was written.
  void submit(NvmeRecord& record, const Request& request);

  /// Of state. Both block; what was never written is zeros.
  void read_part(const NvmeRecord& record, size_t part, std::byte* data);
  void write_part(NvmeRecord& record, size_t part, std::byte* data);

  /// As those of NvmeTier.
  void commit(std::span<const std::byte> metadata);
  void discard_shadows();
  [[nodiscard]] bool has_shadows() const;

  [[nodiscard]] nvme::Store& store() noexcept { return *store_; }
  [[nodiscard]] const nvme::Store& store() const noexcept { return *store_; }
  /// For the records with one slot that an opened store does not have; null where it has all.
  [[nodiscard]] nvme::Store* scratch_store() noexcept { return scratch_ ? &*scratch_ : nullptr; }
  [[nodiscard]] const nvme::Store* scratch_store() const noexcept {
    return scratch_ ? &*scratch_ : nullptr;
  }

 private:
  /// A request whose last bytes do not fill their chunk, which is not the record's last. These go
  /// through a chunk of memory, since the caller's has no room for all of it; so it becomes two
  /// requests to the store.
  struct Split {
    NvmeRecords* owner = nullptr;
    nvme::AlignedBuffer chunk;
    Request request;
    size_t direct_bytes = 0;  // not through the chunk
    int left = 0;             // of the two
    std::string error;
  };

  void add(const Plan& plan, BufferId buffer, NvmeRecord record);
  void add_state(const Plan& plan, int unit, StateKind kind);
  void open(const NvmeOptions& options, std::span<std::byte> host_arena);
  void require_match(const std::string& place) const;
  void find_records(const NvmeOptions& options, const nvme::StoreOptions& store_options);
  void make_splits();

  [[nodiscard]] bool is_committed(const NvmeRecord& record) const {
    return store_->committed(record.index).generation > 0;
  }
  void transfer(const NvmeRecord& record, const Request& request, nvme::Version version);
  void transfer_split(const NvmeRecord& record, const Request& request, nvme::Version version,
                      size_t direct_bytes);
  void call_store(const NvmeRecord& record, const Request& request, nvme::Version version);
  [[nodiscard]] size_t direct_bytes(const NvmeRecord& record, const Request& request) const;
  [[nodiscard]] Split& take_split(const Request& request, size_t direct_bytes);
  void free_split(Split& split) noexcept;
  void end_half(Split& split, std::string_view error) noexcept;
  void complete_shadow(NvmeRecord& record, nvme::AlignedBuffer& memory);

  const size_t chunk_bytes_;
  std::vector<NvmeRecord> records_;
  std::vector<int> record_of_buffer_;  // -1: not on NVMe

  mutable std::mutex mutex_;  // of NvmeRecord::written and the splits
  std::condition_variable split_freed_;
  std::vector<std::unique_ptr<Split>> splits_;
  std::vector<Split*> free_splits_;

  // The last: when they end, nothing uses the above any more.
  std::optional<nvme::Store> store_, scratch_;
};

}  // namespace strata::pipeline
