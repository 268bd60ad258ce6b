#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/bytes.h"
#include "base/error.h"

namespace strata {

void FdTraits::close(Type fd) noexcept { ::close(fd); }

File File::open_for_read(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw IoError("open", path.string(), errno);
  File file(UniqueFd::adopt(fd), path);
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw IoError("examine", path.string(), errno);
  if (S_ISDIR(status.st_mode)) throw IoError("read", path.string(), EISDIR);
  // A pipe would block for ever, and has neither size nor positions.
  if (!S_ISREG(status.st_mode)) throw IoError("read", path.string(), ESPIPE);
  return file;
}

File File::create(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw IoError("create", path.string(), errno);
  return {UniqueFd::adopt(fd), path};
}

int64_t File::size_bytes() const {
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw IoError("examine", path_.string(), errno);
  return status.st_size;
}

void File::read_at(int64_t offset_bytes, std::span<std::byte> out) const {
  size_t done = 0;
  while (done < out.size()) {
    const size_t want = std::min(out.size() - done, kGiB);
    const int64_t at = offset_bytes + static_cast<int64_t>(done);
    const ssize_t got = ::pread(fd_.get(), out.data() + done, want, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw IoError("read", path_.string(), errno, at, static_cast<int64_t>(want));
    }
    if (got == 0) {
      throw failure("'" + path_.string() + "' ends at byte " + std::to_string(at) + ", " +
                    std::to_string(out.size() - done) + " bytes short of what was to be read");
    }
    done += static_cast<size_t>(got);
  }
}

void File::write_at(int64_t offset_bytes, std::span<const std::byte> data) {
  size_t done = 0;
  while (done < data.size()) {
    const size_t want = std::min(data.size() - done, kGiB);
    const int64_t at = offset_bytes + static_cast<int64_t>(done);
    const ssize_t put = ::pwrite(fd_.get(), data.data() + done, want, at);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      const int code = put < 0 ? errno : ENOSPC;
      throw IoError("write", path_.string(), code, at, static_cast<int64_t>(want));
    }
    done += static_cast<size_t>(put);
  }
}

void File::allocate(int64_t size_bytes) {
  if (size_bytes == 0) return;
  int code = 0;
  do {
    code = ::posix_fallocate(fd_.get(), 0, size_bytes);
  } while (code == EINTR);
  // File systems without preallocation find a full disk when they are written to.
  if (code != 0 && code != EOPNOTSUPP && code != EINVAL) {
    throw IoError("reserve space for", path_.string(), code, -1, size_bytes);
  }
}

void File::sync() {
  if (::fsync(fd_.get()) != 0) throw IoError("sync", path_.string(), errno);
}

void File::close() {
  if (::close(fd_.release()) != 0 && errno != EINTR) throw IoError("close", path_.string(), errno);
}

std::string read_text_file(const std::filesystem::path& path) {
  const File file = File::open_for_read(path);
  std::string text(static_cast<size_t>(file.size_bytes()), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text_file_atomically(const std::filesystem::path& path, std::string_view text) {
  const std::filesystem::path beside = path.string() + ".partial";
  File file = File::create(beside);
  try {
    file.write_at(0, std::as_bytes(std::span(text)));
    file.sync();
    file.close();
    std::filesystem::rename(beside, path);
  } catch (...) {
    std::error_code ignored;
    std::filesystem::remove(beside, ignored);
    throw;
  }
  sync_directory(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."));
}

void sync_directory(const std::filesystem::path& directory) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw IoError("open", directory.string(), errno);
  const UniqueFd owned = UniqueFd::adopt(fd);
  if (::fsync(fd) != 0) throw IoError("sync", directory.string(), errno);
}

}  // namespace strata
