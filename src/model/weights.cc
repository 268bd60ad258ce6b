#include "model/weights.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <vector>

#include "base/bf16.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"

namespace strata::model {
namespace {

using pipeline::StateAccess;
using pipeline::StateKind;

/// Elements moved at a time.
constexpr int64_t kPiece = int64_t{1} << 18;

template <class F>
void for_each_piece(int64_t first, int64_t end, F&& visit) {
  for (int64_t begin = first; begin < end; begin += kPiece) {
    visit(begin, std::min(kPiece, end - begin));
  }
}

/// Of a tensor, the elements in the rank's shard.
struct Held {
  int64_t first = 0, end = 0;
};
Held held_of(const TensorPlace& place, const StateAccess& state) {
  const pipeline::ElementRange shard = state.shard(place.unit);
  const int64_t first = std::max<int64_t>(shard.first - place.first, 0);
  const int64_t end = std::min(shard.first + shard.count - place.first, place.tensor.elements());
  return {first, std::max(first, end)};
}

/// Writes masters to the unit's weight and residual, whichever the placement keeps.
class MasterWriter {
 public:
  MasterWriter(const Llama& llama, StateAccess& state) : llama_(llama), state_(state) {}

  /// `first` is the unit's parameter that the masters begin with; all of them are the rank's.
  void write(int unit, int64_t first, std::span<const float> masters) {
    if (llama_.dtype() == DType::kF32) {
      put(unit, StateKind::kWeight, first, masters);
      return;
    }
    const bool split = state_.state_size_bytes(unit, StateKind::kResidual) > 0;
    weights_.resize(masters.size());
    residuals_.resize(split ? masters.size() : 0);
    for (size_t i = 0; i < masters.size(); ++i) {
      const SplitMaster master = split_master(masters[i]);
      weights_[i] = master.weight;
      if (split) residuals_[i] = master.residual;
    }
    put(unit, StateKind::kWeight, first, std::span<const Bf16>(weights_));
    if (split) put(unit, StateKind::kResidual, first, std::span<const uint16_t>(residuals_));
  }

 private:
  template <class T>
  void put(int unit, StateKind kind, int64_t first, std::span<const T> values) {
    const int64_t within = first - state_.shard(unit).first;
    state_.write_state(unit, kind, static_cast<size_t>(within) * sizeof(T), std::as_bytes(values));
  }

  const Llama& llama_;
  StateAccess& state_;
  std::vector<Bf16> weights_;
  std::vector<uint16_t> residuals_;
};

void clear_moments(const Llama& llama, StateAccess& state) {
  const std::vector<std::byte> zeros(static_cast<size_t>(kPiece));
  for (int unit = 0; unit < static_cast<int>(llama.units().size()); ++unit) {
    for (const StateKind kind : {StateKind::kMoment1, StateKind::kMoment2}) {
      for_each_piece(0, static_cast<int64_t>(state.state_size_bytes(unit, kind)),
                     [&](int64_t begin, int64_t count) {
                       state.write_state(unit, kind, static_cast<size_t>(begin),
                                         std::span(zeros).first(static_cast<size_t>(count)));
                     });
    }
  }
}

}  // namespace

void check_weights(const CheckpointReader& reader, const Llama& llama) {
  for (const TensorPlace& place : llama.tensors()) {
    const TensorInfo& found = reader.tensor(place.tensor.name);
    if (found.shape != place.tensor.shape) {
      throw usage_error(fmt::format(
          "'{}': tensor '{}' has shape [{}], and the config asks for [{}]", reader.path().string(),
          place.tensor.name, fmt::join(found.shape, ", "), fmt::join(place.tensor.shape, ", ")));
    }
    if (!is_weight_type(found.type)) {
      throw usage_error(
          fmt::format("'{}': tensor '{}' is of type {}, and weights are read from "
                      "BF16, F16, F32 or F64",
                      reader.path().string(), place.tensor.name, name_of(found.type)));
    }
  }
}

void load_weights(const CheckpointReader& reader, const Llama& llama, StateAccess& state) {
  check_weights(reader, llama);
  MasterWriter writer(llama, state);
  std::vector<float> values;
  for (const TensorPlace& place : llama.tensors()) {
    const Held held = held_of(place, state);
    for_each_piece(held.first, held.end, [&](int64_t begin, int64_t count) {
      values.resize(static_cast<size_t>(count));
      reader.read_floats(place.tensor.name, begin, values);
      writer.write(place.unit, place.first + begin, values);
    });
  }
  clear_moments(llama, state);
}

void initialize_weights(uint64_t seed, const Llama& llama, StateAccess& state) {
  MasterWriter writer(llama, state);
  std::vector<float> values;
  constexpr int64_t kBlock = 4096;
  tbb::task_arena arena;
  const double deviation = llama.config().initializer_range;
  for (size_t t = 0; t < llama.tensors().size(); ++t) {
    const TensorPlace& place = llama.tensors()[t];
    const bool is_norm = place.tensor.shape.size() == 1;
    const Held held = held_of(place, state);
    for_each_piece(held.first, held.end, [&](int64_t begin, int64_t count) {
      values.assign(static_cast<size_t>(count), 1.0F);
      if (!is_norm) {
        for_each_index(arena, (count - 1) / kBlock + 1, [&](int64_t block) {
          const int64_t first = block * kBlock;
          CounterRandom random(seed, t, static_cast<uint64_t>(begin + first));
          for (int64_t i = first; i < std::min(first + kBlock, count); ++i) {
            values[static_cast<size_t>(i)] = static_cast<float>(deviation * random.next_normal());
          }
        });
      }
      writer.write(place.unit, place.first + begin, values);
    });
  }
  clear_moments(llama, state);
}

}  // namespace strata::model
