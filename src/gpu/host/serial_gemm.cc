#include "gpu/host/serial_gemm.h"

#include <dnnl.hpp>

#include <memory>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "gpu/host/gemm_product.h"

// Of libgomp, the runtime of oneDNN's OpenMP build; its header is the compiler's, and not found by
// others.
extern "C" void omp_set_num_threads(int threads);

namespace strata::gpu::host {
namespace {

/// A model needs a few dozen, of about 70 KiB each.
constexpr size_t kMaxCompiled = 384;

constexpr std::align_val_t kScratchAlignment{64};

/// What a thread needs to use oneDNN: its OpenMP thread count is a thread's own setting.
class ThreadContext {
 public:
  static ThreadContext& get() {
    static thread_local ThreadContext context;
    return context;
  }

  [[nodiscard]] const dnnl::engine& engine() const { return engine_; }
  [[nodiscard]] const dnnl::stream& stream() const { return stream_; }

  void* scratch(size_t size_bytes) {
    if (size_bytes > scratch_bytes_) {
      scratch_.reset();
      scratch_bytes_ = 0;
      scratch_.reset(::operator new(size_bytes, kScratchAlignment));
      scratch_bytes_ = size_bytes;
    }
    return scratch_.get();
  }

 private:
  struct Delete {
    void operator()(void* memory) const { ::operator delete(memory, kScratchAlignment); }
  };

  ThreadContext() : engine_(shared_engine()) {
    omp_set_num_threads(1);
    stream_ = dnnl::stream(engine_);
  }

  static const dnnl::engine& shared_engine() {
    static const dnnl::engine engine = [] {
      // oneDNN's own cache would hold on to what ours lets go.
      dnnl::set_primitive_cache_capacity(0);
      return dnnl::engine(dnnl::engine::kind::cpu, 0);
    }();
    return engine;
  }

  dnnl::engine engine_;
  dnnl::stream stream_;
  std::unique_ptr<void, Delete> scratch_;
  size_t scratch_bytes_ = 0;
};

dnnl::memory::desc describe(int64_t rows, int64_t columns, DType dtype, int64_t stride,
                            bool transposed) {
  const auto type =
      dtype == DType::kBf16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
  const dnnl::memory::dims strides =
      transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
  return {dnnl::memory::dims{rows, columns}, type, strides};
}

struct HashShape {
  size_t operator()(const GemmShape& shape) const {
    size_t hash = 0;
    for (const int64_t value :
         {shape.m, shape.n, shape.k, shape.a_stride, shape.b_stride, shape.c_stride,
          static_cast<int64_t>(shape.dtype) * 2 + static_cast<int64_t>(shape.c_dtype),
          int64_t{shape.transpose_a} * 4 + int64_t{shape.transpose_b} * 2 + shape.accumulate}) {
      hash = (hash ^ static_cast<size_t>(value)) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

class OneDnnGemm final : public GemmProduct {
 public:
  explicit OneDnnGemm(const GemmShape& shape)
      : a_(describe(shape.m, shape.k, shape.dtype, shape.a_stride, shape.transpose_a)),
        b_(describe(shape.k, shape.n, shape.dtype, shape.b_stride, shape.transpose_b)),
        c_(describe(shape.m, shape.n, shape.c_dtype, shape.c_stride, false)) {
    dnnl::primitive_attr attributes;
    // The library's own scratch memory belongs to a primitive or to the thread that made it: either
    // forbids the use of one primitive on several threads.
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (shape.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a_, b_, c_), attributes,
                                                   ThreadContext::get().engine());
    scratch_ = description.scratchpad_desc();
    primitive_ = dnnl::matmul(description);
  }

  void run(const void* a, const void* b, void* c) const override {
    ThreadContext& context = ThreadContext::get();
    const auto memory = [&](const dnnl::memory::desc& description, const void* address) {
      return dnnl::memory(description, context.engine(), const_cast<void*>(address));
    };
    const dnnl::memory memory_a = memory(a_, a);
    const dnnl::memory memory_b = memory(b_, b);
    const dnnl::memory memory_c = memory(c_, c);
    const dnnl::memory memory_scratch = memory(scratch_, context.scratch(scratch_.get_size()));
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, memory_a.get()},
                                         {DNNL_ARG_WEIGHTS, memory_b.get()},
                                         {DNNL_ARG_DST, memory_c.get()},
                                         {DNNL_ARG_SCRATCHPAD, memory_scratch.get()}};
    // The C function: the C++ one builds a hash map for each call.
    dnnl::error::wrap_c_api(
        dnnl_primitive_execute(primitive_.get(), context.stream().get(), 4, arguments),
        "could not execute a matrix product");
  }

 private:
  dnnl::memory::desc a_, b_, c_, scratch_;
  dnnl::matmul primitive_;
};

std::unique_ptr<const GemmProduct> compile(const GemmShape& shape) {
  if (shape.dtype == DType::kBf16 && !has_bf16_gemm()) {
    return create_widened_gemm(shape, SerialGemm::find);
  }
  return std::make_unique<OneDnnGemm>(shape);
}

}  // namespace

bool has_bf16_gemm() {
  static const bool has = [] {
    try {
      const OneDnnGemm any({.m = 1, .n = 1, .k = 1, .a_stride = 1, .b_stride = 1, .c_stride = 1});
      return true;
    } catch (const dnnl::error& error) {
      if (error.status != dnnl_unimplemented) throw;
      return false;
    }
  }();
  return has;
}

SerialGemm SerialGemm::find(const GemmShape& shape) {
  static std::mutex mutex;
  static std::unordered_map<GemmShape, SerialGemm, HashShape> compiled;
  {
    const std::lock_guard lock(mutex);
    if (const auto found = compiled.find(shape); found != compiled.end()) return found->second;
  }
  // Not under the lock: a product may be made of others. What two threads compile at once is the
  // same.
  SerialGemm gemm(compile(shape));
  const std::lock_guard lock(mutex);
  // All at once: no order of use to keep up, and users of the old ones hold their own copies.
  if (compiled.size() >= kMaxCompiled) compiled.clear();
  return compiled.emplace(shape, std::move(gemm)).first->second;
}

void SerialGemm::run(const void* a, const void* b, void* c) const { product_->run(a, b, c); }

}  // namespace strata::gpu::host
