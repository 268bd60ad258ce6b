#include "nvme/opened_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace strata::nvme {
namespace {

constexpr size_t kUsualAlignmentBytes = 4096;  // right for any drive sold today

/// What direct transfers on an open file must be multiples of.
size_t direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
  // Kernels before 6.1 and some file systems leave the bit unset.
  struct statx status {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    const size_t alignment =
        std::max<size_t>(status.stx_dio_mem_align, status.stx_dio_offset_align);
    if (alignment != 0) return std::bit_ceil(alignment);
  }
#else
  static_cast<void>(fd);
#endif
  return kUsualAlignmentBytes;
}

/// Whether the file rests in memory, where O_DIRECT may be taken but means nothing.
bool is_in_memory(int fd) {
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0) return false;
  return status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC;
}

UniqueFd open_with(const BackendOptions& options, int more_flags) {
  const int flags = (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC | more_flags;
  int fd = -1;
  do {
    fd = ::open(options.path.c_str(), flags);
  } while (fd < 0 && errno == EINTR);
  return UniqueFd::adopt(fd);
}

/// Makes sure that what is read is what the medium has. When a sync fails the kernel keeps what it
/// could not write as if it had, and tells of it once: the next sync succeeds, and whoever reads
/// the file again would build on what is gone with the power.
void drop_page_cache(int fd, const std::string& path) {
  int code = 0;
  do {
    code = ::fdatasync(fd);
  } while (code != 0 && errno == EINTR);
  if (code != 0 && errno != EINVAL && errno != EROFS) throw IoError("sync", path, errno);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

}  // namespace

OpenedFile open_file(const BackendOptions& options) {
  const std::string path = options.path.string();
  // O_NONBLOCK for the first look only: opening a pipe would wait for its other end.
  UniqueFd fd = open_with(options, O_NONBLOCK);
  if (!fd) throw IoError("open", path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) throw IoError("examine", path, errno);
  if (S_ISDIR(status.st_mode)) throw IoError("open", path, EISDIR);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) throw IoError("open", path, ESPIPE);

  OpenedFile file;
  if (options.direct == DirectIo::kAuto) {
    if (is_in_memory(fd.get())) {
      file.info.notes.push_back("'" + path + "' is in memory (tmpfs), not on a drive");
    } else if (UniqueFd direct = open_with(options, O_DIRECT)) {
      file.info.direct = true;
      file.info.alignment_bytes = direct_alignment(direct.get());
      fd = std::move(direct);
    } else if (errno == EINVAL || errno == EOPNOTSUPP) {
      file.info.notes.push_back("the file system of '" + path +
                                "' has no direct I/O: transfers go through the page cache");
    } else {
      throw IoError("open", path, errno);
    }
  }
  if (!file.info.direct) {
    fd = open_with(options, 0);
    if (!fd) throw IoError("open", path, errno);
    if (!options.read_only) drop_page_cache(fd.get(), path);
  }
  const off_t size = ::lseek(fd.get(), 0, SEEK_END);
  if (size < 0) throw IoError("examine", path, errno);
  file.info.size_bytes = size;
  file.fd = std::move(fd);
  return file;
}

}  // namespace strata::nvme
