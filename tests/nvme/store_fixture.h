// What the tests of the store share: contents that can be told from (generation, record, position)
// alone, and stores on disks in memory.
#pragma once

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "nvme/aligned_buffer.h"
#include "nvme/arena_file.h"
#include "nvme/fault_backend.h"
#include "nvme/store.h"
#include "temporary_directory.h"

namespace strata::nvme {

/// The bytes of a record (padding included) as `generation` has them.
inline void fill_content(std::span<std::byte> out, int record, uint64_t generation,
                         int64_t offset_bytes) {
  for (size_t i = 0; i < out.size(); i += sizeof(uint64_t)) {
    uint64_t value = (generation << 40) ^ (static_cast<uint64_t>(record) << 32) ^
                     (static_cast<uint64_t>(offset_bytes) + i);
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
    std::memcpy(out.data() + i, &value, std::min(sizeof value, out.size() - i));
  }
}

/// Writes and reads whole records of a store by blocking requests.
class Content {
 public:
  explicit Content(Store& store) : Content(store, largest_of(store)) {}
  /// For records of up to `largest` bytes.
  Content(Store& store, int64_t largest) : store_(store) {
    buffer_ = AlignedBuffer(static_cast<size_t>(largest), store.alignment_bytes());
    expected_.resize(static_cast<size_t>(largest));
  }

  void write(int record, uint64_t generation) {
    const auto bytes = buffer_.bytes().first(static_cast<size_t>(store_.stored_bytes(record)));
    fill_content(bytes, record, generation, 0);
    store_.write({.record = record, .data = bytes});
  }
  void write_all(uint64_t generation) {
    for (size_t r = 0; r < store_.map().records.size(); ++r) {
      write(static_cast<int>(r), generation);
    }
  }
  [[nodiscard]] bool has(int record, uint64_t generation, Version version = Version::kCurrent) {
    const auto bytes = buffer_.bytes().first(static_cast<size_t>(store_.stored_bytes(record)));
    std::memset(bytes.data(), 0xcc, bytes.size());
    store_.read({.record = record, .data = bytes, .version = version});
    const auto size =
        static_cast<size_t>(store_.map().records[static_cast<size_t>(record)].spec.size_bytes);
    fill_content(std::span(expected_).first(size), record, generation, 0);
    return std::memcmp(bytes.data(), expected_.data(), size) == 0;
  }
  [[nodiscard]] bool all_have(uint64_t generation) {
    for (size_t r = 0; r < store_.map().records.size(); ++r) {
      if (!has(static_cast<int>(r), generation)) return false;
    }
    return true;
  }

 private:
  static int64_t largest_of(const Store& store) {
    int64_t largest = 0;
    for (size_t r = 0; r < store.map().records.size(); ++r) {
      largest = std::max(largest, store.stored_bytes(static_cast<int>(r)));
    }
    return largest;
  }

  Store& store_;
  AlignedBuffer buffer_;
  std::vector<std::byte> expected_;
};

[[nodiscard]] inline std::span<const std::byte> as_metadata(const uint64_t& value) {
  return std::as_bytes(std::span(&value, 1));
}
[[nodiscard]] inline uint64_t metadata_of(const Store& store) {
  uint64_t value = 0;
  if (store.metadata().size() == sizeof value) {
    std::memcpy(&value, store.metadata().data(), sizeof value);
  }
  return value;
}

/// Small and quick: many chunks, few threads' worth of room.
[[nodiscard]] inline StoreOptions small_options() {
  StoreOptions options;
  options.chunk_size_bytes = 4096;
  options.chunks_in_flight = 64;
  options.requests_in_flight = 16;
  return options;
}

[[nodiscard]] inline std::vector<StoreDirectory> directories_in(const TemporaryDirectory& place,
                                                                size_t drives) {
  std::vector<StoreDirectory> directories;
  for (size_t d = 0; d < drives; ++d) {
    directories.push_back({.directory = place.path("drive" + std::to_string(d))});
  }
  return directories;
}

[[nodiscard]] inline std::vector<std::byte> read_file(const std::filesystem::path& path) {
  const File file = File::open_for_read(path);
  std::vector<std::byte> bytes(static_cast<size_t>(file.size_bytes()));
  file.read_at(0, bytes);
  return bytes;
}

/// Every edge of a chunk, and enough chunks to fill more than one page of a table.
[[nodiscard]] inline std::vector<RecordSpec> edge_records() {
  constexpr int64_t kChunk = 4096;
  std::vector<RecordSpec> records;
  for (const int64_t size : {int64_t{1}, kChunk - 1, kChunk, kChunk + 1, 2 * kChunk, 5 * kChunk + 7,
                             9 * kChunk - 1, 1100 * kChunk + 513}) {
    records.push_back({static_cast<int>(records.size()), Traffic::kMoment1, size});
  }
  return records;
}

/// What opening says, or nothing where it succeeds.
[[nodiscard]] inline std::string open_message(const std::vector<StoreDirectory>& directories) {
  return message_of([&] { static_cast<void>(Store::open(directories, small_options())); });
}

/// The kind of the error that `call` throws; kInterrupted where it throws none.
template <class Call>
[[nodiscard]] ErrorKind kind_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind();
  }
  return ErrorKind::kInterrupted;
}

inline void overwrite(const std::filesystem::path& path, int64_t offset, std::string_view bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.exceptions(std::ios::failbit | std::ios::badbit);
  file.seekp(offset);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

/// A store whose drives are disks in memory. Files of the same names lie in a temporary directory,
/// but only their locks are used.
class MemoryStore {
 public:
  MemoryStore(size_t drives, const std::vector<RecordSpec>& records,
              StoreOptions options = small_options())
      : directories_(directories_in(place_, drives)), options_(std::move(options)) {
    Store::create(directories_, records, options_).close();
    std::vector<std::vector<std::byte>> images;
    for (const StoreDirectory& directory : directories_) {
      images.push_back(read_file(arena_path(directory.directory)));
    }
    set_images(std::move(images));
  }

  /// New disks with this on them, on a power supply of their own.
  void set_images(std::vector<std::vector<std::byte>> images) {
    power_ = std::make_shared<PowerSupply>();
    disks_.clear();
    for (auto& image : images) {
      disks_.push_back(std::make_unique<FaultDisk>(std::move(image), power_));
    }
  }
  struct OpenAs {
    bool read_only = false;
    bool accept_in_flux = false;
    std::optional<uint64_t> generation = std::nullopt;
  };
  [[nodiscard]] Store open() { return open(OpenAs{}); }
  [[nodiscard]] Store open(OpenAs as) {
    StoreOptions options = this->options();
    options.read_only = as.read_only;
    options.accept_in_flux = as.accept_in_flux;
    options.generation = as.generation;
    return Store::open(directories_, options);
  }
  [[nodiscard]] std::vector<AvailableGeneration> generations() {
    return Store::generations(directories_, options());
  }

  [[nodiscard]] FaultDisk& disk(size_t index) { return *disks_[index]; }
  [[nodiscard]] size_t drives() const { return disks_.size(); }
  [[nodiscard]] PowerSupply& power() { return *power_; }
  [[nodiscard]] std::string path(size_t index) const {
    return arena_path(directories_[index].directory).string();
  }

 private:
  [[nodiscard]] StoreOptions options() {
    StoreOptions options = options_;
    options.backend = [this](const BackendOptions& backend) {
      for (size_t d = 0; d < disks_.size(); ++d) {
        if (backend.path == arena_path(directories_[d].directory)) {
          return disks_[d]->factory()(backend);
        }
      }
      throw failure("no disk of that name");
    };
    return options;
  }

  TemporaryDirectory place_;
  std::vector<StoreDirectory> directories_;
  StoreOptions options_;
  std::shared_ptr<PowerSupply> power_;
  std::vector<std::unique_ptr<FaultDisk>> disks_;
};

}  // namespace strata::nvme
