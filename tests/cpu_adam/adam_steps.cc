// Runs steps of AdamW on made-up parameters and writes the fp32 parameters that result, as raw
// little-endian numbers: tests/oracle/adam_steps.py makes the same inputs and compares.
// Usage: adam_steps COUNT STEPS FILE
#include <oneapi/tbb/task_arena.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <vector>

#include "base/bf16.h"
#include "base/parallel.h"
#include "cpu_adam/adam.h"

namespace strata::cpu_adam {
namespace {

/// The finalizer of MurmurHash3.
uint32_t hash(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bU;
  x ^= x >> 13;
  x *= 0xc2b2ae35U;
  return x ^ (x >> 16);
}

/// Uniform integers in [-2^(bits-1), 2^(bits-1)).
int32_t centred(uint32_t hashed, int bits) {
  return static_cast<int32_t>(hashed >> (32 - bits)) - (1 << (bits - 1));
}

/// Of size 2^-4 at most, and exact in fp32, as are the gradients.
float initial_parameter(uint32_t i) {
  return std::ldexp(static_cast<float>(centred(hash(i), 24)), -27);
}

/// A mean and noise of eight times its size, at one of 16 scales.
float gradient_of(uint32_t i, uint32_t count, uint32_t step) {
  const uint32_t own = hash(i ^ 0x40000000U);
  const int32_t mean = centred(own, 13);
  const int32_t noise = centred(hash(i + step * count), 16);
  return std::ldexp(static_cast<float>(mean + noise), -15 - static_cast<int>(own & 15));
}

std::vector<float> run(uint32_t count, uint32_t steps) {
  std::vector<uint16_t> weight(count);
  std::vector<uint16_t> residual(count);
  std::vector<float> moment1(count);
  std::vector<float> moment2(count);
  std::vector<float> gradient(count);
  for (uint32_t i = 0; i < count; ++i) {
    const SplitMaster split = split_master(initial_parameter(i));
    weight[i] = split.weight.bits;
    residual[i] = split.residual;
  }
  const Shard shard{.count = count,
                    .weight_dtype = DType::kBf16,
                    .gradient_dtype = DType::kF32,
                    .gradient = gradient.data(),
                    .weight = weight.data(),
                    .residual = residual.data(),
                    .moment1 = moment1.data(),
                    .moment2 = moment2.data(),
                    .weight_out = weight.data(),
                    .residual_out = residual.data(),
                    .moment1_out = moment1.data(),
                    .moment2_out = moment2.data()};
  const Segment segments[] = {{count / 2, true}, {count - count / 2, false}};
  const Hyperparameters hyper{
      .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  tbb::task_arena arena;
  for (uint32_t step = 1; step <= steps; ++step) {
    for (uint32_t i = 0; i < count; ++i) gradient[i] = gradient_of(i, count, step);
    update(arena, shard, segments, step_constants(hyper, step, 1));
  }
  std::vector<float> parameters(count);
  for (uint32_t i = 0; i < count; ++i) parameters[i] = join_master({Bf16{weight[i]}, residual[i]});
  return parameters;
}

}  // namespace
}  // namespace strata::cpu_adam

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("usage: adam_steps COUNT STEPS FILE\n", stderr);
    return 2;
  }
  try {
    const auto count = static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10));
    const auto steps = static_cast<uint32_t>(std::strtoul(argv[2], nullptr, 10));
    const std::vector<float> parameters = strata::cpu_adam::run(count, steps);
    std::FILE* file = std::fopen(argv[3], "wb");
    const bool written = file != nullptr && std::fwrite(parameters.data(), 4, count, file) == count;
    if (file == nullptr || std::fclose(file) != 0 || !written) {
      std::perror(argv[3]);
      return 1;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "adam_steps: %s\n", error.what());
    return 1;
  }
  return 0;
}
