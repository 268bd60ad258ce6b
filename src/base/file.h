// Files: owned descriptors, transfers that are whole or an error, and replacing a file so that a
// reader sees the old one or the new one and nothing between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "base/unique_handle.h"

namespace strata {

struct FdTraits {
  using Type = int;
  static constexpr Type invalid() noexcept { return -1; }
  static void close(Type fd) noexcept;
};
using UniqueFd = UniqueHandle<FdTraits>;

/// A file opened for reading or writing. Transfers block, handle EINTR and short counts, and throw
/// IoError with path, offset and size. Positions are explicit, so reads from several threads are
/// safe.
class File {
 public:
  [[nodiscard]] static File open_for_read(const std::filesystem::path& path);
  /// Creates the file or empties an existing one.
  [[nodiscard]] static File create(const std::filesystem::path& path);

  [[nodiscard]] int64_t size_bytes() const;
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

  /// Fills `out`; the end of the file before that is an error.
  void read_at(int64_t offset_bytes, std::span<std::byte> out) const;
  void write_at(int64_t offset_bytes, std::span<const std::byte> data);
  /// Reserves blocks for the first `size_bytes`: a full disk is found here, not midway.
  void allocate(int64_t size_bytes);
  /// Data and size are on the disk when this returns.
  void sync();
  /// Closes and reports what close(2) says; the destructor cannot.
  void close();

 private:
  File(UniqueFd fd, std::filesystem::path path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::filesystem::path path_;
};

[[nodiscard]] std::string read_text_file(const std::filesystem::path& path);

/// Writes beside `path`, syncs, and renames over it.
void write_text_file_atomically(const std::filesystem::path& path, std::string_view text);

/// Makes a rename or creation in `directory` durable.
void sync_directory(const std::filesystem::path& directory);

}  // namespace strata
