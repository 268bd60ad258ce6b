// What a Hugging Face config.json says of a model, checked, and what follows from it: the names,
// shapes and number of its parameters. One architecture so far: LlamaForCausalLM.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace strata::model {

/// `rope_type` "llama3": stretched rotary frequencies, as model/rope.h computes them.
struct Llama3RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  int64_t original_max_position_embeddings = 0;
};

/// Field names are those of config.json, defaults those of Hugging Face. A value that came from
/// parse_llama_config has been checked: every size is positive and bounded so that products of
/// sizes fit in 63 bits; hidden_size, intermediate_size and head_dim are multiples of 8; key-value
/// heads divide heads. num_attention_heads * head_dim may differ from hidden_size.
struct LlamaConfig {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 2048;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000;
  bool tie_word_embeddings = false;
  std::optional<Llama3RopeScaling> rope_scaling;
  double initializer_range = 0.02;
  std::string torch_dtype;  // as written ("bfloat16"), empty where the file does not say
  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;  // none, one or several

  /// The file as it was read, byte for byte: an export writes this back.
  std::string text;
};

/// Reads the text of a config.json; `source` names it in messages. Throws a usage error of one
/// sentence that names source and field: for text that is not a JSON object, a missing field, one
/// of the wrong type or out of range, and for everything that would make another model than the one
/// implemented (architecture, activation, biases, dropout, kinds of rotary scaling).
[[nodiscard]] LlamaConfig parse_llama_config(std::string_view text, const std::string& source);

/// Reads a config.json, or the one in a directory.
[[nodiscard]] LlamaConfig read_llama_config(const std::filesystem::path& path);

/// A parameter as checkpoints name it; matrices are [outputs, inputs], row-major.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  [[nodiscard]] int64_t elements() const noexcept;
  friend bool operator==(const TensorSpec&, const TensorSpec&) = default;
};

/// Embedding, blocks, final norm, head (absent where it is tied), in the order of the computation;
/// in a block: input norm, q, k, v, o, norm, gate, up, down.
[[nodiscard]] std::vector<TensorSpec> llama_tensors(const LlamaConfig& config);

/// Of one transformer block.
[[nodiscard]] int64_t block_parameter_count(const LlamaConfig& config) noexcept;
/// Of the whole model; a tied head counts once.
[[nodiscard]] int64_t parameter_count(const LlamaConfig& config) noexcept;

}  // namespace strata::model
