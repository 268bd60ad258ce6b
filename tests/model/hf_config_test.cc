#include "model/hf_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/file.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::model {
namespace {

using Json = nlohmann::ordered_json;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

// As Hugging Face publishes it for Llama 3.1 8B.
constexpr const char* kLlama31 = R"({
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": false,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": false,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": false,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3",
  "use_cache": true,
  "vocab_size": 128256
})";

Json small() {
  return Json::parse(R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
      "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100})");
}

LlamaConfig parse(const Json& json) { return parse_llama_config(json.dump(), "c.json"); }

// The message of the usage error that `text` must be refused with.
std::string refusal(const std::string& text) {
  try {
    static_cast<void>(parse_llama_config(text, "c.json"));
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kUsage);
    CHECK_THAT(error.what(), StartsWith("'c.json'"));
    return error.what();
  }
  return "accepted";
}

std::string refusal_with(const char* field, const Json& value) {
  Json json = small();
  json[field] = value;
  return refusal(json.dump());
}

int64_t count(const LlamaConfig& config) {
  const std::vector<TensorSpec> tensors = llama_tensors(config);
  return std::accumulate(
      tensors.begin(), tensors.end(), int64_t{0},
      [](int64_t sum, const TensorSpec& tensor) { return sum + tensor.elements(); });
}

TEST_CASE("a published config.json is read") {
  const LlamaConfig config = parse_llama_config(kLlama31, "c.json");
  CHECK(config.hidden_size == 4096);
  CHECK(config.intermediate_size == 14336);
  CHECK(config.num_hidden_layers == 32);
  CHECK(config.num_attention_heads == 32);
  CHECK(config.num_key_value_heads == 8);
  CHECK(config.head_dim == 128);
  CHECK(config.vocab_size == 128256);
  CHECK(config.max_position_embeddings == 131072);
  CHECK(config.rms_norm_eps == 1e-5);
  CHECK(config.rope_theta == 500000);
  CHECK_FALSE(config.tie_word_embeddings);
  REQUIRE(config.rope_scaling);
  CHECK(config.rope_scaling->factor == 8);
  CHECK(config.rope_scaling->low_freq_factor == 1);
  CHECK(config.rope_scaling->high_freq_factor == 4);
  CHECK(config.rope_scaling->original_max_position_embeddings == 8192);
  CHECK(config.initializer_range == 0.02);
  CHECK(config.torch_dtype == "bfloat16");
  CHECK(config.bos_token_id == 128000);
  CHECK(config.eos_token_ids == std::vector<int64_t>{128001, 128008, 128009});
  CHECK(config.text == kLlama31);
}

TEST_CASE("fields that are absent or null take Hugging Face's defaults") {
  Json json = small();
  SECTION("absent") {}
  SECTION("null") {
    for (const char* name : {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
                             "rope_scaling", "rope_parameters", "tie_word_embeddings",
                             "bos_token_id", "eos_token_id", "hidden_act", "architectures"}) {
      json[name] = nullptr;
    }
  }
  const LlamaConfig config = parse(json);
  CHECK(config.num_key_value_heads == 4);
  CHECK(config.head_dim == 16);
  CHECK(config.max_position_embeddings == 2048);
  CHECK(config.rms_norm_eps == 1e-6);
  CHECK(config.rope_theta == 10000);
  CHECK(config.initializer_range == 0.02);
  CHECK_FALSE(config.tie_word_embeddings);
  CHECK_FALSE(config.rope_scaling);
  CHECK(config.torch_dtype.empty());
  CHECK_FALSE(config.bos_token_id);
  CHECK(config.eos_token_ids.empty());
}

TEST_CASE("rope_parameters, as newer versions write it, is read too") {
  Json json = small();
  json["rope_parameters"] = {{"rope_theta", 250000.0}, {"rope_type", "default"}};
  json["dtype"] = "float32";
  LlamaConfig config = parse(json);
  CHECK(config.rope_theta == 250000);
  CHECK_FALSE(config.rope_scaling);
  CHECK(config.torch_dtype == "float32");

  json["rope_parameters"] = {{"rope_theta", 500000},
                             {"rope_type", "llama3"},
                             {"factor", 32},
                             {"low_freq_factor", 1.5},
                             {"high_freq_factor", 3.25},
                             {"original_max_position_embeddings", 8192}};
  config = parse(json);
  CHECK(config.rope_theta == 500000);
  REQUIRE(config.rope_scaling);
  CHECK(config.rope_scaling->factor == 32);
  CHECK(config.rope_scaling->low_freq_factor == 1.5);
  CHECK(config.rope_scaling->high_freq_factor == 3.25);

  json["rope_scaling"] = {{"type", "default"}};
  CHECK_THAT(refusal(json.dump()), Contains("rope_parameters is there too"));
  json.erase("rope_parameters");
  CHECK_FALSE(parse(json).rope_scaling);
}

TEST_CASE("heads may be wider or narrower than hidden_size over heads") {
  Json json = small();
  json["head_dim"] = 24;
  json["num_attention_heads"] = 5;
  json["num_key_value_heads"] = 1;
  const LlamaConfig config = parse(json);
  CHECK(config.head_dim == 24);
  const std::vector<TensorSpec> tensors = llama_tensors(config);
  CHECK(tensors[2] == TensorSpec{"model.layers.0.self_attn.q_proj.weight", {120, 64}});
  CHECK(tensors[3] == TensorSpec{"model.layers.0.self_attn.k_proj.weight", {24, 64}});
  CHECK(tensors[5] == TensorSpec{"model.layers.0.self_attn.o_proj.weight", {64, 120}});
}

TEST_CASE("a field that the model needs is asked for by name") {
  for (const char* name : {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                           "num_attention_heads", "vocab_size"}) {
    Json json = small();
    json.erase(name);
    CHECK_THAT(refusal(json.dump()), Contains(std::string(name) + " is missing"));
  }
}

TEST_CASE("sizes that are none are refused") {
  for (const char* name :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const Json& value :
         {Json(0), Json(-8), Json(64.0), Json("64"), Json(true), Json::array({64}), Json::object(),
          Json(int64_t{1} << 40), Json(UINT64_MAX), Json(1e300)}) {
      CAPTURE(value.dump());
      CHECK_THAT(refusal_with(name, value), StartsWith("'c.json': " + std::string(name) + " is " +
                                                       value.dump() + ", and must"));
    }
  }
  CHECK_THAT(refusal_with("hidden_size", (1 << 20) + 8), Contains("from 1 to 1048576"));
  CHECK_THAT(refusal_with("num_hidden_layers", 10001), Contains("from 1 to 10000"));
}

TEST_CASE("sizes that do not go together are refused") {
  CHECK_THAT(refusal_with("num_attention_heads", 3), Contains("does not divide"));
  CHECK_THAT(refusal_with("num_key_value_heads", 3), Contains("num_key_value_heads, 3, does not"));
  CHECK_THAT(refusal_with("num_key_value_heads", 8), Contains("num_key_value_heads, 8, does not"));
  CHECK_THAT(refusal_with("hidden_size", 68),
             Contains("hidden_size is 68, and must be a multiple"));
  CHECK_THAT(refusal_with("intermediate_size", 132), Contains("intermediate_size is 132"));
  CHECK_THAT(refusal_with("head_dim", 15), Contains("head_dim is 15, and must be a multiple of 8"));
  CHECK_THAT(refusal_with("head_dim", 20), Contains("head_dim is 20"));
  CHECK_THAT(refusal_with("num_attention_heads", 16), Contains("head_dim is 4"));

  Json json = small();
  json["hidden_size"] = 8192;
  CHECK_THAT(refusal(json.dump()), Contains("heads of 2048"));
  json["head_dim"] = 1024;
  json["num_attention_heads"] = 1025;
  json["num_key_value_heads"] = 1;
  CHECK_THAT(refusal(json.dump()), Contains("1048576 together"));
}

TEST_CASE("numbers, flags and names of the wrong kind are refused") {
  for (const char* name : {"rms_norm_eps", "rope_theta", "initializer_range"}) {
    for (const Json& value : {Json(0), Json(-1e-6), Json("1e-6"), Json(false), Json::array()}) {
      CHECK_THAT(refusal_with(name, value),
                 Contains(std::string(name) + " is " + value.dump() + ", and must be a positive"));
    }
  }
  CHECK_THAT(refusal_with("tie_word_embeddings", 1), Contains("true or false"));
  CHECK_THAT(refusal_with("torch_dtype", 16), Contains("torch_dtype is 16, and must be a string"));
  CHECK_THAT(refusal_with("bos_token_id", 100), Contains("from 0 to 99"));
  CHECK_THAT(refusal_with("bos_token_id", -1), Contains("from 0 to 99"));
  CHECK_THAT(refusal_with("eos_token_id", "2"), Contains("eos_token_id is \"2\""));
  CHECK_THAT(refusal_with("eos_token_id", Json::array({1, 100})), Contains("eos_token_id is [1,"));
  CHECK_THAT(refusal_with("eos_token_id", Json::array({1, -1})), Contains("eos_token_id is [1,"));
}

TEST_CASE("what would be another model is refused") {
  CHECK_THAT(refusal_with("model_type", "qwen3"), Contains("only LlamaForCausalLM"));
  CHECK_THAT(refusal_with("model_type", 3), Contains("only LlamaForCausalLM"));
  CHECK_THAT(refusal_with("architectures", Json::array({"MistralForCausalLM"})),
             Contains("only LlamaForCausalLM"));
  CHECK_THAT(refusal_with("architectures", "LlamaForCausalLM"), Contains("only LlamaForCausalLM"));
  CHECK_THAT(refusal_with("hidden_act", "gelu"), Contains("hidden_act is \"gelu\", and only"));
  CHECK_THAT(refusal_with("attention_bias", true), Contains("attention_bias is true, and only"));
  CHECK_THAT(refusal_with("mlp_bias", true), Contains("mlp_bias is true, and only false"));
  CHECK_THAT(refusal_with("attention_dropout", 0.1), Contains("attention_dropout is 0.1"));
  CHECK(refusal_with("attention_dropout", 0) == "accepted");

  Json json = small();
  json.erase("model_type");
  json["architectures"] = {"LlamaForCausalLM"};
  CHECK(refusal(json.dump()) == "accepted");
}

TEST_CASE("rotary scaling that is not understood is refused") {
  const Json good = {{"rope_type", "llama3"},
                     {"factor", 8.0},
                     {"low_freq_factor", 1.0},
                     {"high_freq_factor", 4.0},
                     {"original_max_position_embeddings", 8192}};
  REQUIRE(refusal_with("rope_scaling", good) == "accepted");
  const auto changed = [&](const char* name, const Json& value) {
    Json scaling = good;
    scaling[name] = value;
    return refusal_with("rope_scaling", scaling);
  };
  for (const auto& [name, value] : good.items()) {
    Json scaling = good;
    scaling.erase(name);
    const std::string field = name == "rope_type" ? "type" : name;
    if (field == "type") {
      CHECK_THAT(refusal_with("rope_scaling", scaling), Contains("only llama3"));
    } else {
      CHECK_THAT(refusal_with("rope_scaling", scaling),
                 Contains("rope_scaling." + field + " is missing"));
    }
  }
  CHECK_THAT(changed("rope_type", "linear"), Contains("\"linear\", and only llama3 and default"));
  CHECK_THAT(changed("rope_type", "yarn"), Contains("rope_scaling.rope_type is \"yarn\""));
  CHECK_THAT(changed("rope_type", 3), Contains("must be a string"));
  CHECK_THAT(changed("factor", 0.5), Contains("rope_scaling.factor is 0.5"));
  CHECK_THAT(changed("factor", "8"), Contains("rope_scaling.factor is \"8\""));
  CHECK_THAT(changed("low_freq_factor", 0), Contains("positive"));
  CHECK_THAT(changed("high_freq_factor", 1.0), Contains("above low_freq_factor"));
  CHECK_THAT(changed("original_max_position_embeddings", 0), Contains("from 1 to"));
  CHECK_THAT(changed("partial_rotary_factor", 0.5), Contains("partial_rotary_factor is 0.5"));
  CHECK_THAT(refusal_with("rope_scaling", "llama3"), Contains("must be an object"));
  CHECK_THAT(refusal_with("rope_scaling", {{"type", "linear"}, {"factor", 2}}),
             Contains("rope_scaling.type is \"linear\""));
}

TEST_CASE("what is no JSON object is refused") {
  for (const std::string text : {"", "{", "[]", "3", "{\"hidden_size\": 1e999}", "null", "\xff"}) {
    CAPTURE(text);
    CHECK_THAT(refusal(text), Contains("is not"));
  }
  CHECK_THAT(refusal(std::string(200000, '[')), Contains("is not JSON"));
  CHECK_THAT(refusal(small().dump() + std::string("\0{", 2)), Contains("is not a JSON object"));
  CHECK(refusal_with("hidden_act", std::string(5000, 'x')).size() < 300);
}

TEST_CASE("a config is found in a directory and by its own path") {
  const TemporaryDirectory directory;
  CHECK_THROWS_WITH(read_llama_config(directory.path()), Contains("config.json' does not exist"));
  write_text_file_atomically(directory.path() / "config.json", kLlama31);
  CHECK(read_llama_config(directory.path()).text == kLlama31);
  CHECK(read_llama_config(directory.path() / "config.json").hidden_size == 4096);
  write_text_file_atomically(directory.path() / "config.json", "{}");
  CHECK_THROWS_WITH(read_llama_config(directory.path()),
                    Contains("config.json': model_type is missing"));
}

TEST_CASE("tensors have Hugging Face's names, shapes and order") {
  Json json = small();
  json["num_key_value_heads"] = 2;
  const std::vector<TensorSpec> tensors = llama_tensors(parse(json));
  REQUIRE(tensors.size() == 2 * 9 + 3);
  CHECK(tensors[0] == TensorSpec{"model.embed_tokens.weight", {100, 64}});
  CHECK(tensors[1] == TensorSpec{"model.layers.0.input_layernorm.weight", {64}});
  CHECK(tensors[2] == TensorSpec{"model.layers.0.self_attn.q_proj.weight", {64, 64}});
  CHECK(tensors[3] == TensorSpec{"model.layers.0.self_attn.k_proj.weight", {32, 64}});
  CHECK(tensors[4] == TensorSpec{"model.layers.0.self_attn.v_proj.weight", {32, 64}});
  CHECK(tensors[5] == TensorSpec{"model.layers.0.self_attn.o_proj.weight", {64, 64}});
  CHECK(tensors[6] == TensorSpec{"model.layers.0.post_attention_layernorm.weight", {64}});
  CHECK(tensors[7] == TensorSpec{"model.layers.0.mlp.gate_proj.weight", {128, 64}});
  CHECK(tensors[8] == TensorSpec{"model.layers.0.mlp.up_proj.weight", {128, 64}});
  CHECK(tensors[9] == TensorSpec{"model.layers.0.mlp.down_proj.weight", {64, 128}});
  CHECK(tensors[10] == TensorSpec{"model.layers.1.input_layernorm.weight", {64}});
  CHECK(tensors[19] == TensorSpec{"model.norm.weight", {64}});
  CHECK(tensors[20] == TensorSpec{"lm_head.weight", {100, 64}});
  CHECK(tensors[0].elements() == 6400);

  json["tie_word_embeddings"] = true;
  const std::vector<TensorSpec> tied = llama_tensors(parse(json));
  CHECK(tied == std::vector<TensorSpec>(tensors.begin(), tensors.end() - 1));
}

TEST_CASE("parameter counts are the published ones") {
  const auto config_of = [](int64_t hidden, int64_t intermediate, int64_t layers, int64_t heads,
                            int64_t kv_heads, int64_t vocabulary, bool tied) {
    Json json = small();
    json["hidden_size"] = hidden;
    json["intermediate_size"] = intermediate;
    json["num_hidden_layers"] = layers;
    json["num_attention_heads"] = heads;
    json["num_key_value_heads"] = kv_heads;
    json["vocab_size"] = vocabulary;
    json["tie_word_embeddings"] = tied;
    const LlamaConfig config = parse(json);
    CHECK(count(config) == parameter_count(config));
    const int64_t ends = vocabulary * hidden * (tied ? 1 : 2) + hidden;
    CHECK(parameter_count(config) == ends + layers * block_parameter_count(config));
    return parameter_count(config);
  };
  CHECK(config_of(4096, 11008, 32, 32, 32, 32000, false) == 6738415616);       // Llama-2-7B
  CHECK(config_of(4096, 14336, 32, 32, 8, 128256, false) == 8030261248);       // Llama-3.1-8B
  CHECK(config_of(8192, 28672, 80, 64, 8, 128256, false) == 70553706496);      // Llama-3.1-70B
  CHECK(config_of(16384, 53248, 126, 128, 8, 128256, false) == 405853388800);  // 405B
  CHECK(config_of(2048, 8192, 16, 32, 8, 128256, true) == 1235814400);         // Llama-3.2-1B
  CHECK(config_of(2048, 5632, 22, 32, 4, 32000, false) == 1100048384);         // TinyLlama-1.1B
  CHECK(config_of(576, 1536, 30, 9, 3, 49152, true) == 134515008);             // SmolLM-135M
  CHECK(config_of(1 << 20, 1 << 22, 10000, 1024, 1024, 1 << 24, false) > 0);
}

}  // namespace
}  // namespace strata::model
