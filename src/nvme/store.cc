#include "nvme/store.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "nvme/store_impl.h"
#include "nvme/store_waiter.h"

namespace strata::nvme {
namespace {

uint64_t key_of(int unit, Traffic kind) {
  return uint64_t{static_cast<uint32_t>(unit)} << 8 | static_cast<uint64_t>(kind);
}

}  // namespace

Store::Impl::Impl(Opened opened)
    : options_(std::move(opened.options)),
      locks_(std::move(opened.locks)),
      drives_(std::move(opened.drives)),
      map_(std::move(opened.map)),
      tables_(std::move(opened.tables)),
      damaged_tables_(std::move(opened.damaged_tables)),
      notes_(std::move(opened.notes)),
      id_(opened.superblocks.front().store_id),
      superblocks_(std::move(opened.superblocks)),
      positions_(std::move(opened.positions)),
      highest_generation_(opened.highest_generation),
      in_flux_(superblocks_.front().in_flux),
      generation_(superblocks_.front().committed_generation),
      metadata_(superblocks_.front().metadata),
      has_shadow_(map_.records.size()),
      chunk_written_(map_.drive_of_chunk.size()),
      may_be_lost_(map_.records.size()) {
  for (size_t r = 0; r < map_.records.size(); ++r) {
    const RecordSpec& spec = map_.records[r].spec;
    index_.emplace(key_of(spec.unit, spec.kind), static_cast<int>(r));
    if (in_flux_ && spec.slots == Slots::kOne && was_committed(static_cast<int>(r))) {
      may_be_lost_[r] = 1;
    }
  }
  for (size_t d = 0; d < drives_.size(); ++d) {
    superblock_bytes_.emplace_back(kSuperblockSpan, static_cast<size_t>(map_.alignment_bytes));
    written_before_.push_back(superblocks_[d].bytes_written_total -
                              drives_[d]->statistics().total().written);
  }
  written_at_commit_ = bytes_written_total();
  io_ = std::make_unique<ChunkIo>(
      drives_, ChunkIo::Limits{options_.chunks_in_flight, options_.requests_in_flight},
      describe_chunk, this);
}

Store::Impl::~Impl() {
  try {
    close();
  } catch (const std::exception&) {
    // Whoever wants to know calls close().
  }
}

void Store::Impl::close() {
  if (std::exchange(is_closed_, true)) return;
  io_->wait_for_all();
  std::optional<Error> first;
  for (const auto& drive : drives_) {
    try {
      drive->close();
    } catch (const Error& error) {
      if (!first) first = error;
    }
  }
  locks_.clear();
  if (first) throw *first;
}

std::string Store::Impl::describe_chunk(const void* impl, int record, int64_t chunk) {
  const auto& self = *static_cast<const Impl*>(impl);
  return fmt::format("chunk {} of the {}", chunk, describe(self.record(record).spec));
}

std::optional<int> Store::Impl::find(int unit, Traffic kind) const noexcept {
  const auto found = index_.find(key_of(unit, kind));
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

int64_t Store::Impl::bytes_written_total() const noexcept {
  uint64_t sum = 0;
  for (size_t d = 0; d < drives_.size(); ++d) {
    sum += written_before_[d] + drives_[d]->statistics().total().written;
  }
  return static_cast<int64_t>(sum);
}

int64_t Store::Impl::count_chunks(const Record& record, int64_t offset_bytes,
                                  size_t size_bytes) const {
  const auto size = static_cast<int64_t>(size_bytes);
  STRATA_CHECK(offset_bytes >= 0 && offset_bytes % map_.chunk_size_bytes == 0 && size > 0,
               "a request must begin with a chunk");
  STRATA_CHECK(offset_bytes + size <= map_.stored_bytes(record),
               "a request goes beyond the end of its record");
  STRATA_CHECK(
      size % map_.chunk_size_bytes == 0 || offset_bytes + size == map_.stored_bytes(record),
      "a request must end with a chunk");
  return (size + map_.chunk_size_bytes - 1) / map_.chunk_size_bytes;
}

uint64_t* Store::Impl::table(int index, size_t drive, int slot) {
  const int64_t offset = record(index).parts[drive].table_offset_bytes[static_cast<size_t>(slot)] -
                         map_.drives[drive].tables_offset_bytes;
  return reinterpret_cast<uint64_t*>(tables_[drive].data() + offset);
}

bool Store::Impl::is_table_damaged(int index, size_t drive) const {
  return damaged_tables_[static_cast<size_t>(index) * drives_.size() + drive] != 0;
}

ChunkTransfer Store::Impl::locate(int index, int64_t chunk, const Side& side) {
  const Record& of = record(index);
  const ChunkPlace place = map_.place(of, chunk);
  ChunkTransfer transfer;
  transfer.record = index;
  transfer.chunk = chunk;
  transfer.offset_bytes = map_.data_offset_bytes(of, place, side.data_slot);
  transfer.stored_bytes = static_cast<size_t>(map_.stored_chunk_bytes(of, chunk));
  transfer.content_bytes = static_cast<size_t>(map_.chunk_bytes(of, chunk));
  transfer.checksum = table(index, static_cast<size_t>(place.drive), side.table_slot) + place.index;
  transfer.written = &chunk_written_[static_cast<size_t>(of.first_chunk + chunk)];
  transfer.may_be_lost = side.may_be_lost;
  return transfer;
}

CommittedRecord Store::Impl::committed(int index) const {
  static_cast<void>(record(index));
  const std::lock_guard lock(mutex_);
  const RecordState& state = superblocks_.front().records[static_cast<size_t>(index)];
  return {state.generation, static_cast<int>(state.slot)};
}

Store::Impl::Side Store::Impl::current_side(int index) const {
  const Slots slots = record(index).spec.slots;
  if (slots == Slots::kScratch) return shadow_side(index);
  if (slots == Slots::kOne && has_shadow_[static_cast<size_t>(index)] != 0) {
    return shadow_side(index);
  }
  const auto slot = static_cast<int>(superblocks_.front().records[static_cast<size_t>(index)].slot);
  return {slots == Slots::kTwo ? slot : 0, slot, false,
          may_be_lost_[static_cast<size_t>(index)] != 0};
}

Store::Impl::Side Store::Impl::shadow_side(int index) const {
  const Slots slots = record(index).spec.slots;
  if (slots == Slots::kScratch) return {0, 0, true, false};
  const auto current = superblocks_.front().records[static_cast<size_t>(index)].slot;
  const int slot = was_committed(index) ? 1 - static_cast<int>(current) : 0;
  return {slots == Slots::kTwo ? slot : 0, slot, true, false};
}

bool Store::Impl::is_whole(int index) const {
  const Record& of = record(index);
  const auto first = chunk_written_.begin() + of.first_chunk;
  return std::all_of(first, first + of.chunks, [](uint8_t written) { return written != 0; });
}

bool Store::Impl::has_whole_shadow(int index) const {
  const std::lock_guard lock(mutex_);
  return has_shadow_[static_cast<size_t>(index)] != 0 && is_whole(index);
}

void Store::Impl::require_readable(int index, int64_t first, int64_t chunks, const Side& side) {
  const Record& of = record(index);
  if (!side.is_shadow && !was_committed(index)) {
    throw failure(fmt::format("the {} was never committed to the store in '{}'", describe(of.spec),
                              drives_.front()->path().string()));
  }
  for (int64_t i = first; i < first + chunks; ++i) {
    if (side.is_shadow) {
      if (chunk_written_[static_cast<size_t>(of.first_chunk + i)] != 0) continue;
      throw failure(
          fmt::format("{} was not written since the last commit", describe_chunk(this, index, i)));
    }
    const auto drive = static_cast<size_t>(map_.place(of, i).drive);
    if (!is_table_damaged(index, drive)) continue;
    const std::string message = fmt::format(
        "cannot verify {}: the table of checksums in '{}' at offset {} is damaged; resume from a "
        "checkpoint",
        describe_chunk(this, index, i), drives_[drive]->path().string(),
        of.parts[drive].table_offset_bytes[static_cast<size_t>(side.table_slot)]);
    if (!side.may_be_lost) io_->keep_error(message);
    throw failure(message);
  }
}

void Store::Impl::read_async(const ReadRequest& request) {
  STRATA_CHECK(!is_closed_ && request.sink.done != nullptr, "a request without a sink");
  const Record& of = record(request.record);
  const int64_t chunks = count_chunks(of, request.offset_bytes, request.data.size());
  const int64_t first = request.offset_bytes / map_.chunk_size_bytes;
  Side side;
  size_t read_group = 0;
  {
    const std::lock_guard lock(mutex_);
    side = request.version == Version::kCurrent ? current_side(request.record)
                                                : shadow_side(request.record);
    require_readable(request.record, first, chunks, side);
    // With the lock held: a commit that moves the record to its other slot waits for this read.
    read_group = io_->enter_read();
  }
  const uint32_t ticket = io_->begin({Operation::kRead, request.priority, of.spec.kind, request.tag,
                                      request.sink, static_cast<size_t>(chunks), read_group});
  for (int64_t i = 0; i < chunks; ++i) {
    ChunkTransfer transfer = locate(request.record, first + i, side);
    transfer.data = request.data.data() + i * map_.chunk_size_bytes;
    io_->add(ticket, map_.place(of, first + i).drive, transfer);
  }
}

void Store::Impl::require_writable() const {
  STRATA_CHECK(!options_.read_only && !is_closed_, "a write to a store that is not open for it");
  if (const auto error = io_->first_error()) {
    throw failure(fmt::format("the store takes nothing more after an error: {}", *error));
  }
}

void Store::Impl::begin_shadow(int index) {
  uint8_t& has_shadow = has_shadow_[static_cast<size_t>(index)];
  if (has_shadow != 0) return;
  const Record& of = record(index);
  if (of.spec.slots == Slots::kOne && was_committed(index)) {
    if (!in_flux_) {
      std::vector<Superblock> next = superblocks_;
      for (Superblock& superblock : next) superblock.in_flux = true;
      try {
        write_superblocks(next);
      } catch (...) {
        keep_current_exception();
        throw;
      }
      adopt(std::move(next));
    }
    const int from =
        static_cast<int>(superblocks_.front().records[static_cast<size_t>(index)].slot);
    for (size_t d = 0; d < drives_.size(); ++d) {
      std::copy_n(table(index, d, from), of.parts[d].chunks, table(index, d, 1 - from));
    }
    for (int64_t i = 0; i < of.chunks; ++i) {
      const auto drive = static_cast<size_t>(map_.place(of, i).drive);
      chunk_written_[static_cast<size_t>(of.first_chunk + i)] =
          may_be_lost_[static_cast<size_t>(index)] == 0 && !is_table_damaged(index, drive) ? 1 : 0;
    }
  }
  has_shadow = 1;
}

void Store::Impl::end_shadow(int index) {
  const Record& of = record(index);
  has_shadow_[static_cast<size_t>(index)] = 0;
  std::fill_n(chunk_written_.begin() + of.first_chunk, of.chunks, uint8_t{0});
}

void Store::Impl::write_async(const WriteRequest& request) {
  STRATA_CHECK(request.sink.done != nullptr, "a request without a sink");
  const Record& of = record(request.record);
  const int64_t chunks = count_chunks(of, request.offset_bytes, request.data.size());
  const int64_t first = request.offset_bytes / map_.chunk_size_bytes;
  Side side;
  {
    const std::lock_guard lock(mutex_);
    require_writable();
    begin_shadow(request.record);
    side = shadow_side(request.record);
  }
  const uint32_t ticket = io_->begin({Operation::kWrite, request.priority, of.spec.kind,
                                      request.tag, request.sink, static_cast<size_t>(chunks)});
  for (int64_t i = 0; i < chunks; ++i) {
    ChunkTransfer transfer = locate(request.record, first + i, side);
    transfer.data = const_cast<std::byte*>(request.data.data()) + i * map_.chunk_size_bytes;
    io_->add(ticket, map_.place(of, first + i).drive, transfer);
  }
}

void Store::Impl::discard(int index) {
  STRATA_CHECK(record(index).spec.slots != Slots::kOne,
               "what was written over cannot be thrown away");
  const std::lock_guard lock(mutex_);
  end_shadow(index);
}

Store::Store(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}
Store::Store(Store&&) noexcept = default;
Store& Store::operator=(Store&&) noexcept = default;
Store::~Store() = default;

Store Store::open(const std::vector<StoreDirectory>& directories, StoreOptions options) {
  Impl::Opened opened = Impl::open_files(directories, std::move(options), {});
  const std::vector<Superblock> newer = std::move(opened.newer);
  auto impl = std::make_unique<Impl>(std::move(opened));
  if (!newer.empty() && !impl->options().read_only) impl->give_up(newer);
  return Store(std::move(impl));
}

std::vector<AvailableGeneration> Store::generations(const std::vector<StoreDirectory>& directories,
                                                    StoreOptions options) {
  return Impl::generations(directories, std::move(options));
}

Store Store::create(const std::vector<StoreDirectory>& directories,
                    std::span<const RecordSpec> records, StoreOptions options) {
  return Store(Impl::create(directories, records, std::move(options)));
}

std::optional<int> Store::find(int unit, Traffic kind) const noexcept {
  return impl_->find(unit, kind);
}
const StoreMap& Store::map() const noexcept { return impl_->map(); }
int64_t Store::stored_bytes(int record) const noexcept {
  return impl_->map().stored_bytes(impl_->record(record));
}

void Store::read_async(const ReadRequest& request) { impl_->read_async(request); }
void Store::write_async(const WriteRequest& request) { impl_->write_async(request); }

void Store::read(ReadRequest request) {
  StoreWaiter waiter;
  STRATA_CHECK(request.sink.done == nullptr, "a blocking request has no sink");
  request.sink = waiter.sink();
  impl_->read_async(request);
  waiter.wait();
}

void Store::write(WriteRequest request) {
  StoreWaiter waiter;
  STRATA_CHECK(request.sink.done == nullptr, "a blocking request has no sink");
  request.sink = waiter.sink();
  impl_->write_async(request);
  waiter.wait();
}

CommitResult Store::commit(std::span<const std::byte> metadata) { return impl_->commit(metadata); }
void Store::discard(int record) { impl_->discard(record); }
bool Store::has_whole_shadow(int record) const { return impl_->has_whole_shadow(record); }
CommittedRecord Store::committed(int record) const { return impl_->committed(record); }
CheckResult Store::check() { return impl_->check(); }
uint64_t Store::generation() const noexcept { return impl_->generation(); }
std::span<const std::byte> Store::metadata() const noexcept { return impl_->metadata(); }
bool Store::in_flux() const noexcept { return impl_->in_flux(); }
std::optional<std::string> Store::first_error() const { return impl_->first_error(); }
size_t Store::alignment_bytes() const noexcept {
  return static_cast<size_t>(impl_->map().alignment_bytes);
}
size_t Store::drives() const noexcept { return impl_->drives().size(); }
const Drive& Store::drive(size_t index) const noexcept { return *impl_->drives()[index]; }
int64_t Store::bytes_written_total() const noexcept { return impl_->bytes_written_total(); }
std::string Store::id() const {
  std::string text;
  for (const uint8_t byte : impl_->id()) text += fmt::format("{:02x}", byte);
  return text;
}
const std::vector<std::string>& Store::notes() const noexcept { return impl_->notes(); }
void Store::close() { impl_->close(); }

}  // namespace strata::nvme
