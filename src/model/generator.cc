#include "model/generator.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/random.h"

namespace strata::model {

int32_t sample(std::span<const float> logits, const SamplingOptions& options, uint64_t draw) {
  STRATA_CHECK(!logits.empty(), "something to choose from");
  if (options.temperature <= 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)];
    const float lb = logits[static_cast<size_t>(b)];
    return la > lb || (la == lb && a < b);
  };
  if (options.top_k > 0 && options.top_k < static_cast<int64_t>(ids.size())) {
    std::partial_sort(ids.begin(), ids.begin() + options.top_k, ids.end(), likelier);
    ids.resize(static_cast<size_t>(options.top_k));
  }
  const float highest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> cumulative;
  double sum = 0;
  for (const int32_t id : ids) {
    sum += std::exp(static_cast<double>(logits[static_cast<size_t>(id)] - highest) /
                    options.temperature);
    cumulative.push_back(sum);
  }
  const double point = CounterRandom(options.seed, 0, draw).next_uniform() * sum;
  const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), point);
  return ids[std::min(static_cast<size_t>(at - cumulative.begin()), ids.size() - 1)];
}

pipeline::Plan generation_plan(const Llama& llama, const gpu::Operators& operators,
                               int64_t context) {
  pipeline::Placement placement =
      pipeline::Placement::all_on(pipeline::Tier::kDevice, llama.units().size());
  placement.training = false;
  return pipeline::build_plan(llama, operators, {.tokens = context, .max_sequences = 1}, placement);
}

Generator::Generator(const Llama& llama, pipeline::Executor& executor)
    : executor_(executor), context_(executor.plan().shape.tokens) {
  const auto context = static_cast<size_t>(context_);
  window_.resize(context);
  targets_.assign(context, -1);
  positions_.resize(context);
  std::iota(positions_.begin(), positions_.end(), 0);
  logits_.resize(static_cast<size_t>(llama.vocabulary()));
}

int32_t Generator::next(std::span<const int32_t> tokens, const SamplingOptions& options) {
  STRATA_CHECK(!tokens.empty(), "at least one token to continue");
  const auto context = static_cast<size_t>(context_);
  if (tokens.size() > context) tokens = tokens.last(context);
  // What stands behind the last token cannot be seen from it.
  std::fill(window_.begin(), window_.end(), 0);
  std::copy(tokens.begin(), tokens.end(), window_.begin());
  const auto length = static_cast<int32_t>(tokens.size());
  const std::array<int32_t, 2> offsets{0, length};
  executor_.logits({window_, targets_, positions_, offsets}, length - 1, logits_);
  return sample(logits_, options, draws_++);
}

}  // namespace strata::model
