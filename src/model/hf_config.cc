#include "model/hf_config.h"

#include <fmt/format.h>

#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"

namespace strata::model {
namespace {

using Json = nlohmann::json;

// Far above any model, and low enough that the parameter count of the largest stays under 2^58.
constexpr int64_t kMaxWidth = int64_t{1} << 20;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxLayers = 10000;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;
constexpr int64_t kMaxPositions = int64_t{1} << 24;

// A value as messages show it.
std::string shown(const Json& value) {
  constexpr size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

// The fields of one object of the file; null counts as absent, as it does in Python's defaults.
class Fields {
 public:
  // `prefix` comes before field names in messages, for objects within the file.
  Fields(const Json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}

  [[nodiscard]] const Json* find(const char* name) const {
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  // "'config.json': hidden_size is 12, <what>"
  [[nodiscard]] Error fault(const char* name, const std::string& what) const {
    const Json* value = find(name);
    return usage_error(fmt::format("'{}': {}{} is {}{}", source_, prefix_, name,
                                   value == nullptr ? "missing" : shown(*value), what));
  }

  [[nodiscard]] int64_t whole_number(const char* name, int64_t least, int64_t most) const {
    const Json* value = find(name);
    if (value == nullptr) throw fault(name, ", and a Llama model needs it");
    const bool small = value->is_number_integer() &&
                       (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
    if (!small || value->get<int64_t>() < least || value->get<int64_t>() > most) {
      throw fault(name, fmt::format(", and must be a whole number from {} to {}", least, most));
    }
    return value->get<int64_t>();
  }
  [[nodiscard]] int64_t whole_number(const char* name, int64_t least, int64_t most,
                                     int64_t otherwise) const {
    return find(name) == nullptr ? otherwise : whole_number(name, least, most);
  }

  [[nodiscard]] double positive(const char* name) const {
    const Json* value = find(name);
    if (value == nullptr) throw fault(name, ", and is needed here");
    const double number = value->is_number() ? value->get<double>() : 0;
    if (!std::isfinite(number) || number <= 0) throw fault(name, ", and must be a positive number");
    return number;
  }
  [[nodiscard]] double positive(const char* name, double otherwise) const {
    return find(name) == nullptr ? otherwise : positive(name);
  }

  [[nodiscard]] bool boolean(const char* name, bool otherwise) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) throw fault(name, ", and must be true or false");
    return value->get<bool>();
  }

  [[nodiscard]] std::string string(const char* name, const std::string& otherwise) const {
    const Json* value = find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) throw fault(name, ", and must be a string");
    return value->get<std::string>();
  }

  [[nodiscard]] const Json* object(const char* name) const {
    const Json* value = find(name);
    if (value != nullptr && !value->is_object()) throw fault(name, ", and must be an object");
    return value;
  }

  void require_multiple(const char* name, int64_t value, int64_t of) const {
    if (value % of != 0) {
      throw usage_error(fmt::format("'{}': {}{} is {}, and must be a multiple of {}", source_,
                                    prefix_, name, value, of));
    }
  }

  // Refuses a value other than `neutral`, which is what the implementation does.
  void require_absent_or(const char* name, const Json& neutral) const {
    const Json* value = find(name);
    if (value != nullptr && *value != neutral) {
      throw fault(name, fmt::format(", and only {} is supported", shown(neutral)));
    }
  }

  [[nodiscard]] const std::string& source() const noexcept { return source_; }

 private:
  const Json& object_;
  std::string source_;
  std::string prefix_;
};

void check_architecture(const Fields& fields) {
  constexpr auto* kSupported = ", and only LlamaForCausalLM (model_type llama) is supported";
  const Json* architectures = fields.find("architectures");
  if (architectures != nullptr && *architectures != Json::array({"LlamaForCausalLM"})) {
    throw fields.fault("architectures", kSupported);
  }
  const Json* type = fields.find("model_type");
  if (type == nullptr && architectures != nullptr) return;
  if (type == nullptr || *type != "llama") throw fields.fault("model_type", kSupported);
}

void read_rotary(const Fields& fields, LlamaConfig& config) {
  // Up to version 4, transformers writes rope_theta and rope_scaling; from 5 on rope_parameters,
  // with the base frequency inside.
  const bool newer = fields.object("rope_parameters") != nullptr;
  const char* name = newer ? "rope_parameters" : "rope_scaling";
  if (newer && fields.find("rope_scaling") != nullptr) {
    throw fields.fault("rope_scaling", ", and rope_parameters is there too; leave one of them");
  }
  config.rope_theta = fields.positive("rope_theta", config.rope_theta);
  const Json* object = fields.object(name);
  if (object == nullptr) return;

  const Fields rotary(*object, fields.source(), fmt::format("{}.", name));
  config.rope_theta = rotary.positive("rope_theta", config.rope_theta);
  rotary.require_absent_or("partial_rotary_factor", 1.0);
  const char* key = rotary.find("rope_type") == nullptr ? "type" : "rope_type";
  const std::string type = rotary.string(key, newer ? "default" : "");
  if (type == "default") return;
  if (type != "llama3") throw rotary.fault(key, ", and only llama3 and default are supported");

  Llama3RopeScaling scaling{.factor = rotary.positive("factor"),
                            .low_freq_factor = rotary.positive("low_freq_factor"),
                            .high_freq_factor = rotary.positive("high_freq_factor"),
                            .original_max_position_embeddings = rotary.whole_number(
                                "original_max_position_embeddings", 1, kMaxPositions)};
  if (scaling.factor < 1) throw rotary.fault("factor", ", and must be at least 1");
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    throw rotary.fault("high_freq_factor", fmt::format(", and must be above low_freq_factor, {}",
                                                       scaling.low_freq_factor));
  }
  config.rope_scaling = scaling;
}

void read_token_ids(const Fields& fields, LlamaConfig& config) {
  const int64_t last = config.vocab_size - 1;
  if (fields.find("bos_token_id") != nullptr) {
    config.bos_token_id = fields.whole_number("bos_token_id", 0, last);
  }
  const Json* eos = fields.find("eos_token_id");
  if (eos == nullptr) return;
  if (!eos->is_array()) {
    config.eos_token_ids = {fields.whole_number("eos_token_id", 0, last)};
    return;
  }
  for (const Json& id : *eos) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(last)) {
      throw fields.fault("eos_token_id",
                         fmt::format(", and must hold whole numbers from 0 to {}", last));
    }
    config.eos_token_ids.push_back(id.get<int64_t>());
  }
}

}  // namespace

LlamaConfig parse_llama_config(std::string_view text, const std::string& source) {
  Json json;
  try {
    json = Json::parse(text);
  } catch (const Json::exception&) {
    throw usage_error(fmt::format("'{}' is not JSON", source));
  }
  // The parser takes a NUL for the end of its input and would ignore what follows.
  if (!json.is_object() || text.find('\0') != std::string_view::npos) {
    throw usage_error(fmt::format("'{}' is not a JSON object", source));
  }
  const Fields fields(json, source);
  check_architecture(fields);

  LlamaConfig config;
  config.hidden_size = fields.whole_number("hidden_size", 1, kMaxWidth);
  config.intermediate_size = fields.whole_number("intermediate_size", 1, kMaxIntermediate);
  config.num_hidden_layers = fields.whole_number("num_hidden_layers", 1, kMaxLayers);
  config.num_attention_heads = fields.whole_number("num_attention_heads", 1, kMaxWidth);
  config.num_key_value_heads =
      fields.whole_number("num_key_value_heads", 1, kMaxWidth, config.num_attention_heads);
  config.vocab_size = fields.whole_number("vocab_size", 1, kMaxVocabulary);
  config.max_position_embeddings = fields.whole_number("max_position_embeddings", 1, kMaxPositions,
                                                       config.max_position_embeddings);
  config.rms_norm_eps = fields.positive("rms_norm_eps", config.rms_norm_eps);
  config.tie_word_embeddings = fields.boolean("tie_word_embeddings", config.tie_word_embeddings);
  config.initializer_range = fields.positive("initializer_range", config.initializer_range);
  config.torch_dtype = fields.string("torch_dtype", fields.string("dtype", ""));

  if (fields.find("head_dim") != nullptr) {
    config.head_dim = fields.whole_number("head_dim", 1, kMaxHeadDim);
  } else {
    if (config.hidden_size % config.num_attention_heads != 0) {
      throw fields.fault("hidden_size", fmt::format(", which num_attention_heads, {}, does not "
                                                    "divide, and there is no head_dim",
                                                    config.num_attention_heads));
    }
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    throw fields.fault("num_attention_heads",
                       fmt::format(", which num_key_value_heads, {}, does not divide",
                                   config.num_key_value_heads));
  }
  fields.require_multiple("hidden_size", config.hidden_size, 8);
  fields.require_multiple("intermediate_size", config.intermediate_size, 8);
  fields.require_multiple("head_dim", config.head_dim, 8);
  if (config.head_dim > kMaxHeadDim || config.num_attention_heads * config.head_dim > kMaxWidth) {
    throw fields.fault(
        "num_attention_heads",
        fmt::format(" with heads of {}; heads may be at most {} wide, and {} together",
                    config.head_dim, kMaxHeadDim, kMaxWidth));
  }

  read_rotary(fields, config);
  read_token_ids(fields, config);
  fields.require_absent_or("hidden_act", "silu");
  fields.require_absent_or("attention_bias", false);
  fields.require_absent_or("mlp_bias", false);
  fields.require_absent_or("attention_dropout", 0.0);
  config.text = text;
  return config;
}

LlamaConfig read_llama_config(const std::filesystem::path& path) {
  const std::filesystem::path file =
      std::filesystem::is_directory(path) ? path / "config.json" : path;
  if (!std::filesystem::exists(file)) {
    throw usage_error(
        fmt::format("'{}' does not exist; a model is a directory with a config.json, or that file",
                    file.string()));
  }
  return parse_llama_config(read_text_file(file), file.string());
}

int64_t TensorSpec::elements() const noexcept {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

std::vector<TensorSpec> llama_tensors(const LlamaConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t query = config.num_attention_heads * config.head_dim;
  const int64_t key = config.num_key_value_heads * config.head_dim;
  const int64_t intermediate = config.intermediate_size;
  const TensorSpec block[] = {
      {"input_layernorm.weight", {hidden}},
      {"self_attn.q_proj.weight", {query, hidden}},
      {"self_attn.k_proj.weight", {key, hidden}},
      {"self_attn.v_proj.weight", {key, hidden}},
      {"self_attn.o_proj.weight", {hidden, query}},
      {"post_attention_layernorm.weight", {hidden}},
      {"mlp.gate_proj.weight", {intermediate, hidden}},
      {"mlp.up_proj.weight", {intermediate, hidden}},
      {"mlp.down_proj.weight", {hidden, intermediate}},
  };

  std::vector<TensorSpec> tensors;
  tensors.reserve(static_cast<size_t>(config.num_hidden_layers) * std::size(block) + 3);
  tensors.push_back({"model.embed_tokens.weight", {config.vocab_size, hidden}});
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    for (const TensorSpec& tensor : block) {
      tensors.push_back({fmt::format("model.layers.{}.{}", layer, tensor.name), tensor.shape});
    }
  }
  tensors.push_back({"model.norm.weight", {hidden}});
  if (!config.tie_word_embeddings) {
    tensors.push_back({"lm_head.weight", {config.vocab_size, hidden}});
  }
  return tensors;
}

int64_t block_parameter_count(const LlamaConfig& config) noexcept {
  const int64_t attention = 2 * (config.num_attention_heads + config.num_key_value_heads) *
                            config.head_dim * config.hidden_size;
  const int64_t mlp = 3 * config.intermediate_size * config.hidden_size;
  return attention + mlp + 2 * config.hidden_size;
}

int64_t parameter_count(const LlamaConfig& config) noexcept {
  const int64_t embedding = config.vocab_size * config.hidden_size;
  return embedding * (config.tie_word_embeddings ? 1 : 2) + config.hidden_size +
         config.num_hidden_layers * block_parameter_count(config);
}

}  // namespace strata::model
