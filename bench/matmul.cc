#include <algorithm>
#include <chrono>
#include <cmath>

#include "base/bf16.h"
#include "base/bytes.h"
#include "base/random.h"
#include "bench/lanes.h"
#include "bench/matmul_peak.h"

namespace strata::bench {
namespace {

using Clock = std::chrono::steady_clock;

void fill(Bf16* values, int64_t count, uint64_t stream) {
  CounterRandom random(1, stream);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = to_bf16(static_cast<float>(random.next_uniform() - 0.5));
  }
}

}  // namespace

MatmulTimer::MatmulTimer(gpu::Device& device, MatmulShape shape)
    : device_(device), shape_(std::move(shape)) {
  const auto [name, m, n, k, transpose_a, transpose_b, c_dtype] = shape_;
  args_ = {.m = m,
           .n = n,
           .k = k,
           .dtype = DType::kBf16,
           .c_dtype = c_dtype,
           .transpose_a = transpose_a,
           .transpose_b = transpose_b,
           .a_stride = transpose_a ? m : k,
           .b_stride = transpose_b ? k : n,
           .c_stride = n};
  const auto bytes = [](int64_t count, DType dtype) {
    return align_up(static_cast<size_t>(count) * size_of(dtype), 64);
  };
  const size_t a = bytes(m * k, DType::kBf16);
  const size_t b = bytes(k * n, DType::kBf16);
  const size_t c = bytes(m * n, c_dtype);
  matrix_bytes_ = a + b + c;
  memory_ = device_.allocate_device_memory(matrix_bytes_ +
                                           device_.operators().matmul_scratch_bytes(args_));
  stream_ = device_.create_stream("bench");
  const auto staged = device_.allocate_host_memory(matrix_bytes_);
  fill(reinterpret_cast<Bf16*>(staged->data()), m * k, 0);
  fill(reinterpret_cast<Bf16*>(staged->data() + a), k * n, 1);
  copy(*staged, gpu::CopyDirection::kUpload);
  std::byte* base = memory_->data();
  args_.a = base;
  args_.b = base + a;
  args_.c = base + a + b;
  args_.scratch = base + matrix_bytes_;

  static_cast<void>(time());  // what is loaded or chosen at the first product
  constexpr double kLeastSeconds = 0.02;
  products_ = static_cast<int>(std::clamp(std::ceil(kLeastSeconds / time()), 1.0, 1000.0));
}

void MatmulTimer::copy(gpu::Arena& host, gpu::CopyDirection direction) {
  std::byte* device = memory_->data();
  const bool upload = direction == gpu::CopyDirection::kUpload;
  device_.copy_async(upload ? device : host.data(), upload ? host.data() : device, matrix_bytes_,
                     direction, *stream_);
  device_.synchronize(*stream_);
}

double MatmulTimer::time() {
  const auto start = Clock::now();
  for (int i = 0; i < products_; ++i) device_.operators().matmul(args_, *stream_);
  device_.synchronize(*stream_);
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double MatmulTimer::run() {
  return 2.0 * static_cast<double>(shape_.m) * static_cast<double>(shape_.n) *
         static_cast<double>(shape_.k) * products_ / time();
}

int64_t MatmulTimer::count_wrong() {
  const auto staged = device_.allocate_host_memory(matrix_bytes_);
  copy(*staged, gpu::CopyDirection::kDownload);
  const auto in_host_memory = [&](const void* device) {
    return staged->data() + (static_cast<const std::byte*>(device) - memory_->data());
  };
  constexpr int kSamples = 200;
  CounterRandom random(2, 0);
  const auto* a = reinterpret_cast<const Bf16*>(in_host_memory(args_.a));
  const auto* b = reinterpret_cast<const Bf16*>(in_host_memory(args_.b));
  const auto* c = in_host_memory(args_.c);
  int64_t wrong = 0;
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto i = static_cast<int64_t>(random.next_below(static_cast<uint64_t>(shape_.m)));
    const auto j = static_cast<int64_t>(random.next_below(static_cast<uint64_t>(shape_.n)));
    double expected = 0;
    double magnitude = 0;
    for (int64_t l = 0; l < shape_.k; ++l) {
      const double product =
          static_cast<double>(
              to_float(a[shape_.transpose_a ? l * args_.a_stride + i : i * args_.a_stride + l])) *
          static_cast<double>(
              to_float(b[shape_.transpose_b ? j * args_.b_stride + l : l * args_.b_stride + j]));
      expected += product;
      magnitude += std::abs(product);
    }
    const int64_t at = i * args_.c_stride + j;
    const double got = shape_.c_dtype == DType::kF32
                           ? static_cast<double>(reinterpret_cast<const float*>(c)[at])
                           : static_cast<double>(to_float(reinterpret_cast<const Bf16*>(c)[at]));
    // k additions in fp32, then one rounding to the result's type.
    const double rounding = shape_.c_dtype == DType::kF32 ? 0 : 0x1p-8 * std::abs(expected);
    const double bound = rounding + static_cast<double>(shape_.k) * 0x1p-24 * magnitude + 1e-30;
    if (!(std::abs(got - expected) <= bound)) ++wrong;
  }
  return wrong;
}

std::vector<Row> run_matmul(gpu::Device& device, const Options& options) {
  std::vector<MatmulTimer> timers;
  for (const MatmulShape& shape : {
           MatmulShape{"cube 2048", 2048, 2048, 2048, false, true, DType::kBf16},
           MatmulShape{"forward qkv", 4096, 3072, 1024, false, true, DType::kBf16},
           MatmulShape{"forward gate+up", 4096, 5632, 1024, false, true, DType::kBf16},
           MatmulShape{"input gradient", 4096, 1024, 5632, false, false, DType::kBf16},
           MatmulShape{"weight gradient", 5632, 1024, 4096, true, false, DType::kF32},
           MatmulShape{"logits", 512, 32000, 1024, false, true, DType::kF32},
       }) {
    timers.emplace_back(device, shape);
  }
  std::vector<std::vector<double>> rates(timers.size());
  for (int repetition = 0; repetition <= options.repetitions; ++repetition) {
    for (size_t i = 0; i < timers.size(); ++i) {
      const double rate = timers[i].run();
      if (repetition > 0) rates[i].push_back(rate / 1e9);  // the first one warms up
    }
  }
  std::vector<Row> rows;
  double ceiling = 0;
  for (size_t i = 0; i < timers.size(); ++i) {
    rows.push_back(summarize("matmul/" + timers[i].shape().name, "GFLOP/s", rates[i]));
    rows.back().wrong = timers[i].count_wrong();
    ceiling = std::max(ceiling, rows.back().median);
  }
  for (Row& row : rows) row.of_ceiling = row.median / ceiling;
  return rows;
}

}  // namespace strata::bench
