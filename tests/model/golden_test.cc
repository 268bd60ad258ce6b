// The model against PyTorch in double precision (tests/oracle/llama.py).

#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/bf16.h"
#include "catch.h"
#include "model/generator.h"
#include "model/test_batch.h"
#include "model/weights.h"
#include "nlohmann/json.hpp"

namespace strata::model {
namespace {

using pipeline::Placement;
using pipeline::StateKind;
using pipeline::Tier;

std::filesystem::path golden(const std::string& name) {
  return std::filesystem::path(STRATA_TEST_DATA_DIR) / "llama" / (name + ".safetensors");
}

template <class T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* info = file.find(name);
  REQUIRE(info != nullptr);
  REQUIRE(info->size_bytes == info->elements * static_cast<int64_t>(sizeof(T)));
  std::vector<T> out(static_cast<size_t>(info->elements));
  file.read(*info, 0, std::as_writable_bytes(std::span(out)));
  return out;
}

/// |got - expected| / |expected|, Euclidean.
double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    difference += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

/// fp32: what the reference mode promises. bf16: a value passes at most about 16 roundings a block
/// and direction (norm, products, rotation, softmax weights, residual sums), two blocks, and the
/// head's 4, forward and backward: 72 in all. Each is uniform within 2^-9, of standard deviation
/// 2^-9/sqrt(3), and they add like a random walk: sqrt(72) * 2^-9 / sqrt(3) = 0.0096 of the
/// result's size. Gradients of queries and keys are products of a difference (dP - D) that cancels
/// most of its size, with few elements to average over: factor 6.
double bound(DType dtype) {
  return dtype == DType::kF32 ? 1e-5 : 6 * std::sqrt(72.0) * 0x1p-9 / std::sqrt(3.0);
}

std::vector<float> read_floats(pipeline::Executor& executor, int unit, StateKind kind, DType dtype,
                               int64_t first, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  if (dtype == DType::kF32) {
    executor.read_state(unit, kind, static_cast<size_t>(first) * 4,
                        std::as_writable_bytes(std::span(out)));
    return out;
  }
  std::vector<Bf16> halves(out.size());
  executor.read_state(unit, kind, static_cast<size_t>(first) * 2,
                      std::as_writable_bytes(std::span(halves)));
  for (size_t i = 0; i < out.size(); ++i) out[i] = to_float(halves[i]);
  return out;
}

}  // namespace

TEST_CASE("logits, loss and gradients agree with PyTorch in double precision") {
  const std::string name =
      GENERATE("gqa_8_4", "gqa_8_1_tied", "odd_length", "packed_documents", "llama3_rope_tied");
  const DType dtype = GENERATE(DType::kF32, DType::kBf16);
  const Tier home = GENERATE(Tier::kDevice, Tier::kHost);
  INFO(name << " in " << name_of(dtype) << " on " << pipeline::name_of(home));
  const auto file = SafetensorsFile::open(golden(name));
  const LlamaConfig config = parse_llama_config(file.metadata().at("config"), name);
  const TestBatch batch{values<int32_t>(file, "tokens"), values<int32_t>(file, "targets"),
                        values<int32_t>(file, "positions"),
                        values<int32_t>(file, "sequence_offsets")};
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  const auto documents = static_cast<int64_t>(batch.offsets.size()) - 1;

  const auto device = gpu::create_host_device({.threads = 2});
  const Llama llama(config, dtype, tokens);
  const auto reader = CheckpointReader::open(golden(name));
  {
    pipeline::Executor executor(*device, llama,
                                pipeline::build_plan(llama, device->operators(),
                                                     {.tokens = tokens, .max_sequences = documents},
                                                     Placement::all_on(home, llama.units().size())),
                                {.cpu_threads = 2});
    load_weights(reader, llama, executor);
    const pipeline::HostMicroBatch view = batch.view();
    const auto unmasked = static_cast<double>(batch.unmasked());
    const auto result = executor.train_step({&view, 1}, static_cast<float>(1 / unmasked), {});
    const double loss = values<double>(file, "loss").front();
    CHECK(std::abs(result.loss_sum / unmasked - loss) <= bound(dtype) * loss);

    double squares = 0;
    for (const TensorPlace& place : llama.tensors()) {
      const std::vector<float> expected = values<float>(file, "grad." + place.tensor.name);
      const std::vector<float> got = read_floats(executor, place.unit, StateKind::kGradient, dtype,
                                                 place.first, place.tensor.elements());
      for (const float value : got)
        squares += static_cast<double>(value) * static_cast<double>(value);
      INFO(place.tensor.name);
      CHECK(relative_error(got, expected) <= bound(dtype));
    }
    CHECK(result.gradient_norm == Approx(std::sqrt(squares)).epsilon(1e-12));
  }
  pipeline::Plan plan = generation_plan(llama, device->operators(), tokens);
  plan = pipeline::build_plan(llama, device->operators(),
                              {.tokens = tokens, .max_sequences = documents}, plan.placement);
  pipeline::Executor executor(*device, llama, std::move(plan), {.cpu_threads = 2});
  load_weights(reader, llama, executor);
  std::vector<float> logits;
  std::vector<float> row(static_cast<size_t>(config.vocab_size));
  for (int64_t t = 0; t < tokens; ++t) {
    executor.logits(batch.view(), t, row);
    logits.insert(logits.end(), row.begin(), row.end());
  }
  CHECK(relative_error(logits, values<float>(file, "logits")) <= bound(dtype));
}

TEST_CASE("ten steps of training follow PyTorch's") {
  const auto file = SafetensorsFile::open(golden("train10"));
  const LlamaConfig config = parse_llama_config(file.metadata().at("config"), "train10");
  const auto settings = nlohmann::json::parse(file.metadata().at("training"));
  const auto all_tokens = values<int32_t>(file, "tokens");
  const auto all_targets = values<int32_t>(file, "targets");
  const auto losses = values<double>(file, "losses");
  const auto norms = values<double>(file, "gradient_norms");
  TestBatch batch{
      {}, {}, values<int32_t>(file, "positions"), values<int32_t>(file, "sequence_offsets")};
  const size_t tokens = batch.positions.size();
  REQUIRE(all_tokens.size() == losses.size() * tokens);

  const auto device = gpu::create_host_device({.threads = 2});
  const Llama llama(config, DType::kF32, static_cast<int64_t>(tokens));
  pipeline::Executor executor(
      *device, llama,
      pipeline::build_plan(llama, device->operators(),
                           {.tokens = static_cast<int64_t>(tokens), .max_sequences = 2},
                           Placement::all_on(Tier::kHost, llama.units().size())),
      {.cpu_threads = 2});
  load_weights(CheckpointReader::open(golden("train10")), llama, executor);
  const double max_norm = settings.at("max_grad_norm");
  int clipped = 0;
  for (size_t step = 0; step < losses.size(); ++step) {
    const auto part = [&](const std::vector<int32_t>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(step * tokens);
      return std::vector<int32_t>(begin, begin + static_cast<std::ptrdiff_t>(tokens));
    };
    batch.tokens = part(all_tokens);
    batch.targets = part(all_targets);
    const pipeline::HostMicroBatch view = batch.view();
    const auto unmasked = static_cast<double>(batch.unmasked());
    const pipeline::StepResult result =
        executor.train_step({&view, 1}, static_cast<float>(1 / unmasked),
                            {.hyper = {.learning_rate = settings.at("learning_rate"),
                                       .beta1 = settings.at("adam_beta1"),
                                       .beta2 = settings.at("adam_beta2"),
                                       .epsilon = settings.at("adam_epsilon"),
                                       .weight_decay = settings.at("weight_decay")},
                             .step = static_cast<int64_t>(step) + 1,
                             .max_grad_norm = max_norm});
    INFO("step " << step + 1);
    CHECK(result.loss_sum / unmasked == Approx(losses[step]).epsilon(2e-5));
    CHECK(result.gradient_norm == Approx(norms[step]).epsilon(2e-5));
    clipped += result.clipped;
  }
  CHECK(clipped > 0);
  for (const TensorPlace& place : llama.tensors()) {
    INFO(place.tensor.name);
    // Adam divides by the size of the gradient: where that is near zero its rounding errors count
    // whole, so tensors are held to their norm, not element by element.
    CHECK(relative_error(read_floats(executor, place.unit, StateKind::kWeight, DType::kF32,
                                     place.first, place.tensor.elements()),
                         values<float>(file, "final." + place.tensor.name)) <= 1e-4);
  }
}

}  // namespace strata::model
