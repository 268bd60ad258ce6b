// Where a run writes: found fit before anything is in it, locked, and gone again if the run is not
// to be.
#pragma once

#include <filesystem>
#include <system_error>
#include <vector>

#include "base/file.h"
#include "model/llama.h"
#include "train/config.h"

namespace strata::train {

[[nodiscard]] std::filesystem::path metrics_path(const std::filesystem::path& directory);
[[nodiscard]] std::filesystem::path config_path(const std::filesystem::path& directory);

/// Directories that are gone again, if empty, unless they are kept.
class NewDirectories {
 public:
  NewDirectories() = default;
  NewDirectories(const NewDirectories&) = delete;
  NewDirectories& operator=(const NewDirectories&) = delete;
  ~NewDirectories();
  /// Makes the directory and those that it is in, where they are not there.
  [[nodiscard]] std::error_code create(const std::filesystem::path& directory);
  void keep() noexcept { made_.clear(); }

 private:
  std::vector<std::filesystem::path> made_;
};

/// An empty file in `directory`, or where that is not there in the nearest that it would be in:
/// other ranks see by it whether theirs is the same.
class DirectoryMark {
 public:
  /// Never throws; the path is empty where no file can be made.
  explicit DirectoryMark(const std::filesystem::path& directory);
  DirectoryMark(const DirectoryMark&) = delete;
  DirectoryMark& operator=(const DirectoryMark&) = delete;
  ~DirectoryMark();
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

/// The output_dir of a run that is being set up.
class OutputDirectory {
 public:
  /// Makes the directory and locks it. Throws a usage error where it cannot take the run, another
  /// run is writing to it, or the trace could not be written when the run is over.
  OutputDirectory(const TrainConfig& config, const model::Llama& llama);

  /// From now on it stays. To be held while the run writes to it.
  [[nodiscard]] UniqueFd keep() noexcept;

 private:
  NewDirectories made_;
  UniqueFd lock_;
};

}  // namespace strata::train
