// What CUDA kernels do with tokens and targets outside the vocabulary: the emulated device alone,
// for a trap ends a process's use of a real one.
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "cuda_emulator/emulator.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda_memory.h"

namespace strata::gpu::cuda {
namespace {

emulator::Settings quiet() {
  emulator::Settings settings;
  settings.print_diagnoses = false;
  return settings;
}

/// Whether launch(tokens or targets on the device, stream) loses the device.
template <class Launch>
bool fails(const std::vector<int32_t>& numbers, Launch launch) {
  emulator::reset(quiet());
  cudaError_t error = cudaSuccess;
  {
    const TestStream stream;
    const DeviceMemory numbers_(numbers);
    try {
      launch(numbers_.data<int32_t>(), stream.handle());
    } catch (const Error&) {
      // A later kernel of the operator found the device lost.
    }
    error = cudaStreamSynchronize(stream.handle());
    emulator::reset(quiet());
  }
  emulator::reset();
  return error != cudaSuccess;
}

TEST_CASE("cuda kernels stop at tokens and targets outside the vocabulary", "[cuda]") {
  constexpr int64_t kWidth = 8;
  constexpr int64_t kVocabulary = 5;
  const auto gather = [](const int32_t* tokens, StreamHandle stream) {
    const DeviceMemory weight(kVocabulary * kWidth * sizeof(float));
    const DeviceMemory out(3 * kWidth * sizeof(float));
    embedding({.rows = 3,
               .width = kWidth,
               .vocabulary = kVocabulary,
               .dtype = DType::kF32,
               .tokens = tokens,
               .weight = weight.data(),
               .out = out.data()},
              stream);
    static_cast<void>(cudaStreamSynchronize(stream));
  };
  const auto scatter = [](const int32_t* tokens, StreamHandle stream) {
    const DeviceMemory dout(3 * kWidth * sizeof(float));
    const DeviceMemory dweight(kVocabulary * kWidth * sizeof(float));
    EmbeddingBackwardArgs args{.rows = 3,
                               .width = kWidth,
                               .vocabulary = kVocabulary,
                               .dtype = DType::kF32,
                               .tokens = tokens,
                               .dout = dout.data(),
                               .dweight = dweight.data<float>()};
    const DeviceMemory scratch(embedding_backward_scratch_bytes(args));
    args.scratch = scratch.data();
    embedding_backward(args, stream);
    static_cast<void>(cudaStreamSynchronize(stream));
  };
  const auto loss = [](const int32_t* targets, StreamHandle stream) {
    const DeviceMemory logits(3 * kVocabulary * sizeof(float));
    const DeviceMemory sum(sizeof(double));
    CrossEntropyArgs args{.rows = 3,
                          .vocabulary = kVocabulary,
                          .dtype = DType::kF32,
                          .logits = logits.data<float>(),
                          .logits_stride = kVocabulary,
                          .targets = targets,
                          .loss_sum = sum.data<double>()};
    const DeviceMemory scratch(cross_entropy_scratch_bytes(args));
    args.scratch = scratch.data();
    cross_entropy(args, stream);
    static_cast<void>(cudaStreamSynchronize(stream));
  };
  REQUIRE_FALSE(fails({0, 4, 2}, gather));
  REQUIRE(fails({0, 5, 2}, gather));
  REQUIRE(fails({0, -1, 2}, gather));
  REQUIRE_FALSE(fails({0, 4, 2}, scatter));
  REQUIRE(fails({0, 4, 5}, scatter));
  REQUIRE(fails({-1, 4, 2}, scatter));
  REQUIRE_FALSE(fails({-1, 4, 2}, loss));
  REQUIRE(fails({-1, 4, 5}, loss));
}

}  // namespace
}  // namespace strata::gpu::cuda
