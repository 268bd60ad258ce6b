// Making a store, and finding the generation that holds when one is opened.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <set>
#include <utility>

#include "base/error.h"
#include "nvme/store_impl.h"

namespace strata::nvme {
namespace {

namespace fs = std::filesystem;

/// One directory while its store is being put together.
struct Found {
  fs::path path;
  UniqueFd lock;
  std::unique_ptr<Drive> drive;
  std::array<DecodedSuperblock, kSuperblocks> superblocks;

  [[nodiscard]] const Superblock* superblock(size_t position) const {
    const DecodedSuperblock& decoded = superblocks[position];
    return decoded.fault == SuperblockFault::kNone ? &decoded.superblock : nullptr;
  }
  [[nodiscard]] const Superblock& any_superblock() const {
    return *(superblock(0) != nullptr ? superblock(0) : superblock(1));
  }
};

DriveOptions drive_options(const StoreDirectory& directory, const fs::path& path,
                           const StoreOptions& options) {
  // Besides chunks there are only a commit's transfers, which may wait.
  constexpr size_t kMoreRequests = 64;
  DriveOptions drive;
  drive.path = path;
  drive.read_only = options.read_only;
  drive.direct = options.direct;
  drive.block_size_bytes = directory.block_size_bytes;
  drive.depth = directory.depth;
  drive.queue_capacity = options.chunks_in_flight + kMoreRequests;
  drive.buffers = options.buffers;
  drive.backend = options.backend;
  return drive;
}

std::vector<fs::path> paths_of(const std::vector<StoreDirectory>& directories) {
  if (directories.empty()) throw usage_error("a store needs at least one directory");
  std::vector<fs::path> paths;
  std::set<fs::path> seen;
  for (const StoreDirectory& directory : directories) {
    paths.push_back(directory.directory);
    if (!seen.insert(canonical_directory(directory.directory)).second) {
      throw usage_error(
          fmt::format("the directory '{}' was given twice", directory.directory.string()));
    }
  }
  return paths;
}

Error cut_short(const fs::path& path, int64_t size_bytes, int64_t needed_bytes) {
  return usage_error(fmt::format(
      "'{}' is cut short: it has {} of at least {} bytes; restore the file from a copy, "
      "or create the store again and resume from a checkpoint",
      path.string(), size_bytes, needed_bytes));
}

Error no_superblock(const Found& found) {
  const std::string path = found.path.string();
  const auto has = [&](SuperblockFault fault) {
    return found.superblocks[0].fault == fault || found.superblocks[1].fault == fault;
  };
  if (has(SuperblockFault::kOtherFormat) && !has(SuperblockFault::kDamaged)) {
    return usage_error(fmt::format(
        "'{}' is a store of format {}, and this version reads {}", path,
        std::max(found.superblocks[0].format, found.superblocks[1].format), kStoreFormat));
  }
  if (has(SuperblockFault::kOtherByteOrder)) {
    return usage_error(fmt::format(
        "'{}' was written by a machine of the other byte order, and cannot be read here", path));
  }
  if (has(SuperblockFault::kDamaged) || has(SuperblockFault::kOtherFormat)) {
    return failure(
        fmt::format("both superblocks of '{}' are damaged; create the store again and "
                    "resume from a checkpoint",
                    path));
  }
  return usage_error(fmt::format("'{}' is not a store: it has no superblock", path));
}

/// Opens the drive and reads its superblocks.
void read_superblocks(Found& found, const StoreDirectory& directory, const StoreOptions& options,
                      std::vector<std::string>& notes) {
  found.drive = std::make_unique<Drive>(drive_options(directory, found.path, options));
  constexpr auto kNeeded = static_cast<int64_t>(kSuperblocks * kSuperblockSpan);
  if (found.drive->size_bytes() < kNeeded) {
    throw cut_short(found.path, found.drive->size_bytes(), kNeeded);
  }
  const AlignedBuffer buffer(kSuperblockSpan, found.drive->alignment_bytes());
  std::optional<IoError> unreadable;
  for (size_t i = 0; i < kSuperblocks; ++i) {
    try {
      found.drive->read(static_cast<int64_t>(i * kSuperblockSpan), buffer.bytes());
      found.superblocks[i] = decode_superblock(buffer.bytes());
    } catch (const IoError& error) {
      found.superblocks[i].fault = SuperblockFault::kDamaged;
      notes.emplace_back(error.what());
      if (!unreadable) unreadable = error;
    }
  }
  const bool has_any = found.superblock(0) != nullptr || found.superblock(1) != nullptr;
  // The one that cannot be read may be the newer: a run that goes on from the other would lose it.
  if (unreadable && (!has_any || !options.read_only)) throw *unreadable;
  if (!has_any) throw no_superblock(found);
  for (size_t i = 0; i < kSuperblocks; ++i) {
    // Only the second one is empty, until the first commit or mark is made.
    SuperblockFault& fault = found.superblocks[i].fault;
    const bool may_be_empty = i == 1 && found.any_superblock().generation == 0;
    if (fault == SuperblockFault::kEmpty && !may_be_empty) fault = SuperblockFault::kDamaged;
  }
  for (size_t i = 0; i < kSuperblocks; ++i) {
    const SuperblockFault fault = found.superblocks[i].fault;
    if (fault == SuperblockFault::kNone || fault == SuperblockFault::kEmpty) continue;
    notes.push_back(fmt::format(
        "superblock {} of '{}' is damaged, or was being written when a run ended: using the other",
        i, found.path.string()));
  }
  for (const std::string& note : found.drive->notes()) notes.push_back(note);
}

/// Puts the drives into their order, or says why they are not those of one store.
void sort_drives(std::vector<Found>& drives) {
  const Superblock& first = drives.front().any_superblock();
  for (const Found& drive : drives) {
    const Superblock& other = drive.any_superblock();
    if (other.store_id == first.store_id && other.drive_count == first.drive_count) continue;
    throw usage_error(fmt::format("'{}' and '{}' belong to different stores",
                                  drives.front().path.string(), drive.path.string()));
  }
  std::vector<const Found*> by_index(first.drive_count);
  for (const Found& drive : drives) {
    const uint32_t index = drive.any_superblock().drive_index;
    if (index >= by_index.size()) {
      throw failure(fmt::format("'{}' says it is drive {} of {}", drive.path.string(), index,
                                by_index.size()));
    }
    if (by_index[index] != nullptr) {
      throw usage_error(fmt::format("'{}' and '{}' are both drive {} of the store: one is a copy",
                                    by_index[index]->path.string(), drive.path.string(), index));
    }
    by_index[index] = &drive;
  }
  for (size_t i = 0; i < by_index.size(); ++i) {
    if (by_index[i] != nullptr) continue;
    throw usage_error(
        fmt::format("the store has {} drives, and drive {} is not among the {} directories given",
                    by_index.size(), i, drives.size()));
  }
  std::sort(drives.begin(), drives.end(), [](const Found& a, const Found& b) {
    return a.any_superblock().drive_index < b.any_superblock().drive_index;
  });
}

/// Where the drive has this very generation.
std::optional<size_t> position_of(const Found& drive, const Superblock& wanted) {
  for (size_t i = 0; i < kSuperblocks; ++i) {
    const Superblock* superblock = drive.superblock(i);
    if (superblock != nullptr && superblock->generation == wanted.generation &&
        superblock->commit_id == wanted.commit_id) {
      return i;
    }
  }
  return std::nullopt;
}

/// The positions of the generations that every drive has, the newest first; at least one.
std::vector<std::vector<size_t>> common_generations(const std::vector<Found>& drives) {
  std::vector<std::vector<size_t>> common;
  for (size_t i = 0; i < kSuperblocks; ++i) {
    const Superblock* candidate = drives.front().superblock(i);
    if (candidate == nullptr) continue;
    std::vector<size_t> positions;
    for (const Found& drive : drives) {
      if (const auto position = position_of(drive, *candidate)) positions.push_back(*position);
    }
    if (positions.size() == drives.size()) common.push_back(std::move(positions));
  }
  const auto generation_at = [&](const std::vector<size_t>& positions) {
    return drives.front().superblock(positions.front())->generation;
  };
  std::sort(common.begin(), common.end(),
            [&](const auto& a, const auto& b) { return generation_at(a) > generation_at(b); });
  if (!common.empty()) return common;
  std::string listed;
  for (const Found& drive : drives) {
    listed += fmt::format("{}'{}' has", listed.empty() ? "" : ", ", drive.path.string());
    for (size_t i = 0; i < kSuperblocks; ++i) {
      if (const Superblock* superblock = drive.superblock(i)) {
        listed += fmt::format(" {}", superblock->generation);
      }
    }
  }
  throw failure(
      fmt::format("the drives of the store have no generation in common ({}): they are "
                  "from different times; resume from a checkpoint",
                  listed));
}

std::vector<Superblock> superblocks_at(const std::vector<Found>& drives,
                                       const std::vector<size_t>& positions) {
  std::vector<Superblock> superblocks;
  for (size_t d = 0; d < drives.size(); ++d) {
    superblocks.push_back(*drives[d].superblock(positions[d]));
  }
  return superblocks;
}

/// Whether a generation may still be whole beside the next: no mark of being in flux, and nothing
/// that has one slot has changed.
bool may_go_back(const std::vector<Superblock>& older, const std::vector<Superblock>& newer,
                 const StoreMap& map) {
  const Superblock& first = older.front();
  if (first.committed_generation == 0 || first.in_flux || newer.front().in_flux) return false;
  for (size_t r = 0; r < map.records.size(); ++r) {
    if (map.records[r].spec.slots == Slots::kOne && first.records[r] != newer.front().records[r]) {
      return false;
    }
  }
  return true;
}

StoreMap read_map(Drive& drive, const Superblock& superblock, std::vector<std::string>& notes) {
  const size_t alignment = superblock.alignment_bytes;
  const AlignedBuffer buffer(align_up(superblock.map_size_bytes, alignment), alignment);
  const auto map = buffer.bytes().first(superblock.map_size_bytes);
  std::optional<IoError> unreadable;
  for (const int64_t offset :
       map_offsets(superblock.map_size_bytes, static_cast<int64_t>(alignment))) {
    try {
      drive.read(offset, buffer.bytes());
      if (checksum_of(map) == superblock.map_checksum) return decode_map(map);
      notes.push_back(fmt::format("the map in '{}' at offset {} is damaged: using its copy",
                                  drive.path().string(), offset));
    } catch (const IoError& error) {
      notes.emplace_back(error.what());
      if (!unreadable) unreadable = error;
    }
  }
  if (unreadable) throw *unreadable;
  throw failure(
      fmt::format("both copies of the map in '{}' are damaged; create the store again and "
                  "resume from a checkpoint",
                  drive.path().string()));
}

void require_consistent(const Found& drive, const Superblock& superblock, const StoreMap& map,
                        const StoreMap& first_map) {
  const int64_t needed = static_cast<int64_t>(superblock.file_size_bytes);
  if (drive.drive->size_bytes() < needed) {
    throw cut_short(drive.path, drive.drive->size_bytes(), needed);
  }
  const bool has_good_slots = std::all_of(superblock.records.begin(), superblock.records.end(),
                                          [](const RecordState& state) { return state.slot < 2; });
  if (map.drives.size() == superblock.drive_count && has_good_slots &&
      map.records.size() == superblock.records.size() && encode(map) == encode(first_map)) {
    return;
  }
  throw failure(
      fmt::format("the superblock and the map of '{}' contradict each other", drive.path.string()));
}

Error lost_in_flux(const Found& drive, const Superblock& superblock, const StoreMap& map) {
  std::string lost;
  size_t count = 0;
  for (size_t r = 0; r < map.records.size(); ++r) {
    if (map.records[r].spec.slots != Slots::kOne || superblock.records[r].generation == 0) continue;
    if (++count <= 3) lost += (lost.empty() ? "" : ", ") + describe(map.records[r].spec);
  }
  if (count > 3) lost += fmt::format(" and {} more", count - 3);
  return failure(fmt::format(
      "the run on the store of '{}' ended between two commits while it wrote over records that "
      "have "
      "one slot, so generation {} of these is lost ({}); resume from the last checkpoint",
      drive.path.string(), superblock.committed_generation, lost));
}

}  // namespace

void Store::Impl::read_tables(Opened& opened, size_t d) {
  Drive& drive = *opened.drives[d];
  const DriveMap& map = opened.map.drives[d];
  const auto alignment = static_cast<size_t>(opened.map.alignment_bytes);
  const AlignedBuffer& tables =
      opened.tables.emplace_back(static_cast<size_t>(map.tables_size_bytes), alignment);
  bool is_read = true;
  try {
    drive.read(map.tables_offset_bytes, tables.bytes());
  } catch (const IoError&) {
    is_read = false;
  }
  for (size_t r = 0; r < opened.map.records.size(); ++r) {
    const RecordState& state = opened.superblocks[d].records[r];
    const Part& part = opened.map.records[r].parts[d];
    if (state.generation == 0 || part.chunks == 0) continue;
    const int64_t offset = part.table_offset_bytes[state.slot];
    const auto size = static_cast<size_t>(part.chunks) * sizeof(uint64_t);
    const auto table = tables.bytes().subspan(static_cast<size_t>(offset - map.tables_offset_bytes),
                                              align_up(size, alignment));
    bool is_good = is_read;
    if (!is_read) {
      try {
        drive.read(offset, table);
        is_good = true;
      } catch (const IoError& error) {
        opened.notes.emplace_back(error.what());
      }
    }
    if (is_good && checksum_of(table.first(size)) == state.table_checksum) continue;
    opened.damaged_tables[r * opened.drives.size() + d] = 1;
  }
}

Store::Impl::Opened Store::Impl::open_files(const std::vector<StoreDirectory>& directories,
                                            StoreOptions options, std::vector<UniqueFd> locks) {
  const std::vector<fs::path> paths = paths_of(directories);
  Opened opened;
  std::vector<Found> drives(directories.size());
  // All locks first: a store in use is no place to look for damage.
  for (size_t i = 0; i < drives.size(); ++i) {
    drives[i].path = arena_path(paths[i]);
    drives[i].lock = locks.empty() ? lock_arena(paths[i], options.read_only) : std::move(locks[i]);
  }
  for (size_t i = 0; i < drives.size(); ++i) {
    read_superblocks(drives[i], directories[i], options, opened.notes);
  }
  sort_drives(drives);
  const std::vector<std::vector<size_t>> common = common_generations(drives);
  opened.positions = common.front();

  std::vector<StoreMap> maps;
  for (size_t d = 0; d < drives.size(); ++d) {
    Found& drive = drives[d];
    const Superblock& superblock = *drive.superblock(opened.positions[d]);
    if (superblock.alignment_bytes % drive.drive->alignment_bytes() != 0) {
      throw usage_error(fmt::format(
          "'{}' is on a drive that transfers multiples of {} bytes, and its store is laid out in "
          "multiples of {}; create the store again on that drive",
          drive.path.string(), drive.drive->alignment_bytes(), superblock.alignment_bytes));
    }
    maps.push_back(read_map(*drive.drive, superblock, opened.notes));
    require_consistent(drive, superblock, maps.back(), maps.front());
    for (size_t i = 0; i < kSuperblocks; ++i) {
      const Superblock* other = drive.superblock(i);
      if (other == nullptr) continue;
      opened.highest_generation = std::max(opened.highest_generation, other->generation);
      if (other->generation <= superblock.generation) continue;
      opened.notes.push_back(
          fmt::format("generation {} was not finished on all drives: going on from generation {}",
                      other->generation, superblock.generation));
    }
  }
  opened.map = std::move(maps.front());
  opened.superblocks = superblocks_at(drives, opened.positions);
  const uint64_t newest = opened.superblocks.front().committed_generation;
  if (options.generation && *options.generation != newest) {
    if (common.size() > 1) {
      opened.newer = std::exchange(opened.superblocks, superblocks_at(drives, common[1]));
      opened.positions = common[1];
      for (size_t d = 0; d < drives.size(); ++d) {
        opened.superblocks[d].bytes_written_total = opened.newer[d].bytes_written_total;
      }
    }
    if (opened.newer.empty() || !may_go_back(opened.superblocks, opened.newer, opened.map) ||
        opened.superblocks.front().committed_generation != *options.generation) {
      throw usage_error(fmt::format("the store in '{}' has generation {}, and {} no more",
                                    drives.front().path.string(), newest, *options.generation));
    }
    opened.notes.push_back(
        fmt::format("went back from generation {} to {}", newest, *options.generation));
  }
  if (opened.newer.empty() && common.size() > 1) {
    const std::vector<Superblock> older = superblocks_at(drives, common[1]);
    if (may_go_back(older, opened.superblocks, opened.map)) {
      opened.older.push_back({older.front().committed_generation, older.front().metadata});
    }
  }
  if (opened.superblocks.front().in_flux && !options.accept_in_flux) {
    throw lost_in_flux(drives.front(), opened.superblocks.front(), opened.map);
  }
  for (Found& drive : drives) {
    opened.locks.push_back(std::move(drive.lock));
    opened.drives.push_back(std::move(drive.drive));
  }
  opened.damaged_tables.resize(opened.map.records.size() * drives.size());
  for (size_t d = 0; d < drives.size(); ++d) read_tables(opened, d);
  if (!options.read_only) {
    // What was read may still be in a cache, left there by a process that was killed. It must not
    // be less durable than what will be written over the slots of the generation before it.
    for (const auto& drive : opened.drives) drive->sync();
  }
  opened.options = std::move(options);
  return opened;
}

std::vector<AvailableGeneration> Store::Impl::generations(
    const std::vector<StoreDirectory>& directories, StoreOptions options) {
  options.read_only = true;
  const auto has_all_tables = [](const Opened& opened) {
    return std::all_of(opened.damaged_tables.begin(), opened.damaged_tables.end(),
                       [](uint8_t damaged) { return damaged == 0; });
  };
  std::vector<AvailableGeneration> list;
  std::vector<AvailableGeneration> maybe;
  {
    const Opened newest = open_files(directories, options, {});
    const Superblock& holds = newest.superblocks.front();
    if (holds.committed_generation == 0 || holds.in_flux) return list;
    list.push_back({holds.committed_generation, holds.metadata});
    maybe = newest.older;
  }
  for (const AvailableGeneration& older : maybe) {
    options.generation = older.generation;
    if (has_all_tables(open_files(directories, options, {}))) list.push_back(older);
  }
  return list;
}

std::unique_ptr<Store::Impl> Store::Impl::create(const std::vector<StoreDirectory>& directories,
                                                 std::span<const RecordSpec> records,
                                                 StoreOptions options) {
  STRATA_CHECK(!options.read_only, "a store is not created to be read only");
  const std::vector<fs::path> paths = paths_of(directories);
  std::vector<DriveCapacity> capacities;
  for (const StoreDirectory& directory : directories) {
    int64_t capacity = free_bytes(directory.directory);
    if (directory.limit_bytes) {
      if (*directory.limit_bytes <= 0) {
        throw usage_error(fmt::format(
            "the store may use {} bytes in '{}'; raise the limit, or leave the directory out",
            *directory.limit_bytes, directory.directory.string()));
      }
      capacity = std::min(capacity, *directory.limit_bytes);
    }
    capacities.push_back({directory.directory.string(), capacity});
  }
  ArenaCreation creation(paths);
  std::vector<std::unique_ptr<Drive>> drives;
  size_t alignment = 0;
  for (size_t d = 0; d < paths.size(); ++d) {
    drives.push_back(
        std::make_unique<Drive>(drive_options(directories[d], creation.path(d), options)));
    alignment = std::max(alignment, drives.back()->alignment_bytes());
  }
  if (options.chunk_size_bytes < 1 ||
      options.chunk_size_bytes % static_cast<int64_t>(alignment) != 0) {
    throw usage_error(fmt::format("the chunk size must be a multiple of {} bytes, not {}",
                                  alignment, options.chunk_size_bytes));
  }
  const StoreMap map =
      make_map(records, capacities, options.chunk_size_bytes, static_cast<int64_t>(alignment));
  const std::vector<std::byte> encoded_map = encode(map);
  const AlignedBuffer map_bytes(align_up(encoded_map.size(), alignment), alignment);
  std::copy(encoded_map.begin(), encoded_map.end(), map_bytes.data());
  const AlignedBuffer superblock_bytes(kSuperblockSpan, alignment);

  Superblock superblock;
  std::random_device random;
  for (uint8_t& byte : superblock.store_id) byte = static_cast<uint8_t>(random());
  superblock.drive_count = static_cast<uint32_t>(paths.size());
  superblock.alignment_bytes = static_cast<uint32_t>(alignment);
  superblock.map_size_bytes = encoded_map.size();
  superblock.map_checksum = checksum_of(encoded_map);
  superblock.records.resize(map.records.size());
  for (size_t d = 0; d < paths.size(); ++d) {
    creation.allocate(d, map.drives[d].file_size_bytes);
    for (const int64_t offset : map_offsets(encoded_map.size(), static_cast<int64_t>(alignment))) {
      drives[d]->write(offset, map_bytes.bytes());
    }
    superblock.drive_index = static_cast<uint32_t>(d);
    superblock.file_size_bytes = static_cast<uint64_t>(map.drives[d].file_size_bytes);
    superblock.bytes_written_total =
        drives[d]->statistics().total().written + encoded_bytes(superblock);
    const size_t size = encode(superblock, superblock_bytes.bytes());
    drives[d]->write(0, superblock_bytes.bytes().first(size));
    drives[d]->sync();
    drives[d]->close();
  }
  drives.clear();
  creation.publish();
  auto impl =
      std::make_unique<Impl>(open_files(directories, std::move(options), creation.take_locks()));
  creation.keep();
  return impl;
}

}  // namespace strata::nvme
