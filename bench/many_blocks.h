// The model of the rows that are about lanes: many small blocks, and little before and after them,
// so that a step does not consist of its ends.
#pragma once

#include "model/hf_config.h"

namespace strata::bench {

inline model::LlamaConfig many_blocks() {
  model::LlamaConfig config;
  config.hidden_size = 384;
  config.intermediate_size = 1024;
  config.num_hidden_layers = 20;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 6;
  config.head_dim = 64;
  config.vocab_size = 1024;
  return config;
}

}  // namespace strata::bench
