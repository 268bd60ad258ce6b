#include "train/output_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "pipeline/placement.h"
#include "train/checkpoint.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;

/// Refuses an output directory that cannot take a run: found before anything is in it. Creates the
/// directory.
void prepare(const TrainConfig& config, const model::Llama& llama, NewDirectories& made) {
  const fs::path directory = config.output_dir;
  if (fs::exists(directory) && !fs::is_directory(directory)) {
    throw usage_error(
        fmt::format("output_dir '{}' is a file; name a directory", config.output_dir));
  }
  if (config.resume.empty() &&
      (!list_checkpoints(directory).empty() || fs::exists(metrics_path(directory)))) {
    throw usage_error(
        fmt::format("output_dir '{}' already holds a run; continue it with "
                    "--resume auto, or name another directory",
                    config.output_dir));
  }
  std::error_code code = made.create(directory);
  if (code || ::access(directory.c_str(), W_OK | X_OK) != 0) {
    throw usage_error(fmt::format("output_dir '{}' cannot be written: {}", config.output_dir,
                                  code ? code.message() : std::strerror(errno)));
  }
  if (config.save_strategy == SaveStrategy::kNo) return;
  size_t checkpoint_bytes = 0;
  for (const pipeline::UnitSpec& unit : llama.units()) {
    for (size_t k = 0; k < pipeline::kStateKinds; ++k) {
      const auto kind = static_cast<pipeline::StateKind>(k);
      if (kind == pipeline::StateKind::kGradient) continue;
      checkpoint_bytes +=
          pipeline::state_bytes(kind, unit.parameter_count, llama.dtype(), config.optimizer_state);
    }
  }
  const fs::space_info space = fs::space(directory, code);
  if (!code && space.available < checkpoint_bytes) {
    throw usage_error(fmt::format(
        "output_dir '{}' has {} free, and a checkpoint takes {}; free "
        "some space or name another directory",
        config.output_dir, format_bytes(space.available), format_bytes(checkpoint_bytes)));
  }
}

/// Refuses a file for the trace that could not be written when the run is over.
void check_trace(const std::string& trace) {
  if (trace.empty()) return;
  const fs::path parent = fs::absolute(trace).parent_path();
  if (fs::is_directory(trace)) {
    throw usage_error(fmt::format("trace '{}' is a directory; name a file", trace));
  }
  if (!fs::is_directory(parent)) {
    throw usage_error(fmt::format("trace '{}' cannot be written: there is no directory '{}'", trace,
                                  parent.string()));
  }
  const std::string place = fs::exists(trace) ? trace : parent.string();
  if (::access(place.c_str(), W_OK) != 0) {
    throw usage_error(fmt::format("trace '{}' cannot be written: {}", trace, std::strerror(errno)));
  }
}

/// Held while a run writes to its directory; a second run on it is refused.
UniqueFd lock_directory(const fs::path& directory) {
  UniqueFd fd = UniqueFd::adopt(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw IoError("open", directory.string(), errno);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw IoError("lock", directory.string(), errno);
    throw usage_error(
        fmt::format("another run is writing to output_dir '{}'; wait for it to end, "
                    "or name another directory",
                    directory.string()));
  }
  return fd;
}

}  // namespace

fs::path metrics_path(const fs::path& directory) { return directory / "metrics.jsonl"; }
fs::path config_path(const fs::path& directory) { return directory / "config.yaml"; }

NewDirectories::~NewDirectories() {
  std::error_code ignored;
  for (auto made = made_.rbegin(); made != made_.rend(); ++made) fs::remove(*made, ignored);
}

std::error_code NewDirectories::create(const fs::path& directory) {
  std::error_code code;
  std::vector<fs::path> missing;
  for (fs::path at = fs::absolute(directory); !fs::exists(at, code); at = at.parent_path()) {
    if (code || !at.has_relative_path()) break;
    missing.push_back(at);
  }
  for (auto at = missing.rbegin(); at != missing.rend(); ++at) {
    if (fs::create_directory(*at, code)) made_.push_back(*at);
    if (code) return code;
  }
  return {};
}

DirectoryMark::DirectoryMark(const fs::path& directory) {
  fs::path place = directory;
  std::error_code code;
  while (!place.empty() && !fs::is_directory(place, code)) {
    const fs::path parent = place.parent_path();
    if (parent == place) return;
    place = parent;
  }
  // A name that was never looked for, which no cache of a network's file system can hold for
  // missing.
  std::string name = (place / ".strata-mark-XXXXXX").string();
  if (!UniqueFd::adopt(::mkostemp(name.data(), O_CLOEXEC))) return;
  path_ = name;
}

DirectoryMark::~DirectoryMark() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove(path_, ignored);
}

OutputDirectory::OutputDirectory(const TrainConfig& config, const model::Llama& llama) {
  prepare(config, llama, made_);
  check_trace(config.trace);
  lock_ = lock_directory(config.output_dir);
}

UniqueFd OutputDirectory::keep() noexcept {
  made_.keep();
  return std::move(lock_);
}

}  // namespace strata::train
