#include "nvme/arena_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace strata::nvme {
namespace {

namespace fs = std::filesystem;

constexpr const char* kArenaFile = "arena.strata";
constexpr const char* kPartialSuffix = ".partial";

struct stat status_of(int fd, const fs::path& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw IoError("examine", path.string(), errno);
  return status;
}

/// " by process 1234", from the kernel's list of locks; empty where that does not say.
std::string holder_of(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return "";
  const std::string file =
      fmt::format("{:02x}:{:02x}:{}", major(status.st_dev), minor(status.st_dev), status.st_ino);
  std::ifstream locks("/proc/locks");
  std::string number, type, advisory, access, pid, locked, rest;
  while (locks >> number >> type >> advisory >> access >> pid >> locked) {
    std::getline(locks, rest);
    if (type == "FLOCK" && locked == file && pid != "0") return " by process " + pid;
  }
  return "";
}

void lock(int fd, const fs::path& path, bool shared) {
  int code = 0;
  do {
    code = ::flock(fd, (shared ? LOCK_SH : LOCK_EX) | LOCK_NB);
  } while (code != 0 && errno == EINTR);
  if (code == 0) return;
  if (errno != EWOULDBLOCK) throw IoError("lock", path.string(), errno);
  throw usage_error(
      fmt::format("the store '{}' is in use{}; wait until that has ended, or use another "
                  "directory",
                  path.string(), holder_of(fd)));
}

/// Whether the path still leads to the opened file.
bool is_current(int fd, const fs::path& path) {
  const struct stat opened = status_of(fd, path);
  struct stat named {};
  return ::stat(path.c_str(), &named) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

/// Writes that a killed process had in flight go on after its end, and after its lock is gone. They
/// must not arrive on top of what comes next. File systems that write past the page cache wait for
/// all of them before they allocate blocks (ext4, xfs), even where there is nothing to allocate.
void wait_for_direct_io(int fd) {
  while (::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 1) != 0 && errno == EINTR) {
  }
}

Error not_regular(const fs::path& path) {
  return usage_error(fmt::format("'{}' is not a store: it is not a regular file", path.string()));
}

fs::path existing_ancestor(fs::path directory) {
  directory = fs::absolute(directory);
  while (!fs::exists(directory) && directory.has_relative_path()) {
    directory = directory.parent_path();
  }
  return directory;
}

}  // namespace

fs::path arena_path(const fs::path& directory) { return directory / kArenaFile; }
fs::path partial_arena_path(const fs::path& directory) {
  return arena_path(directory).string() + kPartialSuffix;
}

fs::path canonical_directory(const fs::path& directory) {
  std::error_code code;
  const fs::path canonical = fs::weakly_canonical(fs::absolute(directory), code);
  const fs::path& path = code ? directory : canonical;
  return path.has_filename() ? path : path.parent_path();
}

int64_t free_bytes(const fs::path& directory) {
  const fs::path place = existing_ancestor(directory);
  struct statvfs status {};
  if (::statvfs(place.c_str(), &status) != 0) throw IoError("examine", place.string(), errno);
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
}

UniqueFd lock_arena(const fs::path& directory, bool shared) {
  const fs::path path = arena_path(directory);
  const int access = shared ? O_RDONLY : O_RDWR;
  auto fd = UniqueFd::adopt(::open(path.c_str(), access | O_CLOEXEC | O_NONBLOCK));
  if (!fd) {
    if (errno == EISDIR) throw not_regular(path);
    if (errno != ENOENT && errno != ENOTDIR) throw IoError("open", path.string(), errno);
    throw usage_error(
        fs::exists(partial_arena_path(directory))
            ? fmt::format("there is no whole store in '{}': its creation was cut off; create it "
                          "again",
                          directory.string())
            : fmt::format("there is no store in '{}': it has no file '{}'", directory.string(),
                          kArenaFile));
  }
  if (!S_ISREG(status_of(fd.get(), path).st_mode)) throw not_regular(path);
  lock(fd.get(), path, shared);
  if (!is_current(fd.get(), path)) {
    throw failure(
        fmt::format("'{}' was replaced while it was being opened; try again", path.string()));
  }
  if (!shared) wait_for_direct_io(fd.get());
  return fd;
}

ArenaCreation::ArenaCreation(const std::vector<fs::path>& directories) {
  try {
    for (const fs::path& directory : directories) add(directory);
  } catch (...) {
    remove_all();
    throw;
  }
}

ArenaCreation::~ArenaCreation() {
  if (!is_kept_) remove_all();
}

void ArenaCreation::add(const fs::path& directory) {
  std::vector<fs::path> missing;
  for (fs::path at = fs::absolute(directory); !at.empty() && !fs::exists(at);
       at = at.parent_path()) {
    missing.push_back(at);
  }
  for (auto at = missing.rbegin(); at != missing.rend(); ++at) {
    std::error_code error;
    if (fs::create_directory(*at, error)) made_directories_.push_back(*at);
    if (error) throw IoError("create directory", at->string(), error.value());
  }

  NewFile file{directory, partial_arena_path(directory), arena_path(directory), {}};
  const char* name = file.partial.c_str();
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC;
  if (::access(name, F_OK) == 0) {
    // Left by a creation that was cut off, unless that still goes on and holds the lock.
    const auto old = UniqueFd::adopt(::open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!old) throw IoError("open", file.partial.string(), errno);
    lock(old.get(), file.partial, false);
    if (::unlink(name) != 0 && errno != ENOENT) {
      throw IoError("remove", file.partial.string(), errno);
    }
  }
  file.fd = UniqueFd::adopt(::open(name, kFlags | O_EXCL, 0644));
  if (!file.fd && errno == EEXIST) {
    throw failure(
        fmt::format("another process is creating a store in '{}', or the directory was "
                    "given twice",
                    directory.string()));
  }
  if (!file.fd) throw IoError("create", file.partial.string(), errno);
  files_.push_back(std::move(file));
  NewFile& added = files_.back();
  lock(added.fd.get(), added.partial, false);
  if (!is_current(added.fd.get(), added.partial)) {
    files_.pop_back();
    throw failure(fmt::format("another process is creating a store in '{}'", directory.string()));
  }
  if (fs::exists(added.final)) {
    throw usage_error(fmt::format("there is a store in '{}' already; to give it up, remove '{}'",
                                  directory.string(), added.final.string()));
  }
}

void ArenaCreation::allocate(size_t index, int64_t size_bytes) {
  const NewFile& file = files_[index];
  int code = 0;
  do {
    code = ::posix_fallocate(file.fd.get(), 0, size_bytes);
  } while (code == EINTR);
  if (code == 0) return;
  if (code != ENOSPC && code != EDQUOT && code != EFBIG) {
    throw IoError("reserve space for", file.partial.string(), code, -1, size_bytes);
  }
  // What the failed attempt took would be missing from the free bytes in the message.
  if (::ftruncate(file.fd.get(), 0) != 0) {
    throw IoError("empty", file.partial.string(), errno);
  }
  const int64_t free = free_bytes(file.directory);
  throw Error(
      ErrorKind::kDoesNotFit,
      fmt::format("the store needs {} ({} bytes) in '{}', where {} ({} bytes) are free; free "
                  "space, add a drive, or keep less state on disk",
                  format_bytes(static_cast<size_t>(size_bytes)), size_bytes,
                  file.directory.string(), format_bytes(static_cast<size_t>(free)), free));
}

void ArenaCreation::publish() {
  for (const NewFile& file : files_) {
    if (::fsync(file.fd.get()) != 0) throw IoError("sync", file.partial.string(), errno);
  }
  for (NewFile& file : files_) {
    if (::rename(file.partial.c_str(), file.final.c_str()) != 0) {
      throw IoError("rename", file.partial.string(), errno);
    }
    file.is_renamed = true;
  }
  for (const NewFile& file : files_) sync_directory(file.directory);
  for (const fs::path& directory : made_directories_) sync_directory(directory.parent_path());
}

std::vector<UniqueFd> ArenaCreation::take_locks() {
  std::vector<UniqueFd> locks;
  for (NewFile& file : files_) locks.push_back(std::move(file.fd));
  return locks;
}

void ArenaCreation::remove_all() noexcept {
  std::error_code ignored;
  for (const NewFile& file : files_)
    fs::remove(file.is_renamed ? file.final : file.partial, ignored);
  std::for_each(made_directories_.rbegin(), made_directories_.rend(),
                [&](const fs::path& directory) { fs::remove(directory, ignored); });
  files_.clear();
}

}  // namespace strata::nvme
