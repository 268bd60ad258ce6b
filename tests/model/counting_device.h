// A device that passes everything on to another one and counts what it is asked to do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "gpu/device.h"
#include "gpu/operators.h"

namespace strata::model {

/// As UnitModel::matmul_flops and other_bytes count. Attention: for one document of all tokens.
struct Work {
  double matmul_flops = 0;
  double other_bytes = 0;
};

class CountingOperators final : public gpu::Operators {
 public:
  explicit CountingOperators(gpu::Operators& inner) : inner_(inner) {}

  Work work;

  size_t matmul_scratch_bytes(const gpu::MatmulArgs& args) const override {
    return inner_.matmul_scratch_bytes(args);
  }
  void matmul(const gpu::MatmulArgs& args, gpu::Stream& stream) override {
    work.matmul_flops += 2 * product(args.m, args.n) * static_cast<double>(args.k);
    inner_.matmul(args, stream);
  }
  void rms_norm(const gpu::RmsNormArgs& args, gpu::Stream& stream) override {
    move(2 * args.rows * args.width + args.width, args.dtype);
    move(args.rows, DType::kF32);
    inner_.rms_norm(args, stream);
  }
  void residual_rms_norm(const gpu::ResidualRmsNormArgs& args, gpu::Stream& stream) override {
    move(4 * args.rows * args.width + args.width, args.dtype);
    move(args.rows, DType::kF32);
    inner_.residual_rms_norm(args, stream);
  }
  size_t rms_norm_backward_scratch_bytes(const gpu::RmsNormBackwardArgs& args) const override {
    return inner_.rms_norm_backward_scratch_bytes(args);
  }
  void rms_norm_backward(const gpu::RmsNormBackwardArgs& args, gpu::Stream& stream) override {
    const int64_t rows = args.residual_gradient != nullptr ? 4 * args.rows : 3 * args.rows;
    move(rows * args.width + args.width, args.dtype);
    move(args.rows + 2 * args.width, DType::kF32);
    inner_.rms_norm_backward(args, stream);
  }
  void rotary(const gpu::RotaryArgs& args, gpu::Stream& stream) override {
    move(2 * args.rows * args.heads * args.head_dim, args.dtype);
    move(args.rows * args.head_dim + args.rows, DType::kF32);  // of the table, and the positions
    inner_.rotary(args, stream);
  }
  size_t attention_scratch_bytes(const gpu::AttentionArgs& args) const override {
    return inner_.attention_scratch_bytes(args);
  }
  void attention(const gpu::AttentionArgs& args, gpu::Stream& stream) override {
    work.matmul_flops += 2 * causal_product(args);
    inner_.attention(args, stream);
  }
  size_t attention_backward_scratch_bytes(const gpu::AttentionBackwardArgs& args) const override {
    return inner_.attention_backward_scratch_bytes(args);
  }
  void attention_backward(const gpu::AttentionBackwardArgs& args, gpu::Stream& stream) override {
    work.matmul_flops += 5 * causal_product(args.forward);
    inner_.attention_backward(args, stream);
  }
  void swiglu(const gpu::SwigluArgs& args, gpu::Stream& stream) override {
    move(3 * args.rows * args.width, args.dtype);
    inner_.swiglu(args, stream);
  }
  void swiglu_backward(const gpu::SwigluBackwardArgs& args, gpu::Stream& stream) override {
    move(5 * args.rows * args.width, args.dtype);
    inner_.swiglu_backward(args, stream);
  }
  void embedding(const gpu::EmbeddingArgs& args, gpu::Stream& stream) override {
    move(2 * args.rows * args.width, args.dtype);
    move(args.rows, DType::kF32);  // the tokens
    inner_.embedding(args, stream);
  }
  size_t embedding_backward_scratch_bytes(const gpu::EmbeddingBackwardArgs& args) const override {
    return inner_.embedding_backward_scratch_bytes(args);
  }
  void embedding_backward(const gpu::EmbeddingBackwardArgs& args, gpu::Stream& stream) override {
    move(args.rows * args.width, args.dtype);
    move(2 * args.rows * args.width + args.rows, DType::kF32);
    inner_.embedding_backward(args, stream);
  }
  size_t cross_entropy_scratch_bytes(const gpu::CrossEntropyArgs& args) const override {
    return inner_.cross_entropy_scratch_bytes(args);
  }
  void cross_entropy(const gpu::CrossEntropyArgs& args, gpu::Stream& stream) override {
    const int64_t logits = args.rows * args.vocabulary;
    move(logits + args.rows, DType::kF32);
    if (args.dlogits != nullptr) {
      move(logits, DType::kF32);
      move(logits, args.dtype);
    }
    inner_.cross_entropy(args, stream);
  }
  void add(const gpu::AddArgs& args, gpu::Stream& stream) override {
    move(3 * args.count, args.dtype);
    inner_.add(args, stream);
  }
  void cast(const gpu::CastArgs& args, gpu::Stream& stream) override {
    move(args.count, args.in_dtype);
    move(args.count, args.out_dtype);
    inner_.cast(args, stream);
  }
  size_t finish_gradient_scratch_bytes(const gpu::FinishGradientArgs& args) const override {
    return inner_.finish_gradient_scratch_bytes(args);
  }
  void finish_gradient(const gpu::FinishGradientArgs& args, gpu::Stream& stream) override {
    inner_.finish_gradient(args, stream);
  }
  void adam(const gpu::AdamArgs& args, gpu::Stream& stream) override { inner_.adam(args, stream); }

 private:
  static double product(int64_t a, int64_t b) {
    return static_cast<double>(a) * static_cast<double>(b);
  }
  static double causal_product(const gpu::AttentionArgs& args) {
    return product(args.tokens, args.tokens + 1) * product(args.heads, args.head_dim);
  }
  void move(int64_t elements, DType dtype) {
    work.other_bytes += static_cast<double>(elements) * static_cast<double>(size_of(dtype));
  }

  gpu::Operators& inner_;
};

class CountingDevice final : public gpu::Device {
 public:
  explicit CountingDevice(gpu::Device& inner) : inner_(inner), operators_(inner.operators()) {}

  [[nodiscard]] Work& work() { return operators_.work; }

  std::string_view kind() const noexcept override { return inner_.kind(); }
  std::string description() const override { return inner_.description(); }
  size_t free_memory_bytes() const override { return inner_.free_memory_bytes(); }
  std::unique_ptr<gpu::Arena> allocate_device_memory(size_t size_bytes) override {
    return inner_.allocate_device_memory(size_bytes);
  }
  std::unique_ptr<gpu::Arena> allocate_host_memory(size_t size_bytes) override {
    return inner_.allocate_host_memory(size_bytes);
  }
  std::unique_ptr<gpu::Stream> create_stream(std::string name) override {
    return inner_.create_stream(std::move(name));
  }
  std::unique_ptr<gpu::Event> create_event() override { return inner_.create_event(); }
  void record_async(gpu::Event& event, gpu::Stream& stream) override {
    inner_.record_async(event, stream);
  }
  void wait_async(gpu::Stream& stream, gpu::Event& event) override {
    inner_.wait_async(stream, event);
  }
  void synchronize(gpu::Event& event) override { inner_.synchronize(event); }
  void synchronize(gpu::Stream& stream) override { inner_.synchronize(stream); }
  void fail(std::exception_ptr error) noexcept override { inner_.fail(std::move(error)); }
  void copy_async(void* destination, const void* source, size_t size_bytes,
                  gpu::CopyDirection direction, gpu::Stream& stream) override {
    if (direction == gpu::CopyDirection::kWithinDevice) {
      work().other_bytes += 2 * static_cast<double>(size_bytes);
    }
    inner_.copy_async(destination, source, size_bytes, direction, stream);
  }
  void fill_zero_async(void* destination, size_t size_bytes, gpu::Stream& stream) override {
    inner_.fill_zero_async(destination, size_bytes, stream);
  }
  void stamp_async(int64_t* nanoseconds, gpu::Stream& stream) override {
    inner_.stamp_async(nanoseconds, stream);
  }
  gpu::Operators& operators() noexcept override { return operators_; }

 private:
  gpu::Device& inner_;
  CountingOperators operators_;
};

}  // namespace strata::model
