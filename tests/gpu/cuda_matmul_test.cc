// Matrix products of the CUDA device: our use of cuBLASLt, against double precision.

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "base/random.h"
#include "catch.h"
#include "gpu/cuda_test_device.h"
#include "gpu/matmul_reference.h"
#include "gpu/operators.h"

namespace strata::gpu {
namespace {

using namespace matmul_reference;

/// A device and memory that grows with what is multiplied.
class Bench {
 public:
  explicit Bench(Device& device) : device_(device), stream_(device.create_stream("compute")) {}

  void multiply(const Case& test, Operands& operands) {
    Matrix* matrices[] = {&operands.a, &operands.b, &operands.c};
    // Pointers that are no more aligned than they must be.
    constexpr size_t kAlignment = 16;
    size_t offsets[3];
    size_t end = 0;
    for (size_t i = 0; i < 3; ++i) {
      offsets[i] = align_up(end, 256) + kAlignment;
      end = offsets[i] + matrices[i]->bytes().size();
    }
    MatmulArgs args{.m = test.m,
                    .n = test.n,
                    .k = test.k,
                    .dtype = test.dtype,
                    .c_dtype = test.c_dtype,
                    .transpose_a = test.transpose_a,
                    .transpose_b = test.transpose_b,
                    .accumulate = test.accumulate,
                    .a_stride = operands.a.stride(),
                    .b_stride = operands.b.stride(),
                    .c_stride = operands.c.stride()};
    const size_t scratch = align_up(end, 64) + 64;
    reserve(scratch + device_.operators().matmul_scratch_bytes(args));
    std::byte* base = on_device_->data();
    args.a = base + offsets[0];
    args.b = base + offsets[1];
    args.c = base + offsets[2];
    args.scratch = base + scratch;
    auto* staged = reinterpret_cast<char*>(on_host_->data());
    for (size_t i = 0; i < 3; ++i) {
      std::copy(matrices[i]->bytes().begin(), matrices[i]->bytes().end(), staged + offsets[i]);
    }
    device_.copy_async(base, on_host_->data(), end, CopyDirection::kUpload, *stream_);
    device_.operators().matmul(args, *stream_);
    device_.copy_async(on_host_->data(), base, end, CopyDirection::kDownload, *stream_);
    device_.synchronize(*stream_);
    std::copy_n(staged + offsets[2], operands.c.bytes().size(),
                static_cast<char*>(operands.c.data()));
  }

  void check(const Case& test) {
    INFO(test);
    Operands operands(test);
    const Matrix old_c = operands.c;
    multiply(test, operands);
    CHECK(wrong_elements(test, operands, old_c, 4000, 0x1p-23) == 0);
    CHECK(operands.c.gaps_are_intact());
  }

 private:
  void reserve(size_t size_bytes) {
    if (on_device_ && on_device_->size_bytes() >= size_bytes) return;
    on_device_ = device_.allocate_device_memory(size_bytes);
    on_host_ = device_.allocate_host_memory(size_bytes);
  }

  Device& device_;
  std::unique_ptr<Arena> on_device_, on_host_;
  std::unique_ptr<Stream> stream_;
};

TEST_CASE("cuda matmul agrees with double precision in every form", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  Bench bench(*device);
  struct Types {
    DType dtype, c_dtype;
  };
  for (const auto [dtype, c_dtype] :
       {Types{DType::kBf16, DType::kBf16}, Types{DType::kBf16, DType::kF32},
        Types{DType::kF32, DType::kF32}}) {
    for (int form = 0; form < 8; ++form) {
      Case test{.m = 37,
                .n = 129,
                .k = 65,
                .dtype = dtype,
                .c_dtype = c_dtype,
                .transpose_a = (form & 1) != 0,
                .transpose_b = (form & 2) != 0,
                .accumulate = (form & 4) != 0};
      bench.check(test);
      test.a_gap = 3;
      test.b_gap = 8;
      test.c_gap = 1;
      bench.check(test);
    }
  }
}

TEST_CASE("cuda matmul agrees with double precision on random shapes", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  Bench bench(*device);
  CounterRandom random(kSeed, 2);
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random.next_below(bound)); };
  for (int i = 0; i < 40; ++i) {
    const DType dtype = below(4) == 0 ? DType::kF32 : DType::kBf16;
    bench.check({.m = 1 + below(300),
                 .n = 1 + below(300),
                 .k = 1 + below(200),
                 .dtype = dtype,
                 .c_dtype = below(2) == 0 ? dtype : DType::kF32,
                 .transpose_a = below(2) == 0,
                 .transpose_b = below(2) == 0,
                 .accumulate = below(2) == 0,
                 .a_gap = below(2) * below(40),
                 .b_gap = below(2) * below(40),
                 .c_gap = below(2) * below(40)});
  }
  bench.check({.m = 1, .n = 1, .k = 1});
  bench.check({.m = 1, .n = 1, .k = 500, .transpose_a = true, .transpose_b = true});
}

TEST_CASE("cuda matmul without terms leaves C or zeroes it", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  Bench bench(*device);
  for (const bool accumulate : {false, true}) {
    bench.check({.m = 5, .n = 7, .k = 0, .accumulate = accumulate, .c_gap = 2});
    bench.check({.m = 0, .n = 7, .k = 3, .accumulate = accumulate});
    bench.check({.m = 5, .n = 0, .k = 3, .accumulate = accumulate});
  }
}

TEST_CASE("cuda matmul: the same product has the same bits, whatever came between", "[cuda]") {
  const auto device = open_test_device();
  if (!device) return;
  Bench bench(*device);
  for (const Case& test : {Case{.m = 64, .n = 48, .k = 1500, .transpose_b = true},
                           Case{.m = 96,
                           .n = 64,
                           .k = 515,
                           .c_dtype = DType::kF32,
                           .transpose_a = true,
                           .accumulate = true},
                           Case{.m = 33,
                           .n = 130,
                           .k = 77,
                           .dtype = DType::kF32,
                           .c_dtype = DType::kF32,
                           .accumulate = true,
                           .c_gap = 3}}) {
    Operands first(test);
    bench.multiply(test, first);
    bench.check({.m = 70, .n = 50, .k = 30});
    Operands again(test);
    bench.multiply(test, again);
    Bench other(*device);
    Operands elsewhere(test);
    other.multiply(test, elsewhere);
    CHECK(first.c.bytes() == again.c.bytes());
    CHECK(first.c.bytes() == elsewhere.c.bytes());
  }
}

}  // namespace
}  // namespace strata::gpu
