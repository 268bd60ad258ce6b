#include "model/known_models.h"

#include <array>

namespace strata::model {
namespace {

constexpr std::string_view kQwen2 =
    "biases of its query, key and value products are left out (less than 0.01% of the parameters)";
constexpr std::string_view kQwen3 =
    "norms of its queries and keys are left out (two of head_dim a layer, and their time)";
constexpr std::string_view kOpt =
    "OPT has learned positions, biases and a feed-forward half of two matrices, for which three of "
    "2/3 of the width stand in: as many parameters and operations, other activations";

constexpr std::array kModels{
    KnownModel{"llama2-7b", 4096, 11008, 32, 32, 32, 128, 32000, 4096, false, ""},
    KnownModel{"llama2-13b", 5120, 13824, 40, 40, 40, 128, 32000, 4096, false, ""},
    KnownModel{"llama2-70b", 8192, 28672, 80, 64, 8, 128, 32000, 4096, false, ""},
    KnownModel{"llama3-8b", 4096, 14336, 32, 32, 8, 128, 128256, 8192, false, ""},
    KnownModel{"llama3-70b", 8192, 28672, 80, 64, 8, 128, 128256, 8192, false, ""},
    KnownModel{"opt-175b", 12288, 32768, 96, 96, 96, 128, 50272, 2048, true, kOpt},
    KnownModel{"qwen2.5-1.5b", 1536, 8960, 28, 12, 2, 128, 151936, 32768, true, kQwen2},
    KnownModel{"qwen2.5-7b", 3584, 18944, 28, 28, 4, 128, 152064, 32768, false, kQwen2},
    KnownModel{"qwen2.5-14b", 5120, 13824, 48, 40, 8, 128, 152064, 32768, false, kQwen2},
    KnownModel{"qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151936, 40960, false, kQwen3},
    KnownModel{"qwen3-14b", 5120, 17408, 40, 40, 8, 128, 151936, 40960, false, kQwen3},
    KnownModel{"qwen3-32b", 5120, 25600, 64, 64, 8, 128, 151936, 40960, false, kQwen3},
    KnownModel{"tinyllama-1.1b", 2048, 5632, 22, 32, 4, 64, 32000, 2048, false, ""},
};

}  // namespace

LlamaConfig KnownModel::config() const {
  LlamaConfig config;
  config.hidden_size = hidden_size;
  config.intermediate_size = intermediate_size;
  config.num_hidden_layers = layers;
  config.num_attention_heads = heads;
  config.num_key_value_heads = key_value_heads;
  config.head_dim = head_dim;
  config.vocab_size = vocab_size;
  config.max_position_embeddings = positions;
  config.tie_word_embeddings = tied;
  return config;
}

std::span<const KnownModel> known_models() noexcept { return kModels; }

const KnownModel* find_known_model(std::string_view name) noexcept {
  for (const KnownModel& model : kModels) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

}  // namespace strata::model
