// The shard store: the records of a rank's state on its drives, checked byte by byte, and always
// whole as of the last commit.
//
//   Store store = Store::create({{.directory = "/mnt/a"}, {.directory = "/mnt/b"}}, records);
//   store.write_async({.record = r, .data = bytes, .sink = {done, this}});
//   store.commit(metadata);
//
// A write goes beside what is committed (the shadow); commit makes all records written since the
// last one current, on all drives at once. After a crash at any moment, open finds the last commit.
// Records with one slot are the exception: their first write after a commit marks the store as
// being in flux, and a store that is in flux when it is opened has lost them.
//
// Each chunk has a checksum, verified whenever it is read: damaged bytes are an error that names
// drive, record and chunk, never data.
//
// The first error (a failed transfer, a wrong checksum) is kept: from then on the store refuses to
// write and to commit, and the disk stays as of the last commit.
//
// Threads: reads and writes from any thread but that of a handler; everything else from one thread,
// and commit, discard and close while no write is being submitted. After set-up reads and writes do
// not allocate, but for messages of errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "nvme/drive.h"
#include "nvme/store_layout.h"

namespace strata::nvme {

/// A directory on one drive, and how that drive likes to be used (DriveOptions).
struct StoreDirectory {
  std::filesystem::path directory;
  std::optional<int64_t> limit_bytes = std::nullopt;  // at creation: use no more than this
  size_t block_size_bytes = kMiB;
  unsigned depth = 32;
};

struct StoreOptions {
  /// At creation: what has one checksum, and lies on one drive. A multiple of the drives'
  /// alignment.
  int64_t chunk_size_bytes = int64_t{kMiB};
  /// For each drive. Beyond this many, and this many requests, read_async and write_async wait.
  size_t chunks_in_flight = 4096;
  size_t requests_in_flight = 512;
  bool read_only = false;  // may share the store with other readers
  /// Opens a store that is in flux too: what is lost fails to be read, and no commit is made until
  /// every committed record with one slot was written anew, whole.
  bool accept_in_flux = false;
  /// Opens this of Store::generations() instead of the newest. One that is not the newest is first
  /// read whole where the newer differs; then, unless read_only, the newer is gone for good: it is
  /// as if this had been committed once more. Where a chunk is not as it was, open throws and
  /// leaves the newer as it is.
  std::optional<uint64_t> generation = std::nullopt;
  DirectIo direct = DirectIo::kAuto;
  std::vector<BufferRegion> buffers;  // what requests will mostly use; see DriveOptions
  BackendFactory backend = open_backend;
};

enum class Version : uint8_t {
  kCurrent,  // of the last commit
  kShadow    // written since; the same for records with one slot
};

/// How a request ended.
struct [[nodiscard]] StoreResult {
  uint64_t tag = 0;
  std::string_view error;  // one sentence, valid during the handler; empty where all went well
  [[nodiscard]] bool ok() const noexcept { return error.empty(); }
};

/// Called once for each accepted request, on a thread of the store. It must not call the store.
struct StoreSink {
  void (*done)(void* context, const StoreResult& result) noexcept = nullptr;
  void* context = nullptr;
};

/// Some whole chunks of a record: the offset is a multiple of the chunk size, and so is the size,
/// or else the request ends where the record does, padded to stored_bytes. The address is aligned.
/// Bytes of the padding are transferred but not looked at.
struct ReadRequest {
  int record = 0;
  int64_t offset_bytes = 0;
  std::span<std::byte> data = {};  // the caller's again when the sink is called
  Version version = Version::kCurrent;
  Priority priority = Priority::kStateRead;
  uint64_t tag = 0;
  StoreSink sink = {};
};
struct WriteRequest {
  int record = 0;
  int64_t offset_bytes = 0;
  std::span<const std::byte> data = {};  // must live unchanged until the sink is called
  Priority priority = Priority::kWriteBack;
  uint64_t tag = 0;
  StoreSink sink = {};
};

struct CommitResult {
  uint64_t generation = 0;
  int64_t bytes_written = 0;        // to all drives since the last commit, this one included
  int64_t bytes_written_total = 0;  // since creation
};

/// What the last commit has of a record.
struct CommittedRecord {
  uint64_t generation = 0;  // that wrote it; 0: none did
  int slot = 0;             // where its table is, and its data if it has two slots
};

/// A commit that a store can be opened at.
struct AvailableGeneration {
  uint64_t generation = 0;
  std::vector<std::byte> metadata;
};

/// What was found wrong, one sentence each, in the order of records and chunks.
struct CheckResult {
  int64_t chunks = 0;  // that were read
  int64_t bytes = 0;
  std::vector<std::string> faults;
};

class Store {
 public:
  /// Makes a store for these records: one arena file in each directory, all space reserved. Nothing
  /// is committed yet. Throws kDoesNotFit where there is too little space, and leaves nothing
  /// behind whenever it throws.
  [[nodiscard]] static Store create(const std::vector<StoreDirectory>& directories,
                                    std::span<const RecordSpec> records, StoreOptions options = {});
  /// Opens the last committed generation, with the directories in any order. Throws where one is
  /// missing, belongs to another store, is damaged beyond use, or is in use by another process.
  [[nodiscard]] static Store open(const std::vector<StoreDirectory>& directories,
                                  StoreOptions options = {});
  /// The commits that it can be opened at, the newest first: none where nothing was committed or
  /// the store is in flux, and at most two. The one before the newest is whole as long as nothing
  /// was written since the newest, to no record that has two slots, and no record with one slot at
  /// all between the two. Of that only the tables of checksums are looked at here; open finds what
  /// they do not show. Throws as open.
  [[nodiscard]] static std::vector<AvailableGeneration> generations(
      const std::vector<StoreDirectory>& directories, StoreOptions options = {});
  Store(Store&&) noexcept;
  Store& operator=(Store&&) noexcept;
  /// As close(), but errors are lost.
  ~Store();

  /// The index of a record, in the order of creation.
  [[nodiscard]] std::optional<int> find(int unit, Traffic kind) const noexcept;
  [[nodiscard]] const StoreMap& map() const noexcept;
  /// The record's size with padding: what a request for all of it transfers.
  [[nodiscard]] int64_t stored_bytes(int record) const noexcept;

  /// Submits the request; the sink is called when all of it was read and verified, or an error is
  /// known. Blocks while too much is in flight. Requests on the same chunk and version are not
  /// ordered against each other: whoever needs an order waits for the sink. Throws, and never calls
  /// the sink, where the version was never written or is known to be damaged.
  void read_async(const ReadRequest& request);
  /// Submits a write to the record's shadow; no request on the same chunks of it is under way.
  /// Blocks likewise, and in the first write to a committed record with one slot until the store is
  /// durably marked as in flux. Throws, and never calls the sink, after the first error.
  void write_async(const WriteRequest& request);
  /// Blocking forms: the request must have no sink.
  void read(ReadRequest request);
  void write(WriteRequest request);

  /// Makes every record written since the last commit current, durably and on all drives, together
  /// with `metadata` (up to kMaxMetadataBytes). Waits for writes in flight, and in the end for the
  /// reads that began before it was made: both need their sinks to return. Each such record must
  /// have been written whole; others keep what they have. After an exception of kind kUsage nothing
  /// has happened; after any other the store refuses everything but reads, and what is on the disk
  /// is this generation or the one before, whole.
  CommitResult commit(std::span<const std::byte> metadata);
  /// Throws the record's shadow away. Nothing on it is in flight; the record has not one slot.
  void discard(int record);
  /// Whether all of the record was written since the last commit. No write of it is in flight.
  [[nodiscard]] bool has_whole_shadow(int record) const;
  [[nodiscard]] CommittedRecord committed(int record) const;

  /// Reads and verifies every chunk of the current version of every record, and all tables.
  [[nodiscard]] CheckResult check();

  /// Of the last commit; 0 where there was none.
  [[nodiscard]] uint64_t generation() const noexcept;
  /// That was given to the last commit; valid until the next.
  [[nodiscard]] std::span<const std::byte> metadata() const noexcept;
  /// Records with one slot have been written since the last commit.
  [[nodiscard]] bool in_flux() const noexcept;
  [[nodiscard]] std::optional<std::string> first_error() const;
  [[nodiscard]] size_t alignment_bytes() const noexcept;

  /// In the order of the store's own numbering, which is that of creation.
  [[nodiscard]] size_t drives() const noexcept;
  [[nodiscard]] const Drive& drive(size_t index) const noexcept;
  /// To all drives since creation, this run included.
  [[nodiscard]] int64_t bytes_written_total() const noexcept;
  /// 32 hexadecimal digits.
  [[nodiscard]] std::string id() const;
  /// One line for each thing that a user should know: from the drives, and from opening.
  [[nodiscard]] const std::vector<std::string>& notes() const noexcept;

  /// Waits for everything in flight and closes the files; shadows are lost. Throws where a file
  /// cannot be closed. A second call does nothing.
  void close();

 private:
  class Impl;
  explicit Store(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata::nvme
