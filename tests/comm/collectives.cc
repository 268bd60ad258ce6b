#include "comm/collectives.h"

#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "base/bf16.h"
#include "base/random.h"

namespace strata::comm {
namespace {

using gpu::CopyDirection;
using Bytes = std::vector<std::byte>;

constexpr std::byte kUntouched{0xA5};
constexpr size_t kGuardBytes = 64;

/// Device memory with bytes behind it that must stay as they are.
class Buffer {
 public:
  Buffer(const Rank& rank, size_t size_bytes)
      : rank_(rank),
        size_bytes_(size_bytes),
        device_(rank.device.allocate_device_memory(size_bytes + kGuardBytes)),
        host_(rank.device.allocate_host_memory(size_bytes + kGuardBytes)) {
    std::memset(host_->data(), static_cast<int>(kUntouched), host_->size_bytes());
    copy(device_->data(), host_->data(), CopyDirection::kUpload);
  }
  Buffer(const Rank& rank, const Bytes& bytes) : Buffer(rank, bytes.size()) {
    if (!bytes.empty()) std::memcpy(host_->data(), bytes.data(), bytes.size());
    copy(device_->data(), host_->data(), CopyDirection::kUpload);
  }

  ~Buffer() {
    if (rank_.kept == nullptr) return;
    rank_.kept->push_back(std::move(device_));
    rank_.kept->push_back(std::move(host_));
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  [[nodiscard]] std::byte* data() const { return device_->data(); }

  /// Waits for the stream. Empty, with `broken` set, where the guard was written to.
  [[nodiscard]] Bytes read(bool& broken) const {
    copy(host_->data(), device_->data(), CopyDirection::kDownload);
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (host_->data()[size_bytes_ + i] != kUntouched) broken = true;
    }
    if (broken) return {};
    return {host_->data(), host_->data() + size_bytes_};
  }

 private:
  void copy(std::byte* to, const std::byte* from, CopyDirection direction) const {
    rank_.device.copy_async(to, from, size_bytes_ + kGuardBytes, direction, rank_.stream);
    rank_.device.synchronize(rank_.stream);
  }

  const Rank& rank_;
  size_t size_bytes_;
  std::unique_ptr<gpu::Arena> device_;
  std::unique_ptr<gpu::Arena> host_;
};

Bytes bytes_of(const std::vector<float>& values, DType dtype) {
  Bytes result(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBf16) {
      const Bf16 value = to_bf16(values[i]);
      std::memcpy(result.data() + i * 2, &value, 2);
    } else {
      std::memcpy(result.data() + i * 4, &values[i], 4);
    }
  }
  return result;
}

float value_at(const Bytes& bytes, size_t i, DType dtype) {
  if (dtype == DType::kBf16) {
    Bf16 value{};
    std::memcpy(&value, bytes.data() + i * 2, 2);
    return to_float(value);
  }
  float value = 0;
  std::memcpy(&value, bytes.data() + i * 4, 4);
  return value;
}

/// Of the elements [first, first + count) of what the ranks have.
std::string compare_sum(const Rank& rank, const Bytes& got, uint64_t seed, int64_t total,
                        int64_t first, int64_t count, DType dtype) {
  const int ranks = rank.group.size();
  const Bytes expected = expected_sum(seed, ranks, total, dtype);
  std::vector<std::vector<float>> inputs;
  for (int r = 0; r < ranks; ++r) inputs.push_back(rank_values(seed, r, total, dtype));
  if (got.size() != static_cast<size_t>(count) * size_of(dtype)) return "a result of another size";
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(first + i);
    if (rank.ordered_sums) {
      if (std::memcmp(got.data() + static_cast<size_t>(i) * size_of(dtype),
                      expected.data() + at * size_of(dtype), size_of(dtype)) == 0) {
        continue;
      }
    }
    // Each addition and each rounding is off by at most half a unit of the sizes added.
    double exact = 0;
    double sizes = 0;
    for (const auto& input : inputs) {
      exact += static_cast<double>(input[at]);
      sizes += std::abs(static_cast<double>(input[at]));
    }
    const double unit = dtype == DType::kBf16 ? 0x1p-8 : 0x1p-24;
    const auto value = static_cast<double>(value_at(got, static_cast<size_t>(i), dtype));
    if (!rank.ordered_sums && std::abs(value - exact) <= sizes * unit * ranks) continue;
    return fmt::format("element {} is {} instead of {} (in double {})", at, value,
                       value_at(expected, at, dtype), exact);
  }
  return {};
}

std::string check_all_gather(const Rank& rank, int64_t bytes_per_rank, bool in_place) {
  const auto size = static_cast<size_t>(bytes_per_rank);
  const int ranks = rank.group.size();
  Bytes expected;
  Bytes mine;
  for (int r = 0; r < ranks; ++r) {
    CounterRandom random(11, static_cast<uint64_t>(r));
    for (size_t i = 0; i < size; ++i) {
      expected.push_back(static_cast<std::byte>(random.next_u64()));
      if (r == rank.group.rank()) mine.push_back(expected.back());
    }
  }
  Bytes before(expected.size(), kUntouched);
  const size_t offset = static_cast<size_t>(rank.group.rank()) * size;
  if (in_place && size > 0) std::memcpy(before.data() + offset, mine.data(), size);
  const Buffer in(rank, mine);
  const Buffer out(rank, before);
  rank.group.all_gather_async(in_place ? out.data() + offset : in.data(), out.data(), size,
                              rank.stream);
  bool broken = false;
  const Bytes got = out.read(broken);
  if (broken) return "bytes behind the result have changed";
  return got == expected ? "" : "the gathered bytes are not those of the ranks";
}

std::string check_reduce_scatter(const Rank& rank, int64_t count, DType dtype, bool in_place) {
  const int64_t total = count * rank.group.size();
  const size_t size = static_cast<size_t>(count) * size_of(dtype);
  const uint64_t seed = static_cast<uint64_t>(count);
  const Buffer in(rank, bytes_of(rank_values(seed, rank.group.rank(), total, dtype), dtype));
  const Buffer out(rank, size);
  const size_t offset = static_cast<size_t>(rank.group.rank()) * size;
  rank.group.reduce_scatter_async(in.data(), in_place ? in.data() + offset : out.data(), count,
                                  dtype, rank.stream);
  bool broken = false;
  Bytes got = (in_place ? in : out).read(broken);
  static_cast<void>(in.read(broken));
  if (broken) return "bytes behind an array have changed";
  if (in_place) {
    got = Bytes(got.begin() + static_cast<std::ptrdiff_t>(offset),
                got.begin() + static_cast<std::ptrdiff_t>(offset + size));
  }
  return compare_sum(rank, got, seed, total, count * rank.group.rank(), count, dtype);
}

/// All ranks must have the same bits, whatever they are.
std::string check_same_bits(const Rank& rank, const Bytes& mine) {
  const Buffer in(rank, mine);
  const Buffer all(rank, mine.size() * static_cast<size_t>(rank.group.size()));
  rank.group.all_gather_async(in.data(), all.data(), mine.size(), rank.stream);
  bool broken = false;
  const Bytes got = all.read(broken);
  for (size_t at = 0; at < got.size(); at += mine.size()) {
    if (std::memcmp(got.data() + at, mine.data(), mine.size()) != 0) {
      return "the sums of two ranks have different bits";
    }
  }
  return {};
}

std::string check_all_reduce(const Rank& rank, int64_t count, DType dtype) {
  const uint64_t seed = static_cast<uint64_t>(count) + 1;
  const Bytes got = all_reduced(rank, seed, count, dtype);
  if (got.empty() && count > 0) return "bytes behind the array have changed";
  std::string wrong = compare_sum(rank, got, seed, count, 0, count, dtype);
  if (wrong.empty() && count > 0) wrong = check_same_bits(rank, got);
  return wrong;
}

std::string check_broadcast(const Rank& rank, int64_t size_bytes, int root) {
  Bytes expected;
  CounterRandom random(12, static_cast<uint64_t>(root));
  for (int64_t i = 0; i < size_bytes; ++i) {
    expected.push_back(static_cast<std::byte>(random.next_u64()));
  }
  const Buffer data(rank,
                    rank.group.rank() == root ? expected : Bytes(expected.size(), kUntouched));
  rank.group.broadcast_async(data.data(), expected.size(), root, rank.stream);
  bool broken = false;
  const Bytes got = data.read(broken);
  if (broken) return "bytes behind the data have changed";
  return got == expected ? "" : "the bytes are not those of the root";
}

}  // namespace

std::vector<float> rank_values(uint64_t seed, int rank, int64_t count, DType dtype) {
  CounterRandom random(seed, static_cast<uint64_t>(rank));
  std::vector<float> result;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t word = random.next_u64();
    float value = std::ldexp(1 + static_cast<float>(word & 0xffffff) * 0x1p-24F,
                             static_cast<int>(word >> 32 & 15) - 8);
    if ((word >> 40 & 15) == 0) value = 0;
    if ((word >> 48 & 1) != 0) value = -value;
    result.push_back(dtype == DType::kBf16 ? to_float(to_bf16(value)) : value);
  }
  return result;
}

std::vector<std::byte> all_reduced(const Rank& rank, uint64_t seed, int64_t count, DType dtype) {
  const Buffer data(rank, bytes_of(rank_values(seed, rank.group.rank(), count, dtype), dtype));
  rank.group.all_reduce_async(data.data(), count, dtype, rank.stream);
  bool broken = false;
  return data.read(broken);
}

std::vector<std::byte> expected_sum(uint64_t seed, int ranks, int64_t count, DType dtype) {
  std::vector<float> sums = rank_values(seed, 0, count, dtype);
  for (int r = 1; r < ranks; ++r) {
    const std::vector<float> more = rank_values(seed, r, count, dtype);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += more[i];
  }
  return bytes_of(sums, dtype);
}

std::string check_collectives(const Rank& rank, int64_t most_elements) {
  for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{64},
                              int64_t{1021}, most_elements}) {
    for (const bool in_place : {false, true}) {
      if (std::string wrong = check_all_gather(rank, count, in_place); !wrong.empty()) {
        return fmt::format("all-gather of {} bytes, in place: {}: {}", count, in_place, wrong);
      }
    }
    for (int root = 0; root < rank.group.size(); ++root) {
      if (std::string wrong = check_broadcast(rank, count, root); !wrong.empty()) {
        return fmt::format("broadcast of {} bytes from {}: {}", count, root, wrong);
      }
    }
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      for (const bool in_place : {false, true}) {
        if (std::string wrong = check_reduce_scatter(rank, count, dtype, in_place);
            !wrong.empty()) {
          return fmt::format("reduce-scatter of {} {}, in place: {}: {}", count, name_of(dtype),
                             in_place, wrong);
        }
      }
      if (std::string wrong = check_all_reduce(rank, count, dtype); !wrong.empty()) {
        return fmt::format("all-reduce of {} {}: {}", count, name_of(dtype), wrong);
      }
    }
    rank.group.barrier_async(rank.stream);
  }
  rank.device.synchronize(rank.stream);
  return {};
}

}  // namespace strata::comm
