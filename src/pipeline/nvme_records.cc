#include "pipeline/nvme_records.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "nvme/arena_file.h"
#include "nvme/store_waiter.h"

namespace strata::pipeline {
namespace {

namespace fs = std::filesystem;
using nvme::Operation;
using nvme::RecordSpec;
using nvme::Slots;
using nvme::Store;
using nvme::StoreResult;
using nvme::Traffic;
using nvme::Version;

/// Requests under way that are split; one more has to wait.
constexpr size_t kSplits = 16;

}  // namespace

Traffic traffic_of(StateKind kind) noexcept {
  constexpr std::array kTraffic{Traffic::kWeight, Traffic::kResidual, Traffic::kMoment1,
                                Traffic::kMoment2, Traffic::kGradient};
  static_assert(kTraffic.size() == kStateKinds);
  return kTraffic[static_cast<size_t>(kind)];
}

bool NvmeRecord::has_shadow() const noexcept {
  return has_two_slots() && std::find(written.begin(), written.end(), 1) != written.end();
}

NvmeRecords::NvmeRecords(const Plan& plan, const NvmeOptions& options,
                         std::span<std::byte> host_arena)
    : chunk_bytes_(plan.store_chunk_bytes), record_of_buffer_(plan.buffers.all.size(), -1) {
  STRATA_CHECK(chunk_bytes_ > 0 && chunk_bytes_ % kDriveAlignment == 0,
               "a store's chunks are aligned as drives want them");
  for (size_t unit = 0; unit < plan.buffers.home.size(); ++unit) {
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      add_state(plan, static_cast<int>(unit), static_cast<StateKind>(kind));
    }
  }
  int boundaries = 0;
  int others = 0;
  for (size_t i = 0; i < plan.buffers.all.size(); ++i) {
    const Buffer& buffer = plan.buffers.all[i];
    if (buffer.tier != Tier::kNvme || record_of_buffer_[i] >= 0) continue;
    STRATA_CHECK(!buffer.two_slots, "nothing but state is committed");
    const bool is_boundary = buffer.purpose == Purpose::kBoundaries;
    NvmeRecord record;
    record.spec = {is_boundary ? boundaries++ : others++,
                   is_boundary ? Traffic::kBoundary : Traffic::kOther, 0, Slots::kScratch};
    record.size_bytes = record.part_bytes = buffer.size_bytes;
    record.stride_bytes = chunk_bytes_;
    add(plan, static_cast<BufferId>(i), std::move(record));
  }
  STRATA_CHECK(!records_.empty(), "a plan with nothing on NVMe needs no tier there");
  open(options, host_arena);
  make_splits();
}

void NvmeRecords::add_state(const Plan& plan, int unit, StateKind kind) {
  const BufferId buffer = plan.home(unit, kind);
  if (buffer == kNoBuffer || plan.buffer(buffer).tier != Tier::kNvme) return;
  STRATA_CHECK(kind != StateKind::kGradient || !plan.buffer(buffer).two_slots,
               "gradients are not committed");
  const int parts = plan.parts[static_cast<size_t>(unit)].parts;
  NvmeRecord record;
  record.spec = {unit, traffic_of(kind), 0,
                 plan.buffer(buffer).two_slots ? Slots::kTwo : Slots::kScratch};
  record.part_bytes = plan.part_bytes(unit, kind, 0);
  record.stride_bytes = parts > 1
                            ? plan.record_stride_bytes(unit, kind)
                            : (record.part_bytes + chunk_bytes_ - 1) / chunk_bytes_ * chunk_bytes_;
  STRATA_CHECK(record.stride_bytes % chunk_bytes_ == 0 && record.stride_bytes >= record.part_bytes,
               "parts begin with chunks of their own");
  for (int part = 1; part < parts; ++part) {
    STRATA_CHECK(
        plan.part_offset_bytes(unit, kind, part) == static_cast<size_t>(part) * record.part_bytes,
        "parts follow one another");
  }
  const auto last = static_cast<size_t>(parts - 1);
  record.size_bytes = last * record.stride_bytes + plan.part_bytes(unit, kind, parts - 1);
  record.written.resize(last + 1);
  add(plan, buffer, std::move(record));
}

void NvmeRecords::add(const Plan& plan, BufferId buffer, NvmeRecord record) {
  STRATA_CHECK(buffer >= 0 && static_cast<size_t>(buffer) < plan.buffers.all.size() &&
                   record_of_buffer_[static_cast<size_t>(buffer)] < 0,
               "a buffer is the home of one state");
  record_of_buffer_[static_cast<size_t>(buffer)] = static_cast<int>(records_.size());
  record.spec.size_bytes = static_cast<int64_t>(record.size_bytes);
  records_.push_back(std::move(record));
}

void NvmeRecords::open(const NvmeOptions& options, std::span<std::byte> host_arena) {
  nvme::StoreOptions store_options;
  store_options.chunk_size_bytes = static_cast<int64_t>(chunk_bytes_);
  store_options.backend = options.backend;
  if (!host_arena.empty()) {
    store_options.buffers.push_back({host_arena.data(), host_arena.size()});
  }
  std::vector<RecordSpec> specs;
  for (const NvmeRecord& record : records_) specs.push_back(record.spec);
  if (options.open_existing) {
    nvme::StoreOptions opening = store_options;
    opening.generation = options.generation;
    store_ = Store::open(options.directories, opening);
    require_match(options.directories.front().directory.string());
  } else {
    store_ = Store::create(options.directories, specs, store_options);
  }
  if (store_->alignment_bytes() > kDriveAlignment) {
    throw usage_error(
        fmt::format("the drive of '{}' transfers multiples of {} bytes, and no more than {} can be "
                    "had; use another drive",
                    options.directories.front().directory.string(), store_->alignment_bytes(),
                    kDriveAlignment));
  }
  find_records(options, store_options);
}

/// What no commit covers, and the store of a run with another plan does not have, gets a store for
/// this run alone: its files are removed as soon as they are open, so that they end with it.
void NvmeRecords::find_records(const NvmeOptions& options,
                               const nvme::StoreOptions& store_options) {
  std::vector<NvmeRecord*> missing;
  std::vector<RecordSpec> specs;
  for (NvmeRecord& record : records_) {
    const auto index = store_->find(record.spec.unit, record.spec.kind);
    record.store = &*store_;
    if (index && store_->map().records[static_cast<size_t>(*index)].spec == record.spec) {
      record.index = *index;
      continue;
    }
    STRATA_CHECK(record.spec.slots == Slots::kScratch, "state has its records");
    missing.push_back(&record);
    specs.push_back(record.spec);
  }
  if (missing.empty()) return;
  std::vector<nvme::StoreDirectory> directories = options.directories;
  for (nvme::StoreDirectory& directory : directories) {
    if (directory.limit_bytes) {
      std::error_code none;
      const auto used = fs::file_size(nvme::arena_path(directory.directory), none);
      const auto used_bytes = none ? int64_t{0} : static_cast<int64_t>(used);
      directory.limit_bytes = std::max<int64_t>(*directory.limit_bytes - used_bytes, 0);
    }
    directory.directory /= "scratch";
    // Left by a run that was killed before it came to remove it: the lock on the store is ours.
    fs::remove(nvme::arena_path(directory.directory));
  }
  scratch_ = Store::create(directories, specs, store_options);
  for (const nvme::StoreDirectory& directory : directories) {
    fs::remove(nvme::arena_path(directory.directory));
    fs::remove(directory.directory);
  }
  for (NvmeRecord* record : missing) {
    record->store = &*scratch_;
    record->index = scratch_->find(record->spec.unit, record->spec.kind).value();
  }
}

void NvmeRecords::require_match(const std::string& place) const {
  const nvme::StoreMap& map = store_->map();
  const auto refuse = [&](const std::string& what) {
    throw usage_error(
        fmt::format("the store in '{}' was made for another plan: {}; resume with the settings of "
                    "the run that made it, or create it again from a checkpoint",
                    place, what));
  };
  if (map.chunk_size_bytes != static_cast<int64_t>(chunk_bytes_)) {
    refuse(
        fmt::format("its chunks have {} bytes instead of {}", map.chunk_size_bytes, chunk_bytes_));
  }
  for (const NvmeRecord& record : records_) {
    const auto index = store_->find(record.spec.unit, record.spec.kind);
    const bool is_kept =
        record.spec.slots != Slots::kScratch ||
        (index && map.records[static_cast<size_t>(*index)].spec.slots != Slots::kScratch);
    if (!is_kept) continue;
    const std::string name = nvme::describe(record.spec);
    if (!index) refuse(fmt::format("it does not have the {}", name));
    const RecordSpec& found = map.records[static_cast<size_t>(*index)].spec;
    if (found.size_bytes != record.spec.size_bytes) {
      refuse(fmt::format("its {} has {} bytes instead of {}", name, found.size_bytes,
                         record.spec.size_bytes));
    }
    if (found.slots != record.spec.slots) {
      refuse(fmt::format("its {} is kept as '{}' instead of '{}'", name, nvme::name_of(found.slots),
                         nvme::name_of(record.spec.slots)));
    }
  }
  for (const nvme::Record& found : map.records) {
    if (found.spec.slots == Slots::kScratch) continue;
    const bool is_known =
        std::any_of(records_.begin(), records_.end(), [&](const NvmeRecord& record) {
          return record.spec.unit == found.spec.unit && record.spec.kind == found.spec.kind;
        });
    if (!is_known) refuse(fmt::format("it has the {} too", nvme::describe(found.spec)));
  }
}

void NvmeRecords::make_splits() {
  const bool needs_splits =
      std::any_of(records_.begin(), records_.end(), [&](const NvmeRecord& of) {
        return of.parts() > 1 && align_up(of.part_bytes, kDriveAlignment) % chunk_bytes_ != 0;
      });
  if (!needs_splits) return;
  for (size_t i = 0; i < kSplits; ++i) {
    splits_.push_back(std::make_unique<Split>());
    splits_.back()->owner = this;
    splits_.back()->chunk = nvme::AlignedBuffer(chunk_bytes_, kDriveAlignment);
    free_splits_.push_back(splits_.back().get());
  }
}

NvmeRecord& NvmeRecords::of(BufferId buffer) {
  STRATA_CHECK(buffer >= 0 && static_cast<size_t>(buffer) < record_of_buffer_.size() &&
                   record_of_buffer_[static_cast<size_t>(buffer)] >= 0,
               "a buffer that is not on NVMe");
  return records_[static_cast<size_t>(record_of_buffer_[static_cast<size_t>(buffer)])];
}

void NvmeRecords::submit(NvmeRecord& record, const Request& request) {
  const size_t part = request.offset_bytes / record.stride_bytes;
  STRATA_CHECK(request.offset_bytes % record.stride_bytes == 0 &&
                   part < std::max<size_t>(record.parts(), 1) &&
                   request.size_bytes == record.bytes_of(part),
               "a request is a whole part");
  const bool has_committed = record.has_two_slots() && is_committed(record);
  transfer(record, request, has_committed ? Version::kCurrent : Version::kShadow);
  if (request.operation == Operation::kRead || record.parts() == 0) return;
  const std::lock_guard lock(mutex_);
  record.written[part] = 1;
}

size_t NvmeRecords::direct_bytes(const NvmeRecord& record, const Request& request) const {
  const size_t end = request.offset_bytes + request.size_bytes;
  const size_t rounded = align_up(request.size_bytes, kDriveAlignment);
  if (end == record.size_bytes || rounded % chunk_bytes_ == 0) return rounded;
  return request.size_bytes / chunk_bytes_ * chunk_bytes_;
}

void NvmeRecords::transfer(const NvmeRecord& record, const Request& request, Version version) {
  STRATA_CHECK(std::bit_cast<uintptr_t>(request.data) % kDriveAlignment == 0,
               "memory that drives cannot use");
  const size_t direct = direct_bytes(record, request);
  if (direct < request.size_bytes) return transfer_split(record, request, version, direct);
  Request whole = request;
  whole.size_bytes = direct;
  call_store(record, whole, version);
}

void NvmeRecords::call_store(const NvmeRecord& record, const Request& request, Version version) {
  const auto offset_bytes = static_cast<int64_t>(request.offset_bytes);
  if (request.operation == Operation::kRead) {
    record.store->read_async({.record = record.index,
                              .offset_bytes = offset_bytes,
                              .data = {request.data, request.size_bytes},
                              .version = version,
                              .priority = request.priority,
                              .tag = request.tag,
                              .sink = request.sink});
  } else {
    record.store->write_async({.record = record.index,
                               .offset_bytes = offset_bytes,
                               .data = {request.data, request.size_bytes},
                               .priority = request.priority,
                               .tag = request.tag,
                               .sink = request.sink});
  }
}

void NvmeRecords::transfer_split(const NvmeRecord& record, const Request& request, Version version,
                                 size_t direct_bytes) {
  Split& split = take_split(request, direct_bytes);
  if (request.operation == Operation::kWrite) {
    const size_t tail_bytes = request.size_bytes - direct_bytes;
    std::memcpy(split.chunk.data(), request.data + direct_bytes, tail_bytes);
    std::memset(split.chunk.data() + tail_bytes, 0, chunk_bytes_ - tail_bytes);
  }
  Request half = request;
  half.sink = {[](void* context, const StoreResult& result) noexcept {
                 auto& of = *static_cast<Split*>(context);
                 of.owner->end_half(of, result.error);
               },
               &split};
  half.offset_bytes += direct_bytes;
  half.data = split.chunk.data();
  half.size_bytes = chunk_bytes_;
  try {
    call_store(record, half, version);
  } catch (...) {
    free_split(split);
    throw;
  }
  if (direct_bytes == 0) return;
  half.offset_bytes = request.offset_bytes;
  half.data = request.data;
  half.size_bytes = direct_bytes;
  try {
    call_store(record, half, version);
  } catch (const std::exception& error) {
    // The other half is under way: it is a matter for the sink.
    end_half(split, error.what());
  }
}

NvmeRecords::Split& NvmeRecords::take_split(const Request& request, size_t direct_bytes) {
  std::unique_lock lock(mutex_);
  split_freed_.wait(lock, [this] { return !free_splits_.empty(); });
  Split& split = *free_splits_.back();
  free_splits_.pop_back();
  split.request = request;
  split.direct_bytes = direct_bytes;
  split.left = direct_bytes > 0 ? 2 : 1;
  split.error.clear();
  return split;
}

void NvmeRecords::free_split(Split& split) noexcept {
  const std::lock_guard lock(mutex_);
  free_splits_.push_back(&split);
  split_freed_.notify_one();
}

void NvmeRecords::end_half(Split& split, std::string_view error) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (split.error.empty()) split.error = error;
    if (--split.left > 0) return;
  }
  const Request& request = split.request;
  if (request.operation == Operation::kRead && split.error.empty()) {
    std::memcpy(request.data + split.direct_bytes, split.chunk.data(),
                request.size_bytes - split.direct_bytes);
  }
  request.sink.done(request.sink.context, {request.tag, split.error});
  free_split(split);
}

void NvmeRecords::read_part(const NvmeRecord& record, size_t part, std::byte* data) {
  Version version = Version::kShadow;
  if (record.written[part] == 0) {
    if (!record.has_two_slots() || !is_committed(record)) {
      std::memset(data, 0, record.bytes_of(part));
      return;
    }
    version = Version::kCurrent;
  }
  nvme::StoreWaiter waiter;
  transfer(record,
           {.operation = Operation::kRead,
            .offset_bytes = part * record.stride_bytes,
            .data = data,
            .size_bytes = record.bytes_of(part),
            .sink = waiter.sink()},
           version);
  waiter.wait();
}

void NvmeRecords::write_part(NvmeRecord& record, size_t part, std::byte* data) {
  nvme::StoreWaiter waiter;
  submit(record, {.operation = Operation::kWrite,
                  .offset_bytes = part * record.stride_bytes,
                  .data = data,
                  .size_bytes = record.bytes_of(part),
                  .priority = nvme::Priority::kWriteBack,
                  .sink = waiter.sink()});
  waiter.wait();
}

void NvmeRecords::commit(std::span<const std::byte> metadata) {
  if (!has_shadows()) return;
  nvme::AlignedBuffer memory;
  for (NvmeRecord& record : records_) complete_shadow(record, memory);
  store_->commit(metadata);
  for (NvmeRecord& record : records_) {
    if (record.has_two_slots()) std::fill(record.written.begin(), record.written.end(), 0);
  }
}

/// The store commits whole records.
void NvmeRecords::complete_shadow(NvmeRecord& record, nvme::AlignedBuffer& memory) {
  if (!record.has_shadow()) return;
  for (size_t part = 0; part < record.parts(); ++part) {
    if (record.written[part] != 0) continue;
    const size_t needed = align_up(record.bytes_of(part), kDriveAlignment);
    if (memory.size() < needed) memory = nvme::AlignedBuffer(needed, kDriveAlignment);
    read_part(record, part, memory.data());
    write_part(record, part, memory.data());
  }
}

void NvmeRecords::discard_shadows() {
  for (NvmeRecord& record : records_) {
    if (!record.has_two_slots()) continue;
    store_->discard(record.index);
    std::fill(record.written.begin(), record.written.end(), 0);
  }
}

bool NvmeRecords::has_shadows() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(records_.begin(), records_.end(),
                     [](const NvmeRecord& record) { return record.has_shadow(); });
}

}  // namespace strata::pipeline
