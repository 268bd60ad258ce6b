// The state and activations of a plan that rest on NVMe: the records of an nvme::Store, and the two
// ways to them. Tasks of a step read and write whole parts; whoever loads, saves or looks at state
// reads and writes any range of it.
//
// What a step writes to records with two slots does not replace what holds: commit() does that, or
// discard_shadows() throws it away. Records with one slot are gone when the tier is closed.
//
// Threads: read_async and write_async from any thread but that of a sink; everything else from one
// thread, while no request is under way and none is submitted. After set-up read_async and
// write_async do not allocate, but for messages of errors.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nvme/store.h"
#include "pipeline/nvme_records.h"
#include "pipeline/plan.h"

namespace strata::pipeline {

/// Memory for one part of each kind of state; empty where the plan has none of it on NVMe.
using StateCache = std::array<std::span<std::byte>, kStateKinds>;

class NvmeTier {
 public:
  /// Creates the store for the plan's buffers on NVMe, of which there is at least one, or opens it.
  /// Then it must have just the plan's records with two slots; a usage error says what differs.
  /// Those with one come back unwritten, and where it does not have them, rest in files without a
  /// name beside it. `host_arena`, where most
  /// data will be, outlives the tier and is registered with the drives; the plan need not.
  NvmeTier(const Plan& plan, const NvmeOptions& options, std::span<std::byte> host_arena);
  ~NvmeTier();
  NvmeTier(const NvmeTier&) = delete;
  NvmeTier& operator=(const NvmeTier&) = delete;

  /// A whole part of `buffer`, at a multiple of its record's stride, or all of an activation.
  /// `data` is a multiple of kDriveAlignment and has room for `size_bytes` rounded up to one: what
  /// lies in between is written to by reads. It must live (for a write, unchanged) until the sink
  /// is called, which happens once, on a thread of the store. Blocks while too much is in flight.
  /// Throws, and never calls the sink, where nothing was submitted: what is to be read was never
  /// written, or the store takes nothing more after an error.
  ///
  /// Of records with two slots the committed version is read, or where there is none, what was
  /// written.
  void read_async(BufferId buffer, size_t offset_bytes, std::byte* data, size_t size_bytes,
                  nvme::Priority priority, uint64_t tag, nvme::StoreSink sink);
  /// Of records with two slots the committed version stays as it is.
  void write_async(BufferId buffer, size_t offset_bytes, const std::byte* data, size_t size_bytes,
                   nvme::Priority priority, uint64_t tag, nvme::StoreSink sink);

  /// Lends the memory that read_state and write_state go through: aligned as above, of the size of
  /// the largest part rounded up. It may be used otherwise after flush(), until the next of them.
  void set_cache(const StateCache& cache);
  /// Any range of a unit's state, as if it lay in one piece of memory: what was written last,
  /// committed or not, and zeros where nothing was. Blocks.
  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out);
  /// Likewise. What was written may rest in the cache until another part of the kind is touched.
  void write_state(int unit, StateKind kind, size_t offset_bytes, std::span<const std::byte> data);
  /// Writes what rests in the cache and forgets what it holds.
  void flush();

  /// Makes all that was written to records with two slots since the last commit current, durably
  /// and on all drives at once, together with `metadata` (up to nvme::kMaxMetadataBytes). Parts of
  /// such a record that were not written stay as they were, or zeros. Does nothing where nothing
  /// was written. Not with anything in the cache: flush first. Blocks.
  void commit(std::span<const std::byte> metadata);
  /// Throws away what was written to records with two slots since the last commit, and what rests
  /// in the cache.
  void discard_shadows();
  /// Whether there is anything to commit.
  [[nodiscard]] bool has_shadows() const;

  /// Of the last commit: 0, and empty, where there was none. The metadata is valid until the next.
  [[nodiscard]] uint64_t generation() const noexcept;
  [[nodiscard]] std::span<const std::byte> metadata() const noexcept;

  /// Since the tier was opened, over all drives, by nvme::Traffic: boundaries are kBoundary, and
  /// kOther are saved activations and what the store writes for itself.
  [[nodiscard]] std::array<nvme::TrafficBytes, nvme::kTrafficKinds> traffic() const;
  [[nodiscard]] uint64_t bytes_read() const;
  [[nodiscard]] uint64_t bytes_written() const;
  /// Since the store was created.
  [[nodiscard]] uint64_t bytes_written_total() const noexcept;
  /// One line for each thing that a user should know.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;
  [[nodiscard]] std::optional<std::string> first_error() const;
  [[nodiscard]] const nvme::Store& store() const noexcept;

  /// Closes the files; shadows and what rests in the cache are lost. Throws where a file cannot be
  /// closed. Nothing may follow.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata::pipeline
