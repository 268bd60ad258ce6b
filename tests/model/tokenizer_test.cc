#include "model/tokenizer.h"

#include <array>
#include <string>

#include "base/error.h"
#include "base/random.h"
#include "catch.h"

namespace strata::model {
namespace {

TEST_CASE("the byte tokenizer gives every byte back", "[tokenizer]") {
  const ByteTokenizer tokenizer;
  constexpr uint64_t kSeed = 11;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  for (int i = 0; i < 1000; ++i) text.push_back(static_cast<char>(random.next_below(256)));

  for (const size_t size : {size_t{0}, size_t{1}, size_t{256}, text.size()}) {
    const std::string_view part = std::string_view(text).substr(0, size);
    const auto ids = tokenizer.encode(part);
    REQUIRE(ids.size() == size);
    CHECK(tokenizer.decode(ids) == part);
  }
  const auto ids = tokenizer.encode(text);
  CHECK(ids[0] == 0);
  CHECK(ids[128] == 128);  // not sign-extended
  CHECK(ids[255] == 255);
  CHECK(tokenizer.vocab_size() == 256);
  CHECK_FALSE(tokenizer.eos().has_value());
}

TEST_CASE("ids that are no bytes are refused", "[tokenizer]") {
  const ByteTokenizer tokenizer;
  CHECK_THROWS_AS(tokenizer.decode(std::array{256}), Error);
  CHECK_THROWS_AS(tokenizer.decode(std::array{65, -1}), Error);
}

}  // namespace
}  // namespace strata::model
