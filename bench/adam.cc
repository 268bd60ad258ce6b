#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bf16.h"
#include "base/bytes.h"
#include "base/parallel.h"
#include "bench/lanes.h"
#include "cpu_adam/adam.h"
#include "gpu/device.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;
using cpu_adam::MomentFormat;
using cpu_adam::Segment;
using cpu_adam::Shard;

constexpr cpu_adam::Hyperparameters kHyper{.learning_rate = 1e-3, .weight_decay = 0.1};

/// Page-aligned memory in huge pages, dealt out in aligned pieces.
class Pool {
 public:
  Pool(gpu::Device& device, size_t size_bytes)
      : arena_(device.allocate_host_memory(size_bytes)), next_(arena_->data()) {}
  /// Keeps arrays, all of which are walked at the same pace, out of each other's sets of the
  /// caches.
  static constexpr size_t kGapBytes = 3 * 4096 + 7 * 64;

  template <class T>
  T* take(size_t size_bytes) {
    auto* at = reinterpret_cast<T*>(next_);
    next_ += align_up(size_bytes, 64) + kGapBytes;
    return at;
  }

 private:
  std::unique_ptr<gpu::Arena> arena_;
  std::byte* next_;
};

struct Format {
  std::string name;
  DType weight, gradient;
  MomentFormat moments;
  bool two_sides = false;  // has other arrays to step into
};

/// A parameter's bytes that one step must read and write: state both ways, the gradient one way.
double bytes_per_parameter(const Format& format) {
  const double weight = 4;  // bf16 and residual, or fp32
  const double moments =
      static_cast<double>(2 * cpu_adam::moment_bytes(format.moments, cpu_adam::kChunkElements)) /
      static_cast<double>(cpu_adam::kChunkElements);
  return 2 * (weight + moments) + static_cast<double>(size_of(format.gradient));
}

size_t pool_bytes(const Format& format, int64_t count) {
  const auto n = static_cast<size_t>(count);
  const size_t state = n * 4 + 2 * cpu_adam::moment_bytes(format.moments, count);
  return n * size_of(format.gradient) + state * (format.two_sides ? 2 : 1) + 16 * Pool::kGapBytes;
}

/// One shard in one format, stepping in place or from arrays to others and back.
class Case {
 public:
  Case(gpu::Device& device, tbb::task_arena& arena, Format format, int64_t count)
      : format_(std::move(format)),
        arena_(arena),
        pool_(device, pool_bytes(format_, count)),
        segments_{{.count = count - count / 3, .decay = true},
                  {.count = count / 3, .decay = false}} {
    const auto n = static_cast<size_t>(count);
    const bool split = format_.weight == DType::kBf16;
    const auto take_state = [&](void*& weight, uint16_t*& residual, void*& moment1,
                                void*& moment2) {
      weight = pool_.take<std::byte>(n * size_of(format_.weight));
      residual = split ? pool_.take<uint16_t>(n * 2) : nullptr;
      moment1 = pool_.take<std::byte>(cpu_adam::moment_bytes(format_.moments, count));
      moment2 = pool_.take<std::byte>(cpu_adam::moment_bytes(format_.moments, count));
    };
    shard_.count = count;
    shard_.weight_dtype = format_.weight;
    shard_.gradient_dtype = format_.gradient;
    shard_.moment_format = format_.moments;
    shard_.gradient = pool_.take<std::byte>(n * size_of(format_.gradient));
    shard_.step = 1;
    for (int side = 0; side < (format_.two_sides ? 2 : 1); ++side) {
      other_ = shard_;
      take_state(shard_.weight_out, shard_.residual_out, shard_.moment1_out, shard_.moment2_out);
      shard_.weight = shard_.weight_out;
      shard_.residual = shard_.residual_out;
      shard_.moment1 = shard_.moment1_out;
      shard_.moment2 = shard_.moment2_out;
      for_each_index(arena, cpu_adam::chunk_count(shard_), [&](int64_t chunk) { fill(chunk); });
    }
  }

  [[nodiscard]] const Format& format() const { return format_; }
  [[nodiscard]] int64_t count() const { return shard_.count; }

  /// Seconds of one step in place.
  double run() { return run(shard_); }

  /// Seconds of one step into the other side's arrays, where the next begins.
  double run_elsewhere() {
    Shard step = shard_;
    step.weight_out = other_.weight_out;
    step.residual_out = other_.residual_out;
    step.moment1_out = other_.moment1_out;
    step.moment2_out = other_.moment2_out;
    other_.step = shard_.step;
    const double seconds = run(step);
    std::swap(shard_, other_);
    shard_.step = step.step;
    return seconds;
  }

  double run_sum_of_squares() {
    const auto start = Clock::now();
    sum_ = cpu_adam::sum_of_squares(arena_, shard_.gradient, shard_.gradient_dtype, shard_.count);
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  /// Whether the last sum is that of plain additions in long double, but for rounding.
  [[nodiscard]] int64_t sum_is_wrong() const {
    long double expected = 0;
    for (int64_t i = 0; i < shard_.count; ++i) {
      const auto g = static_cast<long double>(
          shard_.gradient_dtype == DType::kF32
              ? static_cast<const float*>(shard_.gradient)[i]
              : to_float(Bf16{static_cast<const uint16_t*>(shard_.gradient)[i]}));
      expected += g * g;
    }
    return std::abs(static_cast<long double>(sum_) - expected) > 1e-12L * expected ? 1 : 0;
  }

  /// One more step, done by the definition as well on some chunks: how many bytes differ.
  int64_t count_wrong() {
    int64_t wrong = 0;
    const int64_t chunks = cpu_adam::chunk_count(shard_);
    for (const int64_t chunk : {int64_t{0}, chunks / 2, chunks - 1}) {
      wrong += chunk_wrong(chunk);
    }
    return wrong;
  }

 private:
  double run(Shard& shard) {
    const auto start = Clock::now();
    cpu_adam::update(arena_, shard, segments_, cpu_adam::step_constants(kHyper, shard.step, 1));
    ++shard.step;
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  void fill(int64_t chunk) {
    const int64_t begin = chunk * cpu_adam::kChunkElements;
    const int64_t end = std::min(begin + cpu_adam::kChunkElements, shard_.count);
    // Only the sizes matter to the time; small multiplicative noise is enough.
    const auto noise = [](int64_t i, uint64_t salt) {
      const uint64_t x = (static_cast<uint64_t>(i) + salt) * 0x9E3779B97F4A7C15U;
      return static_cast<float>(static_cast<double>(x >> 11) * 0x1p-53 - 0.5);
    };
    for (int64_t i = begin; i < end; ++i) {
      const float g = 0.01F * noise(i, 1);
      const float p = 0.1F * noise(i, 2);
      if (shard_.gradient_dtype == DType::kF32) {
        const_cast<float*>(static_cast<const float*>(shard_.gradient))[i] = g;
      } else {
        const_cast<uint16_t*>(static_cast<const uint16_t*>(shard_.gradient))[i] = to_bf16(g).bits;
      }
      if (shard_.weight_dtype == DType::kF32) {
        static_cast<float*>(shard_.weight_out)[i] = p;
      } else {
        const SplitMaster master = split_master(p);
        static_cast<uint16_t*>(shard_.weight_out)[i] = master.weight.bits;
        shard_.residual_out[i] = master.residual;
      }
    }
    const auto moment_begin = cpu_adam::moment_bytes(format_.moments, begin);
    const auto moment_end = cpu_adam::moment_bytes(format_.moments, end);
    for (void* moment : {shard_.moment1_out, shard_.moment2_out}) {
      std::memset(static_cast<std::byte*>(moment) + moment_begin, 0, moment_end - moment_begin);
    }
  }

  /// The chunk as a shard of its own.
  [[nodiscard]] Shard part(int64_t chunk) const {
    const int64_t begin = chunk * cpu_adam::kChunkElements;
    const auto at = [&](const void* array, size_t offset_bytes) {
      return static_cast<const std::byte*>(array) + offset_bytes;
    };
    const auto at_out = [&](void* array, size_t offset_bytes) {
      return static_cast<std::byte*>(array) + offset_bytes;
    };
    const auto first = static_cast<size_t>(begin);
    const size_t moments = cpu_adam::moment_bytes(format_.moments, begin);
    Shard shard = shard_;
    shard.count = std::min(cpu_adam::kChunkElements, shard_.count - begin);
    shard.gradient = at(shard.gradient, first * size_of(format_.gradient));
    shard.weight = at(shard.weight, first * size_of(format_.weight));
    shard.weight_out = at_out(shard.weight_out, first * size_of(format_.weight));
    if (shard.residual != nullptr) {
      shard.residual += first;
      shard.residual_out += first;
    }
    shard.moment1 = at(shard.moment1, moments);
    shard.moment2 = at(shard.moment2, moments);
    shard.moment1_out = at_out(shard.moment1_out, moments);
    shard.moment2_out = at_out(shard.moment2_out, moments);
    shard.first_chunk += static_cast<uint64_t>(chunk);
    return shard;
  }

  int64_t chunk_wrong(int64_t chunk) {
    const Shard mine = part(chunk);
    const auto n = static_cast<size_t>(mine.count);
    const size_t weight_bytes = n * size_of(format_.weight);
    const size_t moment_bytes = cpu_adam::moment_bytes(format_.moments, mine.count);
    std::vector<std::byte> weight(weight_bytes);
    std::vector<uint16_t> residual(n);
    // As the shard has them: padding is not written.
    std::vector<std::byte> moment1(moment_bytes);
    std::vector<std::byte> moment2(moment_bytes);
    Shard reference = mine;
    reference.weight_out = weight.data();
    reference.residual_out = residual.data();
    reference.moment1_out = moment1.data();
    reference.moment2_out = moment2.data();
    const Segment all{.count = mine.count, .decay = true};
    const auto constants = cpu_adam::step_constants(kHyper, mine.step, 1);
    cpu_adam::update_reference(reference, {&all, 1}, constants);
    cpu_adam::update(arena_, mine, {&all, 1}, constants);
    int64_t wrong = 0;
    const auto compare = [&](const void* got, const void* expected, size_t size) {
      const auto* a = static_cast<const std::byte*>(got);
      const auto* b = static_cast<const std::byte*>(expected);
      for (size_t i = 0; i < size; ++i) wrong += a[i] != b[i] ? 1 : 0;
    };
    compare(mine.weight_out, weight.data(), weight_bytes);
    if (mine.residual != nullptr) compare(mine.residual_out, residual.data(), n * 2);
    compare(mine.moment1_out, moment1.data(), moment_bytes);
    compare(mine.moment2_out, moment2.data(), moment_bytes);
    return wrong;
  }

  Format format_;
  tbb::task_arena& arena_;
  Pool pool_;
  std::vector<Segment> segments_;
  Shard shard_;
  Shard other_;  // the same with the other side's arrays
  double sum_ = 0;
};

/// Copies between two arrays, with the threads and in chunks as large as the update's; by plain
/// loads and stores or as the C library does it.
class Copy {
 public:
  Copy(gpu::Device& device, tbb::task_arena& arena, size_t size_bytes)
      : arena_(arena),
        size_bytes_(size_bytes / kChunkBytes * kChunkBytes),
        pool_(device, 2 * size_bytes_ + 2 * Pool::kGapBytes),
        from_(pool_.take<std::byte>(size_bytes_)),
        to_(pool_.take<std::byte>(size_bytes_)) {
    for_each_index(arena, chunks(), [&](int64_t chunk) {
      std::memset(from_ + offset(chunk), static_cast<int>(chunk % 251 + 1), kChunkBytes);
      std::memset(to_ + offset(chunk), 0, kChunkBytes);
    });
  }

  /// Bytes read and written, a second.
  double run() {
    const auto start = Clock::now();
    for_each_index(arena_, chunks(), [&](int64_t chunk) {
      std::memcpy(to_ + offset(chunk), from_ + offset(chunk), kChunkBytes);
    });
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return 2 * static_cast<double>(size_bytes_) / seconds;
  }
  [[nodiscard]] int64_t count_wrong() const {
    return std::memcmp(from_, to_, size_bytes_) == 0 ? 0 : 1;
  }

 private:
  static constexpr size_t kChunkBytes = size_t{128} << 10;  // below where memcpy turns to
                                                            // non-temporal stores
  [[nodiscard]] int64_t chunks() const { return static_cast<int64_t>(size_bytes_ / kChunkBytes); }
  static size_t offset(int64_t chunk) { return static_cast<size_t>(chunk) * kChunkBytes; }

  tbb::task_arena& arena_;
  size_t size_bytes_;
  Pool pool_;
  std::byte* from_;
  std::byte* to_;
};

void measure(gpu::Device& device, tbb::task_arena& arena, const std::string& suffix, int64_t count,
             int64_t steps_each, int repetitions, std::vector<Row>& rows) {
  std::vector<std::unique_ptr<Case>> cases;
  for (Format format : {Format{"fp32", DType::kBf16, DType::kBf16, MomentFormat::kF32, true},
                        Format{"bf16", DType::kBf16, DType::kBf16, MomentFormat::kBf16},
                        Format{"int8", DType::kBf16, DType::kBf16, MomentFormat::kInt8},
                        Format{"classic", DType::kF32, DType::kF32, MomentFormat::kF32}}) {
    cases.push_back(std::make_unique<Case>(device, arena, std::move(format), count));
  }
  Copy copy(device, arena, std::clamp(static_cast<size_t>(13 * count), kMiB, kGiB));
  std::vector<double> copied;
  std::vector<double> summed;
  std::vector<double> elsewhere;
  std::vector<std::vector<double>> rates(cases.size());
  for (int repetition = 0; repetition <= repetitions; ++repetition) {
    const bool counts = repetition > 0;  // the first one warms up
    const auto average = [&](const auto& run) {
      double seconds = 0;
      for (int64_t k = 0; k < steps_each; ++k) seconds += run();
      return seconds / static_cast<double>(steps_each);
    };
    const auto note = [&](std::vector<double>& values, double value) {
      if (counts) values.push_back(value);
    };
    for (size_t i = 0; i < cases.size(); ++i) {
      note(rates[i], static_cast<double>(count) / average([&] { return cases[i]->run(); }) / 1e9);
    }
    note(elsewhere, static_cast<double>(count) /
                        average([&] { return cases.front()->run_elsewhere(); }) / 1e9);
    note(summed, static_cast<double>(count) /
                     average([&] { return cases.front()->run_sum_of_squares(); }) / 1e9);
    double rate = 0;
    for (int64_t k = 0; k < steps_each; ++k) rate += copy.run();
    note(copied, rate / static_cast<double>(steps_each) / 1e9);
  }

  const auto add = [&](const std::string& name, std::vector<double> parameters, double bytes,
                       double ceiling, int64_t wrong) {
    std::vector<double> bandwidth = parameters;
    for (double& value : bandwidth) value *= bytes;
    Row row = summarize("adam/" + name + suffix, "GB/s", std::move(bandwidth));
    row.of_ceiling = row.median / ceiling;
    row.wrong = wrong;
    rows.push_back(std::move(row));
    rows.push_back(summarize("adam/" + name + suffix + " rate", "Gparam/s", std::move(parameters)));
  };
  Row ceiling = summarize("adam/copy" + suffix, "GB/s", std::move(copied));
  ceiling.wrong = copy.count_wrong();
  for (size_t i = 0; i < cases.size(); ++i) {
    add(cases[i]->format().name, rates[i], bytes_per_parameter(cases[i]->format()), ceiling.median,
        cases[i]->count_wrong());
  }
  const Format& exact = cases.front()->format();
  add("fp32 elsewhere", elsewhere, bytes_per_parameter(exact), ceiling.median,
      cases.front()->count_wrong());
  add("sumsq", summed, 2, ceiling.median, cases.front()->sum_is_wrong());
  rows.push_back(std::move(ceiling));
}

}  // namespace

std::vector<Row> run_adam(gpu::Device& device, const Options& options) {
  tbb::task_arena arena(options.threads > 0 ? options.threads : tbb::task_arena::automatic);
  std::vector<Row> rows;
  measure(device, arena, "", options.parameters, 1, options.repetitions, rows);
  // 8 MB of state and gradient in the exact format.
  constexpr int64_t kCached = 8'000'000 / 14;
  measure(device, arena, " 8MB", kCached, 50, options.repetitions, rows);
  return rows;
}

}  // namespace strata::bench
