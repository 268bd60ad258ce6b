// Drives on real files, with each backend, on the file system of the temporary directory and in
// memory.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "catch.h"
#include "nvme/drive.h"
#include "nvme/test_requests.h"
#include "nvme/thread_backend.h"
#include "nvme/uring_backend.h"
#include "temporary_directory.h"
#include "trials.h"

namespace strata::nvme {
namespace {

constexpr size_t kPage = Drive::kMinAlignmentBytes;

struct NamedBackend {
  const char* name;
  std::unique_ptr<Backend> (*open)(const BackendOptions&);
};

/// Those that this machine allows.
std::vector<NamedBackend> backends() {
  std::vector<NamedBackend> all{{"threads", open_thread_backend}};
  const TemporaryDirectory directory;
  const std::string path = directory.write("probe", "");
  try {
    const Drive drive({.path = path, .backend = open_uring_backend});
    all.push_back({"io_uring", open_uring_backend});
  } catch (const IoError& error) {
    WARN("skipped: io_uring: " << error.what());
  }
  return all;
}

/// A file of this size without blocks, gone at the end.
class SparseFile {
 public:
  explicit SparseFile(const std::filesystem::path& directory, int64_t size_bytes) {
    std::string name = (directory / "strata-test-XXXXXX").string();
    const int fd = ::mkstemp(name.data());
    if (fd < 0) throw IoError("create", name, errno);
    path_ = name;
    const int code = ::ftruncate(fd, size_bytes);
    ::close(fd);
    if (code != 0) throw IoError("lengthen", name, errno);
  }
  SparseFile(const SparseFile&) = delete;
  SparseFile& operator=(const SparseFile&) = delete;
  ~SparseFile() { std::filesystem::remove(path_); }
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::vector<std::filesystem::path> places() {
  std::vector<std::filesystem::path> all{std::filesystem::temp_directory_path()};
  if (::access("/dev/shm", W_OK) == 0) all.emplace_back("/dev/shm");
  return all;
}

size_t count_open_files() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(entries), end(entries)));
}

}  // namespace

TEST_CASE("what a drive writes is in the file, and it reads what is") {
  constexpr size_t kSize = 5 * kMiB + 3 * kPage;
  for (const NamedBackend& backend : backends()) {
    for (const std::filesystem::path& place : places()) {
      for (const bool registered : {false, true}) {
        INFO(backend.name << " in " << place << (registered ? ", registered" : ""));
        const SparseFile file(place, 8 * kMiB);
        const PageBuffer data(kSize);
        const PageBuffer back(kSize);
        fill_random(data.span(), 1);
        DriveOptions options{.path = file.path(),
                             .block_size_bytes = 256 * kKiB,
                             .depth = 8,
                             .backend = backend.open};
        if (registered) {
          // A part only: other memory must work beside it, and what lies across its end.
          options.buffers = {{back.data(), kMiB}, {data.data() + kMiB, 2 * kMiB + 5 * kPage}};
        }
        Drive drive(options);
        CHECK(drive.backend_name() == backend.name);
        CHECK(drive.size_bytes() == static_cast<int64_t>(8 * kMiB));
        CHECK(drive.alignment_bytes() >= kPage);
        drive.write(7 * kPage, data.span());
        drive.sync();
        std::vector<std::byte> plain(kSize);
        File::open_for_read(file.path()).read_at(7 * kPage, plain);
        CHECK(equal(plain, data.span()));
        drive.read(7 * kPage, back.span());
        CHECK(equal(back.span(), data.span()));
        drive.close();
        CHECK(std::filesystem::file_size(file.path()) == 8 * kMiB);
      }
    }
  }
}

TEST_CASE("direct I/O is used where it is wanted and can be had, and notes say where not") {
  for (const NamedBackend& backend : backends()) {
    for (const std::filesystem::path& place : places()) {
      const SparseFile file(place, kMiB);
      const Drive on(DriveOptions{.path = file.path(), .backend = backend.open});
      CHECK(on.is_direct() == on.notes().empty());
      const Drive off(
          DriveOptions{.path = file.path(), .direct = DirectIo::kOff, .backend = backend.open});
      CHECK_FALSE(off.is_direct());
      CHECK(off.notes().empty());
      if (place == "/dev/shm") {
        REQUIRE(on.notes().size() == 1);
        CHECK(on.notes()[0].find("is in memory (tmpfs)") != std::string::npos);
      }
    }
  }
}

TEST_CASE("errors of the file system come through") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("short", std::string(10000, 'x'));
  for (const NamedBackend& backend : backends()) {
    INFO(backend.name);
    DriveOptions options{.path = directory.path("missing"), .backend = backend.open};
    CHECK(message_of([&] { const Drive drive(options); }) ==
          "cannot open '" + directory.path("missing") + "': No such file or directory");
    options.path = directory.path();
    CHECK(message_of([&] { const Drive drive(options); }).find("Is a directory") !=
          std::string::npos);
    options.path = directory.path("fifo");
    std::filesystem::remove(options.path);
    REQUIRE(::mkfifo(options.path.c_str(), 0600) == 0);
    CHECK(message_of([&] { const Drive drive(options); }).find("Illegal seek") !=
          std::string::npos);

    options.path = path;
    options.read_only = true;
    Drive drive(options);
    const PageBuffer buffer(4 * kPage);
    CHECK(message_of([&] { drive.write(0, buffer.span()); }).find("Bad file descriptor") !=
          std::string::npos);
    drive.read(kPage, buffer.span(0, kPage));
    CHECK(buffer.data()[0] == std::byte{'x'});
    // The file ends in the third page: not a whole number of anything.
    CHECK(message_of([&] { drive.read(0, buffer.span()); }).find("No data available") !=
          std::string::npos);
    CHECK(message_of([&] {
            drive.read(2 * kPage, buffer.span(0, kPage));
          }).find("No data available") != std::string::npos);
  }
}

TEST_CASE(
    "a file opened for the page cache is read from the medium, not from what a failed sync left") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("file", std::string(16 * kPage, 'c'));
  const auto fd = UniqueFd::adopt(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto is_cached = [&] {
    std::array<std::byte, kPage> page{};
    const iovec into{page.data(), page.size()};
    return ::preadv2(fd.get(), &into, 1, 3 * kPage, RWF_NOWAIT) > 0;
  };
  for (const NamedBackend& backend : backends()) {
    INFO(backend.name);
    const PageBuffer buffer(16 * kPage);
    std::vector<std::byte> plain(16 * kPage);
    File::open_for_read(path).read_at(0, plain);
    if (!is_cached()) {
      WARN("skipped: the file system does not say what it has in memory");
      return;
    }
    Drive drive(DriveOptions{.path = path, .direct = DirectIo::kOff, .backend = backend.open});
    CHECK_FALSE(is_cached());
    drive.read(0, buffer.span());
    CHECK(buffer.data()[5 * kPage] == std::byte{'c'});
    CHECK(is_cached());
    drive.close();
    // Readers change nothing that could be lost.
    Drive(DriveOptions{
              .path = path, .read_only = true, .direct = DirectIo::kOff, .backend = backend.open})
        .close();
    CHECK(is_cached());
  }
}

TEST_CASE("offsets over 4 GiB") {
  constexpr int64_t kFar = (int64_t{6} << 30) + 3 * static_cast<int64_t>(kPage);
  for (const NamedBackend& backend : backends()) {
    for (const std::filesystem::path& place : places()) {
      const SparseFile file(place, int64_t{8} << 30);
      Drive drive({.path = file.path(), .backend = backend.open});
      const PageBuffer data(3 * kMiB);
      const PageBuffer back(3 * kMiB);
      fill_random(data.span(), 2);
      drive.write(kFar, data.span());
      drive.read(kFar, back.span());
      CHECK(equal(data.span(), back.span()));
      std::vector<std::byte> plain(3 * kMiB);
      File::open_for_read(file.path()).read_at(kFar, plain);
      CHECK(equal(data.span(), plain));
      drive.read(kFar & 0xFFFFFFFF, back.span());  // where a 32-bit offset would have gone
      CHECK(std::all_of(back.span().begin(), back.span().end(),
                        [](std::byte each) { return each == std::byte{0}; }));
    }
  }
}

TEST_CASE("one request of more than 4 GiB", "[full]") {
  // The file has no blocks and the memory is the same few pages again and again, but for the last.
  constexpr size_t kSize = (size_t{4} << 30) + 64 * kMiB;
  constexpr size_t kRepeated = 64 * kMiB;
  const int memory = ::memfd_create("strata-test", MFD_CLOEXEC);
  REQUIRE(memory >= 0);
  REQUIRE(::ftruncate(memory, kRepeated) == 0);
  void* address =
      ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(address != MAP_FAILED);
  auto* base = static_cast<std::byte*>(address);
  for (size_t at = 0; at < kSize - kRepeated; at += kRepeated) {
    REQUIRE(::mmap(base + at, kRepeated, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory,
                   0) != MAP_FAILED);
  }
  const PageBuffer mark(kMiB);
  fill_random(mark.span(), 3);
  for (const NamedBackend& backend : backends()) {
    const SparseFile file(std::filesystem::temp_directory_path(), kSize + kMiB);
    Drive drive({.path = file.path(), .backend = backend.open});
    drive.write(static_cast<int64_t>(kSize), mark.span());  // the request ends with it
    Results results;
    drive.submit({.offset_bytes = kMiB, .data = base, .size_bytes = kSize, .sink = results.sink()});
    results.wait_for(1);
    REQUIRE(results.all()[0].ok());
    CHECK(results.all()[0].size_bytes == kSize);
    CHECK(drive.statistics().total().read == kSize);
    CHECK(equal(mark.span(), {base + kSize - kMiB, kMiB}));
    std::fill_n(base + kSize - kMiB, kMiB, std::byte{0});
  }
  ::munmap(address, kSize);
  ::close(memory);
}

TEST_CASE("many drives leave no descriptor behind") {
  constexpr int kDrives = trials(1000, 50);
  const SparseFile file(std::filesystem::temp_directory_path(), kMiB);
  const PageBuffer buffer(kPage);
  for (const NamedBackend& backend : backends()) {
    size_t before = 0;
    for (int i = 0; i < kDrives; ++i) {
      Drive drive({.path = file.path(),
                   .depth = 4,
                   .buffers = {{buffer.data(), kPage}},
                   .backend = backend.open});
      if (i % 10 == 0) drive.read(0, buffer.span());
      if (i % 2 == 0) drive.close();
      if (i == 1) before = count_open_files();
      if (i == kDrives - 1) CHECK(count_open_files() == before);
    }
  }
}

TEST_CASE("a failed opening leaves no descriptor behind") {
  const TemporaryDirectory directory;
  const size_t before = count_open_files();
  for (int i = 0; i < 20; ++i) {
    CHECK_THROWS(Drive(DriveOptions{.path = directory.path("missing")}));
    CHECK_THROWS(Drive(DriveOptions{.path = directory.path()}));
    const std::string path = directory.write("file", "");
    CHECK_THROWS(Drive(DriveOptions{.path = path, .block_size_bytes = 1000}));
  }
  CHECK(count_open_files() == before);
}

TEST_CASE("where io_uring is forbidden, threads take over and say so") {
  const TemporaryDirectory directory;
  const std::string path = directory.write("file", std::string(kPage, 'y'));
  for (const int code : {ENOSYS, EPERM}) {
    DriveOptions options{.path = path, .direct = DirectIo::kOff};
    options.backend = with_fallback(
        [code](const BackendOptions& backend) -> std::unique_ptr<Backend> {
          throw IoError("set up io_uring for", backend.path.string(), code);
        },
        open_thread_backend);
    Drive drive(options);
    CHECK(drive.backend_name() == "threads");
    REQUIRE(drive.notes().size() == 1);
    CHECK(drive.notes()[0].find("cannot set up io_uring for '" + path + "'") == 0);
    CHECK(drive.notes()[0].find("; using threads instead") != std::string::npos);
    const PageBuffer buffer(kPage);
    drive.read(0, buffer.span());
    CHECK(buffer.data()[17] == std::byte{'y'});
  }
  const auto broken = with_fallback(
      [](const BackendOptions& backend) -> std::unique_ptr<Backend> {
        throw IoError("open", backend.path.string(), EIO);
      },
      open_thread_backend);
  CHECK_THROWS_AS(broken({.path = path}), IoError);
}

TEST_CASE("many small requests from several threads") {
  constexpr size_t kPages = 256;
  for (const NamedBackend& backend : backends()) {
    for (const std::filesystem::path& place : places()) {
      const SparseFile file(place, 4 * kPages * kPage);
      const PageBuffer data(4 * kPages * kPage);
      const PageBuffer back(4 * kPages * kPage);
      fill_random(data.span(), 5);
      Drive drive({.path = file.path(),
                   .depth = 8,
                   .queue_capacity = 16,
                   .buffers = {{data.data(), data.span().size()}},
                   .backend = backend.open});
      std::vector<std::thread> threads;
      Results results;
      for (size_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
          for (size_t i = t; i < 4 * kPages; i += 4) {
            drive.submit({.operation = Operation::kWrite,
                          .offset_bytes = static_cast<int64_t>(i * kPage),
                          .data = data.data() + i * kPage,
                          .size_bytes = kPage,
                          .tag = i,
                          .sink = results.sink()});
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
      drive.drain();
      REQUIRE(results.count() == 4 * kPages);
      for (const Result& result : results.all()) REQUIRE(result.ok());
      drive.read(0, back.span());
      CHECK(equal(back.span(), data.span()));
    }
  }
}

}  // namespace strata::nvme
