#include "model/known_models.h"

#include <cmath>
#include <map>
#include <string>

#include "catch.h"
#include "model/llama.h"

namespace strata::model {
namespace {

TEST_CASE("known models have the published number of parameters", "[known-models]") {
  // Of the checkpoints or, where only a rounded figure is published, that.
  const std::map<std::string, double> published{{"llama2-7b", 6'738'415'616.0},
                                                {"llama2-13b", 13'015'864'320.0},
                                                {"llama2-70b", 68'976'648'192.0},
                                                {"llama3-8b", 8'030'261'248.0},
                                                {"llama3-70b", 70'553'706'496.0},
                                                {"opt-175b", 175e9},
                                                {"qwen2.5-1.5b", 1.54e9},
                                                {"qwen2.5-7b", 7.61e9},
                                                {"qwen2.5-14b", 14.7e9},
                                                {"qwen3-8b", 8.2e9},
                                                {"qwen3-14b", 14.8e9},
                                                {"qwen3-32b", 32.8e9},
                                                {"tinyllama-1.1b", 1.1e9}};
  CHECK(known_models().size() == published.size());
  for (const KnownModel& model : known_models()) {
    CAPTURE(model.name);
    const auto found = published.find(std::string(model.name));
    REQUIRE(found != published.end());
    const auto count = static_cast<double>(parameter_count(model.config()));
    CHECK(std::abs(count - found->second) < 0.01 * found->second);
    if (model.note.empty() && found->second > 6e9) CHECK(count == found->second);
    CHECK(find_known_model(model.name) == &model);
  }
  CHECK(find_known_model("llama2-13B") == nullptr);
}

TEST_CASE("known models make units", "[known-models]") {
  for (const KnownModel& model : known_models()) {
    CAPTURE(model.name);
    const Llama llama(model.config(), DType::kBf16, 16);
    CHECK(llama.units().size() == static_cast<size_t>(model.layers) + 2);
  }
}

}  // namespace
}  // namespace strata::model
