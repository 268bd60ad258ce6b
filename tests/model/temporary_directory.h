// A directory of its own for a test, removed with all it holds.
#pragma once

#include <atomic>
#include <filesystem>
#include <random>
#include <string>

namespace strata {

class TemporaryDirectory {
 public:
  TemporaryDirectory()
      : path_(std::filesystem::temp_directory_path() /
              ("strata-test-" + std::to_string(std::random_device{}()) + "-" +
               std::to_string(next_number()))) {
    std::filesystem::create_directories(path_);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  static int next_number() {
    static std::atomic<int> next{0};
    return next++;
  }

  std::filesystem::path path_;
};

}  // namespace strata
