// The arena files of a store on their file systems: made so that nothing is left behind when that
// fails, and held against a second run. What is in them is the store's affair.
//
// Threads: none of this is shared between threads. Everything throws Error.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/file.h"

namespace strata::nvme {

/// The one file of a store in each of its directories.
[[nodiscard]] std::filesystem::path arena_path(const std::filesystem::path& directory);
/// What it is called while it is made: no store, and replaced by the next creation.
[[nodiscard]] std::filesystem::path partial_arena_path(const std::filesystem::path& directory);

/// The same for all ways to write a directory, which need not exist yet.
[[nodiscard]] std::filesystem::path canonical_directory(const std::filesystem::path& directory);

/// Bytes that an ordinary user may still allocate on the directory's file system. The directory
/// need not exist yet.
[[nodiscard]] int64_t free_bytes(const std::filesystem::path& directory);

/// Opens the arena file in `directory` and takes its lock, which lasts as long as the descriptor.
/// With `shared` any number may hold it together, but none beside one that does not share. Refused
/// with the holder's process id, where it is known.
[[nodiscard]] UniqueFd lock_arena(const std::filesystem::path& directory, bool shared);

/// New arena files, one in each directory, under a name of their own until publish(). Destroyed
/// before keep() it removes them, and the directories that it made.
class ArenaCreation {
 public:
  /// Makes the directories and empty files, and locks these. Refused where there is a store
  /// already.
  explicit ArenaCreation(const std::vector<std::filesystem::path>& directories);
  ~ArenaCreation();
  ArenaCreation(const ArenaCreation&) = delete;
  ArenaCreation& operator=(const ArenaCreation&) = delete;

  /// Under its present name.
  [[nodiscard]] const std::filesystem::path& path(size_t index) const {
    return files_[index].partial;
  }
  /// Gives the file its size and reserves every block of it. Throws kDoesNotFit on a full disk.
  void allocate(size_t index, int64_t size_bytes);
  /// Everything written is durable and under its final name when this returns.
  void publish();
  /// The locks, after publish(); the files are still removed unless keep() is called.
  [[nodiscard]] std::vector<UniqueFd> take_locks();
  void keep() noexcept { is_kept_ = true; }

 private:
  struct NewFile {
    std::filesystem::path directory, partial, final;
    UniqueFd fd;
    bool is_renamed = false;
  };

  void add(const std::filesystem::path& directory);
  void remove_all() noexcept;

  std::vector<NewFile> files_;
  std::vector<std::filesystem::path> made_directories_;  // outermost first
  bool is_kept_ = false;
};

}  // namespace strata::nvme
