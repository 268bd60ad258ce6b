#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "base/random.h"
#include "bench/fio.h"
#include "bench/lanes.h"
#include "nvme/drive.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;
using nvme::Drive;
using nvme::Operation;

constexpr size_t kPageBytes = 4096;
constexpr size_t kDefaultFileBytes = 4 * kGiB;
constexpr size_t kLeastFileBytes = 64 * kMiB;
constexpr size_t kMostRandomBytes = 256 * kMiB;

/// A file without a name, for as long as this lives; others reach it by path().
class UnnamedFile {
 public:
  UnnamedFile(const std::filesystem::path& directory, size_t size_bytes) {
    std::string name = (directory / "strata-bench-XXXXXX").string();
    fd_ = UniqueFd::adopt(::mkostemp(name.data(), O_CLOEXEC));
    if (!fd_) throw IoError("create a file in", directory.string(), errno);
    ::unlink(name.c_str());
    const int code = ::posix_fallocate(fd_.get(), 0, static_cast<off_t>(size_bytes));
    if (code != 0) {
      throw IoError("reserve space in", directory.string(), code, -1,
                    static_cast<int64_t>(size_bytes));
    }
    path_ = fmt::format("/proc/{}/fd/{}", ::getpid(), fd_.get());
  }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  UniqueFd fd_;
  std::string path_;
};

/// Zeroed memory in huge pages where the kernel gives them.
class HugeMemory {
 public:
  explicit HugeMemory(size_t size_bytes) : size_bytes_(align_up(size_bytes, kHugePageBytes)) {
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePageBytes, size_bytes_)));
    if (!data_) throw std::bad_alloc();
    ::madvise(data_.get(), size_bytes_, MADV_HUGEPAGE);
    std::memset(data_.get(), 0, size_bytes_);
  }
  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] size_t size() const noexcept { return size_bytes_; }

 private:
  static constexpr size_t kHugePageBytes = 2 * kMiB;
  struct Free {
    void operator()(std::byte* data) const noexcept { std::free(data); }
  };
  size_t size_bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

size_t file_bytes(const Options& options, size_t block_bytes) {
  struct statvfs status {};
  if (::statvfs(options.path.c_str(), &status) != 0) {
    throw IoError("examine", options.path.string(), errno);
  }
  const size_t room = static_cast<size_t>(status.f_bavail) * status.f_frsize;
  const size_t wanted = options.size_bytes == 0 ? std::min(kDefaultFileBytes, room / 2)
                                                : std::max(options.size_bytes, 2 * block_bytes);
  if (wanted > room || wanted < (options.size_bytes == 0 ? kLeastFileBytes : 0)) {
    throw failure(fmt::format("'{}' has {} free, too little to measure the drive; see --size",
                              options.path.string(), format_bytes(room)));
  }
  return wanted / (2 * block_bytes) * (2 * block_bytes);
}

/// Each page begins with its own place in the file; the rest of it depends on its place in a block.
uint64_t stamp_of(int64_t offset_bytes) {
  return static_cast<uint64_t>(offset_bytes) * 0x9E3779B97F4A7C15U + 1;
}

void stamp_pages(std::byte* data, int64_t offset_bytes, size_t size_bytes) {
  for (size_t at = 0; at < size_bytes; at += kPageBytes) {
    const uint64_t stamp = stamp_of(offset_bytes + static_cast<int64_t>(at));
    std::memcpy(data + at, &stamp, sizeof stamp);
  }
}

int64_t count_wrong_pages(const std::byte* data, int64_t offset_bytes, size_t size_bytes) {
  int64_t wrong = 0;
  for (size_t at = 0; at < size_bytes; at += kPageBytes) {
    uint64_t stamp = 0;
    std::memcpy(&stamp, data + at, sizeof stamp);
    if (stamp != stamp_of(offset_bytes + static_cast<int64_t>(at))) ++wrong;
  }
  return wrong;
}

struct Part {
  Operation operation;
  int64_t offset_bytes;
};

/// One thing to measure: so many parts of this size, each given by its number.
struct Case {
  std::string name;
  std::string fio_mode;
  size_t part_bytes;
  size_t parts;
  std::function<Part(size_t)> part;
};

std::vector<Case> cases(size_t file_bytes, size_t block_bytes) {
  const size_t blocks = file_bytes / block_bytes;
  const auto at = [block_bytes](size_t block) { return static_cast<int64_t>(block * block_bytes); };
  const size_t pages = file_bytes / kPageBytes;
  return {
      {"write", "write", block_bytes, blocks,
       [at](size_t i) {
         return Part{Operation::kWrite, at(i)};
       }},
      {"read", "read", block_bytes, blocks,
       [at](size_t i) {
         return Part{Operation::kRead, at(i)};
       }},
      {"random-4KiB", "randread", kPageBytes, std::min(kMostRandomBytes, file_bytes) / kPageBytes,
       [pages](size_t i) {
         const uint64_t page = philox4x32(1, 0, i)[0] % pages;
         return Part{Operation::kRead, static_cast<int64_t>(page * kPageBytes)};
       }},
      // Each direction in order, taking turns, as fio does it.
      {"half", "rw", block_bytes, blocks,
       [at, blocks](size_t i) {
         return i % 2 == 0 ? Part{Operation::kRead, at(i / 2)}
                           : Part{Operation::kWrite, at(blocks / 2 + i / 2)};
       }},
  };
}

/// Keeps a drive busy with one case: a buffer whose transfer has ended goes on with the next part.
class Load {
 public:
  Load(Drive& drive, const Case& load, std::byte* memory, size_t buffer_bytes, size_t buffers)
      : drive_(drive), case_(load) {
    for (size_t i = 0; i < std::min(buffers, load.parts); ++i) {
      lanes_.push_back({this, memory + i * buffer_bytes, {}});
    }
  }

  /// Blocks until all parts have been transferred.
  void run() {
    busy_ = lanes_.size();
    for (Lane& lane : lanes_) {
      const size_t number = next_++;
      if (number >= case_.parts) {
        leave();
      } else {
        drive_.submit(prepare(lane, number));
      }
    }
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return busy_ == 0; });
  }
  /// Pages that were not what they must be, and all of each part that failed.
  [[nodiscard]] int64_t wrong() const noexcept { return wrong_; }

 private:
  struct Lane {
    Load* load;
    std::byte* data;
    Part part;
  };

  nvme::Request prepare(Lane& lane, size_t number) {
    lane.part = case_.part(number);
    if (lane.part.operation == Operation::kWrite) {
      stamp_pages(lane.data, lane.part.offset_bytes, case_.part_bytes);
    }
    return {.operation = lane.part.operation,
            .offset_bytes = lane.part.offset_bytes,
            .data = lane.data,
            .size_bytes = case_.part_bytes,
            .sink = {&Load::go_on, &lane}};
  }

  static void go_on(void* context, const nvme::Result& result) noexcept {
    auto& lane = *static_cast<Lane*>(context);
    Load& load = *lane.load;
    if (!result.ok()) {
      load.wrong_ += static_cast<int64_t>(load.case_.part_bytes / kPageBytes);
    } else if (lane.part.operation == Operation::kRead) {
      load.wrong_ += count_wrong_pages(lane.data, lane.part.offset_bytes, load.case_.part_bytes);
    }
    const size_t number = load.next_++;
    if (number >= load.case_.parts) return load.leave();
    // The drive's queue has room for all lanes.
    if (!load.drive_.try_submit(load.prepare(lane, number))) std::abort();
  }

  void leave() noexcept {
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) idle_.notify_one();
  }

  Drive& drive_;
  const Case& case_;
  std::vector<Lane> lanes_;
  std::atomic<size_t> next_ = 0;
  std::atomic<int64_t> wrong_ = 0;
  std::mutex mutex_;
  std::condition_variable idle_;
  size_t busy_ = 0;
};

double process_cpu_seconds() {
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// What repetitions of one case gave.
struct Series {
  std::vector<double> gb_per_s;
  std::vector<double> cpu_s_per_gb;
  int64_t wrong = 0;

  void add(double bytes_per_second, double cpu_seconds_per_byte) {
    gb_per_s.push_back(bytes_per_second / 1e9);
    cpu_s_per_gb.push_back(cpu_seconds_per_byte * 1e9);
  }
};

class Measurement {
 public:
  Measurement(const Options& options, const nvme::DriveOptions& defaults)
      : file_bytes_(file_bytes(options, defaults.block_size_bytes)),
        block_bytes_(defaults.block_size_bytes),
        depth_(defaults.depth),
        buffers_(2 * defaults.depth),
        file_(options.path, file_bytes_),
        memory_(buffers_ * block_bytes_),
        drive_({.path = file_.path(),
                .block_size_bytes = block_bytes_,
                .depth = depth_,
                .queue_capacity = buffers_,
                .buffers = {{memory_.data(), memory_.size()}}}),
        cases_(cases(file_bytes_, block_bytes_)),
        ours_(cases_.size()),
        fios_(cases_.size()) {
    for (const std::string& note : drive_.notes()) options.say(note);
    CounterRandom random(1, 0);
    for (size_t at = 0; at < block_bytes_; at += sizeof(uint64_t)) {
      const uint64_t word = static_cast<uint64_t>(random.next_uniform() * 0x1p53);
      std::memcpy(memory_.data() + at, &word, sizeof word);
    }
    for (size_t i = 1; i < buffers_; ++i) {
      std::memcpy(memory_.data() + i * block_bytes_, memory_.data(), block_bytes_);
    }
    // A first write turns reserved blocks into written ones, which is slower than all later ones.
    Load(drive_, cases_[0], memory_.data(), block_bytes_, buffers_).run();
    drive_.sync();
  }

  void repeat(int repetition, const Options& options) {
    // Ours is the last to write and the first to read: what it reads is always its own.
    fio(0, options);
    ours(0);
    for (const size_t i : {size_t{1}, size_t{2}}) {
      if (repetition % 2 == 0) ours(i);
      fio(i, options);
      if (repetition % 2 != 0) ours(i);
    }
    ours(3);
    fio(3, options);
  }

  [[nodiscard]] std::vector<Row> rows() const {
    std::vector<Row> rows;
    for (size_t i = 0; i < cases_.size(); ++i) {
      const std::string key = "nvme/" + cases_[i].name;
      Row row = summarize(key, "GB/s", ours_[i].gb_per_s);
      row.wrong = ours_[i].wrong;
      if (!has_fio_) {
        rows.push_back(std::move(row));
        rows.push_back(summarize(key + " cpu", "s/GB", ours_[i].cpu_s_per_gb));
        continue;
      }
      const Row fio = summarize(key + " fio", "GB/s", fios_[i].gb_per_s);
      row.of_ceiling = row.median / fio.median;
      rows.push_back(std::move(row));
      rows.push_back(fio);
      rows.push_back(summarize(key + " cpu", "s/GB", ours_[i].cpu_s_per_gb));
      rows.push_back(summarize(key + " fio cpu", "s/GB", fios_[i].cpu_s_per_gb));
    }
    return rows;
  }

 private:
  void ours(size_t index) {
    const Case& load_case = cases_[index];
    Load load(drive_, load_case, memory_.data(), block_bytes_, buffers_);
    const double cpu_before = process_cpu_seconds();
    const auto start = Clock::now();
    load.run();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const double cpu = process_cpu_seconds() - cpu_before;
    const auto bytes = static_cast<double>(load_case.parts * load_case.part_bytes);
    ours_[index].add(bytes / seconds, cpu / bytes);
    ours_[index].wrong += load.wrong();
  }

  void fio(size_t index, const Options& options) {
    if (!has_fio_) return;
    const Case& load = cases_[index];
    const auto result = run_fio({.path = file_.path(),
                                 .mode = load.fio_mode,
                                 .file_bytes = file_bytes_,
                                 .total_bytes = load.parts * load.part_bytes,
                                 .block_bytes = load.part_bytes,
                                 .depth = depth_,
                                 .direct = drive_.is_direct()});
    if (!result) {
      has_fio_ = false;
      options.say("fio is not installed, so there is nothing to compare with: apt-get install fio");
      return;
    }
    fios_[index].add(result->bytes_per_second, result->cpu_seconds_per_byte);
  }

  const size_t file_bytes_;
  const size_t block_bytes_;
  const unsigned depth_;
  const size_t buffers_;
  UnnamedFile file_;
  HugeMemory memory_;
  Drive drive_;
  std::vector<Case> cases_;
  std::vector<Series> ours_;
  std::vector<Series> fios_;
  bool has_fio_ = true;
};

}  // namespace

std::vector<Row> run_nvme(gpu::Device& /*device*/, const Options& options) {
  Measurement measurement(options, {});
  for (int repetition = 0; repetition < options.repetitions; ++repetition) {
    measurement.repeat(repetition, options);
  }
  return measurement.rows();
}

}  // namespace strata::bench
