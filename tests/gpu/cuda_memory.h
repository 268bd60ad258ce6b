// What tests of single CUDA kernels share: tensors on the host, their copies on the device, a
// stream, and comparison with a reference in double.
//
// Tolerances: a result may differ by its one rounding to the type stored, unit_of which is
// relative, and by the fp32 arithmetic before it, counted as operations times 2^-24 of the terms'
// sizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/bf16.h"
#include "base/dtype.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/lane_orders.h"

namespace strata::gpu {

inline constexpr DType kDTypes[] = {DType::kBf16, DType::kF32};
inline constexpr double kUnitF32 = 0x1p-24;

inline double unit_of(DType dtype) { return dtype == DType::kBf16 ? 0x1p-8 : kUnitF32; }
/// Of a sum of `count` terms by threads that each add at most 1/8 of them, relative to the terms.
inline double sum_error(int64_t count) { return (static_cast<double>(count) / 8 + 32) * kUnitF32; }
inline size_t index(int64_t i) { return static_cast<size_t>(i); }

/// Elements of a type known at run time.
class Tensor {
 public:
  Tensor(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(static_cast<size_t>(count) * size_of(dtype)) {}

  static Tensor normal(DType dtype, int64_t count, CounterRandom& random, double scale = 1) {
    Tensor tensor(dtype, count);
    for (int64_t i = 0; i < count; ++i) {
      tensor.set(i, static_cast<float>(random.next_normal() * scale));
    }
    return tensor;
  }

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] int64_t count() const {
    return static_cast<int64_t>(bytes_.size() / size_of(dtype_));
  }
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }
  [[nodiscard]] const std::vector<std::byte>& bytes() const { return bytes_; }
  float operator[](int64_t i) const {
    if (dtype_ == DType::kBf16) {
      Bf16 value{};
      std::memcpy(&value, bytes_.data() + i * 2, 2);
      return to_float(value);
    }
    float value = 0;
    std::memcpy(&value, bytes_.data() + i * 4, 4);
    return value;
  }
  [[nodiscard]] double at(int64_t i) const { return static_cast<double>((*this)[i]); }
  void set(int64_t i, float value) {
    if (dtype_ == DType::kBf16) {
      const Bf16 rounded = to_bf16(value);
      std::memcpy(bytes_.data() + i * 2, &rounded, 2);
    } else {
      std::memcpy(bytes_.data() + i * 4, &value, 4);
    }
  }
  friend bool operator==(const Tensor&, const Tensor&) = default;

 private:
  DType dtype_;
  std::vector<std::byte> bytes_;
};

struct Shape {
  int64_t rows, width;
};

template <class Body>
void for_each_type(Body body) {
  for (const DType dtype : kDTypes) {
    INFO(name_of(dtype));
    body(dtype);
  }
}

/// What an element must be, and by how much fp32 arithmetic may miss it before the last rounding.
struct Expected {
  double value, error;
};

/// The first element of [begin, end) that is not as `expected(i)` says, or -1.
template <class Expect>
int64_t first_wrong(const Tensor& tensor, int64_t begin, int64_t end, Expect expected) {
  for (int64_t i = begin; i < end; ++i) {
    const Expected e = expected(i);
    const double bound = (std::abs(e.value) + e.error) * unit_of(tensor.dtype()) + e.error + 1e-37;
    if (!(std::abs(tensor.at(i) - e.value) <= bound)) {
      UNSCOPED_INFO("element " << i << " is " << tensor.at(i) << ", not " << e.value << " within "
                               << bound);
      return i;
    }
  }
  return -1;
}

template <class Expect>
int64_t first_wrong(const Tensor& tensor, Expect expected) {
  return first_wrong(tensor, 0, tensor.count(), expected);
}

/// False, with a warning that makes the test count as skipped, where there is no device.
[[nodiscard]] inline bool have_device() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  WARN("skipped: no CUDA device");
  return false;
}

/// A stream that must have ended its work without an error when it is destroyed or synchronised.
class TestStream {
 public:
  TestStream() {
    REQUIRE(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) == cudaSuccess);
  }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  [[nodiscard]] cudaStream_t handle() const { return stream_; }
  void synchronize() const {
    const cudaError_t error = cudaStreamSynchronize(stream_);
    INFO(cudaGetErrorString(error));
    REQUIRE(error == cudaSuccess);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Device memory of exactly the size asked for, filled with bytes 0xff, NaNs in every type.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t size_bytes) : size_bytes_(size_bytes) {
    if (size_bytes == 0) return;
    REQUIRE(cudaMalloc(&data_, size_bytes) == cudaSuccess);
    REQUIRE(cudaMemset(data_, 0xff, size_bytes) == cudaSuccess);
  }
  /// A copy of `values`, `offset_bytes` from where memory is aligned.
  template <class T>
  explicit DeviceMemory(const std::vector<T>& values, size_t offset_bytes = 0)
      : DeviceMemory(values.size() * sizeof(T) + offset_bytes) {
    offset_bytes_ = offset_bytes;
    upload(values);
  }
  explicit DeviceMemory(const Tensor& tensor, int64_t offset = 0)
      : DeviceMemory(tensor.bytes(), index(offset) * size_of(tensor.dtype())) {}
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  template <class T = void>
  [[nodiscard]] T* data() const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset_bytes_);
  }
  template <class T>
  void upload(const std::vector<T>& values) {
    if (values.empty()) return;
    REQUIRE(values.size() * sizeof(T) + offset_bytes_ == size_bytes_);
    REQUIRE(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) ==
            cudaSuccess);
  }
  template <class T>
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> values((size_bytes_ - offset_bytes_) / sizeof(T));
    if (values.empty()) return values;
    REQUIRE(cudaMemcpy(values.data(), data(), values.size() * sizeof(T), cudaMemcpyDeviceToHost) ==
            cudaSuccess);
    return values;
  }
  [[nodiscard]] Tensor download(DType dtype) const {
    Tensor tensor(dtype, static_cast<int64_t>((size_bytes_ - offset_bytes_) / size_of(dtype)));
    tensor.bytes() = download<std::byte>();
    return tensor;
  }

 private:
  void* data_ = nullptr;
  size_t size_bytes_ = 0;
  size_t offset_bytes_ = 0;
};

/// What `run()` gives in the first lane order; it must be the same in all others.
template <class Run>
auto in_every_lane_order(Run run) {
  use_lane_order(0);
  auto first = run();
  for (int order = 1; order < lane_order_count(); ++order) {
    INFO("lane order " << order);
    use_lane_order(order);
    const bool same = run() == first;
    REQUIRE(same);
  }
  use_lane_order(0);
  return first;
}

}  // namespace strata::gpu
