// Puts a Llama's parameters into the state of a rank, piece by piece: no tensor is ever whole in
// memory beside its home. Of each unit the rank's shard is written, and only what lies in it is
// drawn or read, so what the ranks hold together does not depend on how many they are.
#pragma once

#include <cstdint>
#include <filesystem>

#include "model/llama.h"
#include "model/safetensors.h"
#include "pipeline/state_access.h"

namespace strata::model {

/// Fills weights (and residuals) from the checkpoint and clears the optimizer's moments. A usage
/// error names a tensor that is missing, has another shape than the config says, or is no weight.
/// An lm_head.weight beside a tied config is left alone, as are tensors the model does not have.
void load_weights(const CheckpointReader& reader, const Llama& llama, pipeline::StateAccess& state);

/// What load_weights would refuse, found without touching any state.
void check_weights(const CheckpointReader& reader, const Llama& llama);

/// Matrices from a normal distribution of the config's initializer_range, norms one, moments zero.
/// A value depends on seed, tensor and element alone.
void initialize_weights(uint64_t seed, const Llama& llama, pipeline::StateAccess& state);

}  // namespace strata::model
