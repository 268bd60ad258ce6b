// Shapes of published models by name, for plans of models whose files are not at hand.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "model/hf_config.h"

namespace strata::model {

struct KnownModel {
  std::string_view name;
  int64_t hidden_size, intermediate_size, layers, heads, key_value_heads, head_dim, vocab_size;
  int64_t positions;
  bool tied;
  /// Where the published model differs from what Strata trains, and what stands in for it; empty
  /// where it does not.
  std::string_view note;

  [[nodiscard]] LlamaConfig config() const;
};

/// In alphabetical order of families.
[[nodiscard]] std::span<const KnownModel> known_models() noexcept;

/// Null where there is none of that name.
[[nodiscard]] const KnownModel* find_known_model(std::string_view name) noexcept;

}  // namespace strata::model
