#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "base/bytes.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/file.h"
#include "base/random.h"
#include "base/unique_handle.h"
#include "catch.h"

namespace strata {
namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What the error thrown by body() says; empty where none is thrown.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Every sign and exponent, with `mantissa` (23 bits).
template <class Body>
void for_each_exponent(uint32_t mantissa, Body body) {
  for (uint32_t upper = 0; upper < 512; ++upper) body((upper << 23) | mantissa);
}

/// The nearest bf16 by its definition: of the two neighbours, the one at the smaller distance, in
/// double, where both distances are exact; of two equally near the one with an even last bit.
uint16_t nearest_bf16(float value) {
  const auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  // Beyond the largest finite value the scale goes on as if there were one more binade.
  const auto magnitude = [](uint32_t bits) {
    return (bits & 0x7fffU) == 0x7f80U
               ? 0x1p128
               : std::abs(static_cast<double>(to_float(Bf16{static_cast<uint16_t>(bits)})));
  };
  const double exact = std::abs(static_cast<double>(value));
  const double below = exact - magnitude(upper);
  const double above = magnitude(upper + 1U) - exact;
  const bool up = above < below || (above == below && (upper & 1U) != 0);
  return static_cast<uint16_t>(upper + (up ? 1 : 0));
}

TEST_CASE("bf16 rounds to nearest, ties to even") {
  std::vector<uint32_t> mantissas{0,       1,       0x7fff,  0x8000,   0x8001,   0xffff,  0x10000,
                                  0x17fff, 0x18000, 0x18001, 0x7f7fff, 0x7f8000, 0x7fffff};
  constexpr uint64_t kSeed = 11;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  for (int i = 0; i < 2000; ++i) {
    mantissas.push_back(static_cast<uint32_t>(random.next_below(1U << 23)));
  }
  size_t wrong = 0;
  for (const uint32_t mantissa : mantissas) {
    for_each_exponent(mantissa, [&](uint32_t bits) {
      const float value = std::bit_cast<float>(bits);
      if (std::isnan(value)) return;
      const uint16_t expected =
          std::isinf(value) ? static_cast<uint16_t>(bits >> 16) : nearest_bf16(value);
      wrong += to_bf16(value).bits != expected ? 1 : 0;
    });
  }
  CHECK(wrong == 0);
  CHECK(to_bf16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(to_bf16(-0.0F).bits == 0x8000);
  CHECK(to_bf16(std::bit_cast<float>(0x3f808000U)).bits == 0x3f80);
  CHECK(to_bf16(std::bit_cast<float>(0x3f818000U)).bits == 0x3f82);
}

TEST_CASE("a NaN stays a NaN of the same sign") {
  for (const uint32_t bits : {0x7f800001U, 0x7fffffffU, 0x7fc00000U, 0xff800001U, 0xffffffffU}) {
    CAPTURE(bits);
    const Bf16 rounded = to_bf16(std::bit_cast<float>(bits));
    CHECK(std::isnan(to_float(rounded)));
    CHECK((rounded.bits & 0x40U) != 0);
    CHECK(rounded.bits >> 15 == bits >> 31);
  }
}

TEST_CASE("every bf16 value is a float and comes back") {
  size_t wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Bf16 value{static_cast<uint16_t>(bits)};
    if (!std::isnan(to_float(value))) wrong += to_bf16(to_float(value)) != value ? 1 : 0;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a split master joins to the same bits") {
  // All low halves under every exponent, and all upper halves with the low halves around each edge.
  size_t wrong = 0;
  const auto check = [&](uint32_t bits) {
    const SplitMaster split = split_master(std::bit_cast<float>(bits));
    wrong += std::bit_cast<uint32_t>(join_master(split)) != bits ? 1 : 0;
    wrong += split.residual != (bits & 0xffffU) ? 1 : 0;
  };
  for (uint32_t low = 0; low < 0x10000; ++low) {
    for (const uint32_t middle : {0U, 0x2a0000U, 0x7f0000U}) for_each_exponent(middle | low, check);
  }
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const uint32_t low : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      check((upper << 16) | low);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("the weight of a split master is the nearest bf16, halves away from zero") {
  constexpr uint64_t kSeed = 12;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  size_t wrong = 0;
  for (int i = 0; i < 200'000; ++i) {
    const float master = std::bit_cast<float>(static_cast<uint32_t>(random.next_u64()));
    if (!std::isfinite(master)) continue;
    const uint32_t bits = std::bit_cast<uint32_t>(master);
    const bool half = (bits & 0xffffU) == 0x8000U;
    const uint16_t expected = half ? static_cast<uint16_t>((bits >> 16) + 1) : nearest_bf16(master);
    wrong += split_master(master).weight.bits != expected ? 1 : 0;
  }
  CHECK(wrong == 0);
  // Where the two roundings differ: a tie whose lower neighbour is even.
  const float tie = std::bit_cast<float>(0x3f808000U);
  CHECK(split_master(tie).weight.bits == 0x3f81);
  CHECK(split_master(-tie).weight.bits == 0xbf81);
}

TEST_CASE("dtypes know their size and name") {
  CHECK(size_of(DType::kBf16) == 2);
  CHECK(size_of(DType::kF32) == 4);
  CHECK(name_of(DType::kBf16) == "bf16");
  CHECK(name_of(DType::kF32) == "fp32");
}

TEST_CASE("amounts of memory are read") {
  CHECK(parse_bytes("0") == 0);
  CHECK(parse_bytes("4096") == 4096);
  CHECK(parse_bytes("4096B") == 4096);
  CHECK(parse_bytes("1KiB") == kKiB);
  CHECK(parse_bytes("512MiB") == 512 * kMiB);
  CHECK(parse_bytes("24GiB") == 24 * kGiB);
  CHECK(parse_bytes("24 GiB") == 24 * kGiB);
  CHECK(parse_bytes("1.5GiB") == kGiB + kGiB / 2);
  CHECK(parse_bytes("2TiB") == 2048 * kGiB);
  CHECK(parse_bytes("800MB") == 800'000'000);
  CHECK(parse_bytes("2GB") == 2'000'000'000);
  CHECK(parse_bytes("1.9B") == 1);
  CHECK(parse_bytes("0.3KiB") == 307);
  CHECK(parse_bytes("8191PiB") == size_t{8191} << 50);
  // No digit is lost to binary fractions.
  CHECK(parse_bytes("64.1GB") == 64'100'000'000);
  CHECK(parse_bytes("1.001KB") == 1001);
  CHECK(parse_bytes("9007199254740993") == 9007199254740993);
  CHECK(parse_bytes("9223372036854775807") == size_t{INT64_MAX});
}

TEST_CASE("what is no amount of memory is quoted and refused") {
  for (const char* text :
       {"", "GiB", "-1", "-1GiB", "1gib", "12 monkeys", "1GiBs", "1e3", "0x10", "inf", "nan",
        "1.2.3", "8192PiB", "9300PB", "99999999999999999999999", " 1GiB", "1GiB "}) {
    CAPTURE(text);
    try {
      const size_t bytes = parse_bytes(text);
      FAIL_CHECK("read as " << bytes);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kUsage);
      CHECK(contains(error.what(), "'" + std::string(text) + "'"));
    }
  }
}

TEST_CASE("amounts of memory are written with one decimal") {
  CHECK(format_bytes(0) == "0 B");
  CHECK(format_bytes(312) == "312 B");
  CHECK(format_bytes(1023) == "1023 B");
  CHECK(format_bytes(1024) == "1.0 KiB");
  CHECK(format_bytes(kMiB - 1) == "1.0 MiB");
  CHECK(format_bytes(kMiB + kMiB / 2) == "1.5 MiB");
  CHECK(format_bytes(24 * kGiB) == "24.0 GiB");
  CHECK(format_bytes(3072 * kGiB) == "3.0 TiB");
  CHECK(format_bytes(std::numeric_limits<size_t>::max()) == "16.0 EiB");
}

TEST_CASE("align_up goes to the next multiple, and stays on one") {
  CHECK(align_up(0, 64) == 0);
  CHECK(align_up(1, 64) == 64);
  CHECK(align_up(63, 64) == 64);
  CHECK(align_up(64, 64) == 64);
  CHECK(align_up(65, 64) == 128);
  CHECK(align_up(5, 1) == 5);
}

TEST_CASE("Philox gives the known answers of Random123") {
  // kat_vectors of Random123 (Salmon et al. 2011) for philox4x32 with 10 rounds.
  using Words = std::array<uint32_t, 4>;
  CHECK(philox4x32(0, 0, 0) == Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  constexpr uint64_t kOnes = ~uint64_t{0};
  CHECK(philox4x32(kOnes, kOnes, kOnes) == Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88) ==
        Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("a random sequence can be taken up at any counter") {
  CounterRandom whole(1, 2);
  std::vector<uint64_t> values(10);
  for (uint64_t& value : values) value = whole.next_u64();
  CHECK(whole.counter() == 10);
  CounterRandom rest(1, 2, 6);
  for (size_t i = 6; i < 10; ++i) CHECK(rest.next_u64() == values[i]);
  CHECK(CounterRandom(1, 3).next_u64() != values[0]);
  CHECK(CounterRandom(2, 2).next_u64() != values[0]);
}

TEST_CASE("random numbers have the distribution that their name says") {
  constexpr uint64_t kSeed = 13;
  constexpr int kCount = 100'000;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  double sum = 0;
  double normal_sum = 0;
  double normal_squares = 0;
  std::vector<int> counts(7);
  for (int i = 0; i < kCount; ++i) {
    const double uniform = random.next_uniform();
    REQUIRE((uniform >= 0 && uniform < 1));
    sum += uniform;
    const uint64_t below = random.next_below(7);
    REQUIRE(below < 7);
    ++counts[below];
    const double normal = random.next_normal();
    normal_sum += normal;
    normal_squares += normal * normal;
  }
  // Five standard deviations of each mean.
  const double root = std::sqrt(kCount);
  CHECK(std::abs(sum / kCount - 0.5) < 5 * std::sqrt(1.0 / 12) / root);
  CHECK(std::abs(normal_sum / kCount) < 5 / root);
  CHECK(std::abs(normal_squares / kCount - 1) < 5 * std::sqrt(2.0) / root);
  for (const int count : counts) {
    CHECK(std::abs(count - kCount / 7.0) < 5 * std::sqrt(kCount * (1.0 / 7) * (6.0 / 7)));
  }
  CHECK(random.next_below(1) == 0);
}

/// A directory of its own for a test, removed with all it holds.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "strata-base-XXXXXX").string();
    REQUIRE(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  std::filesystem::path operator/(const char* name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Calls body(), which must throw IoError with this code and all of these words in its message.
template <class Body>
void check_io_error(int errno_code, const std::vector<std::string>& words, Body body) {
  try {
    body();
    FAIL_CHECK("no error was thrown");
  } catch (const IoError& error) {
    CHECK(error.errno_code() == errno_code);
    CHECK(error.kind() == ErrorKind::kFailed);
    for (const std::string& word : words) {
      CAPTURE(word, error.what());
      CHECK(contains(error.what(), word));
    }
  }
}

TEST_CASE("what is written to a file is read back, at any offset") {
  const ScratchDirectory directory;
  File file = File::create(directory / "data");
  std::vector<std::byte> data(100'000);
  CounterRandom random(14, 0);
  for (std::byte& value : data) value = static_cast<std::byte>(random.next_below(256));
  file.allocate(50);
  CHECK(file.size_bytes() == 50);
  file.allocate(0);
  file.write_at(7, data);
  file.write_at(0, {});
  file.sync();
  CHECK(file.size_bytes() == 100'007);
  file.close();

  const File reopened = File::open_for_read(directory / "data");
  CHECK(reopened.path() == directory / "data");
  CHECK(reopened.size_bytes() == 100'007);
  std::vector<std::byte> all(100'000);
  reopened.read_at(7, all);
  CHECK(all == data);
  std::vector<std::byte> last(10);
  reopened.read_at(99'997, last);
  CHECK(std::equal(last.begin(), last.end(), data.end() - 10));
  reopened.read_at(100'007, {});
}

TEST_CASE("creating a file again empties it") {
  const ScratchDirectory directory;
  write_text_file_atomically(directory / "data", "something");
  CHECK(File::create(directory / "data").size_bytes() == 0);
}

TEST_CASE("a file's end before the data's end is an error that says where") {
  const ScratchDirectory directory;
  write_text_file_atomically(directory / "short", "12345");
  const File file = File::open_for_read(directory / "short");
  std::vector<std::byte> out(4);
  const std::string message = error_of([&] { file.read_at(3, out); });
  CHECK(contains(message, "short"));
  CHECK(contains(message, "byte 5"));
  CHECK(contains(message, "2 bytes short"));
  CHECK_THROWS_AS(file.read_at(6, out), Error);
}

TEST_CASE("failed system calls on files name the file, the place and the reason") {
  const ScratchDirectory directory;
  check_io_error(ENOENT, {"open", "absent", "No such file"},
                 [&] { (void)File::open_for_read(directory / "absent"); });
  check_io_error(EISDIR, {"read", directory.path().string()},
                 [&] { (void)File::open_for_read(directory.path()); });
  check_io_error(EISDIR, {"create", directory.path().string()},
                 [&] { (void)File::create(directory.path()); });
  check_io_error(ENOENT, {"open", "absent"}, [&] { sync_directory(directory / "absent"); });
  check_io_error(ENOENT, {"create", "absent"},
                 [&] { write_text_file_atomically(directory / "absent" / "file", "text"); });

  write_text_file_atomically(directory / "text", "text");
  File read_only = File::open_for_read(directory / "text");
  const std::vector<std::byte> data(3);
  check_io_error(EBADF, {"write", "text", "3 bytes", "offset 11"},
                 [&] { read_only.write_at(11, data); });
  check_io_error(EBADF, {"reserve space for", "text", "5 bytes"}, [&] { read_only.allocate(5); });
  read_only.close();
  std::vector<std::byte> out(1);
  check_io_error(EBADF, {"read", "offset 0"}, [&] { read_only.read_at(0, out); });
  check_io_error(EBADF, {"close"}, [&] { read_only.close(); });
  check_io_error(EBADF, {"sync"}, [&] { read_only.sync(); });
  check_io_error(EBADF, {"examine"}, [&] { (void)read_only.size_bytes(); });
}

TEST_CASE("a full disk is reported") {
  if (::access("/dev/full", W_OK) != 0) {
    WARN("skipped: this machine has no /dev/full");
    return;
  }
  File full = File::create("/dev/full");
  const std::vector<std::byte> data(1);
  check_io_error(ENOSPC, {"write", "/dev/full", "No space left"}, [&] { full.write_at(0, data); });
}

TEST_CASE("a text file is replaced as a whole, and nothing else is left") {
  const ScratchDirectory directory;
  const std::filesystem::path path = directory / "text";
  for (const std::string text : {"first", "", "third, and longer\n"}) {
    write_text_file_atomically(path, text);
    CHECK(read_text_file(path) == text);
  }
  const auto entries = std::distance(std::filesystem::directory_iterator(directory.path()),
                                     std::filesystem::directory_iterator());
  CHECK(entries == 1);
}

TEST_CASE("a failed replacement leaves what was there") {
  const ScratchDirectory directory;
  // A directory that holds something cannot be replaced by a file.
  const std::filesystem::path occupied = directory / "occupied";
  std::filesystem::create_directory(occupied);
  write_text_file_atomically(occupied / "inside", "kept");
  CHECK_THROWS(write_text_file_atomically(occupied, "text"));
  CHECK(read_text_file(occupied / "inside") == "kept");
  CHECK(!std::filesystem::exists(directory / "occupied.partial"));
}

/// Counts what is closed, by value.
struct CountingTraits {
  using Type = int;
  static constexpr Type invalid() noexcept { return -1; }
  static void close(Type value) noexcept { ++closed.at(static_cast<size_t>(value)); }
  inline static std::array<int, 4> closed{};
};
using Counted = UniqueHandle<CountingTraits>;

TEST_CASE("a handle closes what it owns exactly once") {
  auto& closed = CountingTraits::closed;
  closed.fill(0);
  {
    const Counted empty;
    CHECK(!empty);
    CHECK(empty.get() == -1);
    Counted first = Counted::adopt(0);
    CHECK(first);
    CHECK(first.get() == 0);
    Counted moved(std::move(first));
    CHECK(moved.get() == 0);
    CHECK(closed[0] == 0);

    Counted second = Counted::adopt(1);
    second = std::move(moved);  // closes 1, takes over 0
    CHECK(closed[1] == 1);
    CHECK(closed[0] == 0);
    Counted& same = second;
    second = std::move(same);
    CHECK(second.get() == 0);
    CHECK(closed[0] == 0);

    Counted third = Counted::adopt(2);
    third.reset(3);
    CHECK(closed[2] == 1);
    CHECK(third.release() == 3);
    CHECK(!third);
    third.reset();
  }
  CHECK(closed == std::array<int, 4>{1, 1, 1, 0});
  static_assert(!std::is_copy_constructible_v<Counted>);
  static_assert(std::is_nothrow_move_constructible_v<Counted>);
}

TEST_CASE("an owned file descriptor is closed") {
  int raw = -1;
  {
    const UniqueFd fd = UniqueFd::adopt(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    raw = fd.get();
    REQUIRE(raw >= 0);
    CHECK(::fcntl(raw, F_GETFD) >= 0);
  }
  CHECK(::fcntl(raw, F_GETFD) == -1);
}

TEST_CASE("errors carry their exit code") {
  CHECK(usage_error("bad flag").kind() == ErrorKind::kUsage);
  CHECK(failure("broken").kind() == ErrorKind::kFailed);
  CHECK(static_cast<int>(ErrorKind::kDoesNotFit) == 3);
  CHECK(static_cast<int>(ErrorKind::kInterrupted) == 130);
  const IoError error("read", "/a/file", EIO, 4096, 512);
  CHECK(std::string(error.what()).starts_with("cannot read '/a/file', 512 bytes at offset 4096: "));
  CHECK(error.path() == "/a/file");
}

TEST_CASE("a failed check ends the process, and a held one does not") {
  STRATA_CHECK(1 + 1 == 2, "arithmetic holds");
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Not through the test framework's handler, nor into its output.
    std::signal(SIGABRT, SIG_DFL);
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDERR_FILENO);
    STRATA_CHECK(1 + 1 == 3, "arithmetic failed");
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
}

}  // namespace
}  // namespace strata
