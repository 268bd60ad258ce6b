// From text to token ids and back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strata::model {

/// Const and without state that changes: safe from any thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  [[nodiscard]] virtual std::string_view name() const noexcept = 0;
  /// Ids are in [0, vocab_size).
  [[nodiscard]] virtual int64_t vocab_size() const noexcept = 0;
  /// The id that ends a document, where the vocabulary has one.
  [[nodiscard]] virtual std::optional<int32_t> eos() const noexcept = 0;

  [[nodiscard]] virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  /// The bytes that the ids stand for; any cut of a sequence may end within a UTF-8 character.
  /// Throws a usage error for an id outside the vocabulary.
  [[nodiscard]] virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

/// A byte is a token and its value the id: any file is valid input, and encode and decode are exact
/// inverses.
class ByteTokenizer final : public Tokenizer {
 public:
  [[nodiscard]] std::string_view name() const noexcept override { return "bytes"; }
  [[nodiscard]] int64_t vocab_size() const noexcept override { return 256; }
  [[nodiscard]] std::optional<int32_t> eos() const noexcept override { return std::nullopt; }
  [[nodiscard]] std::vector<int32_t> encode(std::string_view text) const override;
  [[nodiscard]] std::string decode(std::span<const int32_t> ids) const override;
};

}  // namespace strata::model
