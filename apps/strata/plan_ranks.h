// What 'strata plan' says of many ranks: memory, communication, scaling, advice, and the
// literature's accounting beside our own (docs/plan.md, docs/ranks.md).
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "model/llama.h"
#include "pipeline/cluster.h"

namespace strata::app {

struct RanksReport {
  pipeline::ClusterRequest request;
  int ranks_per_node = 1;
  pipeline::RankForecast forecast;                    // of the plan
  std::optional<pipeline::RankForecast> alone;        // the same on one rank
  std::vector<pipeline::RankForecast> scaling;        // may be empty
  std::optional<pipeline::ClusterFigures> figures{};  // for the advice
  pipeline::ClusterAdvice advice{};
};

void print_ranks(const RanksReport& report, const pipeline::Foretold& foretold,
                 const model::Llama& llama);
/// Keys of the plan's JSON to add: "ranks", and where they were asked for "scaling" and
/// "cluster_advice".
void add_ranks(nlohmann::ordered_json& json, const RanksReport& report,
               const pipeline::Foretold& foretold, const model::Llama& llama);

struct ClassicRequest {
  std::string model_name;
  const model::Llama* llama = nullptr;
  const gpu::Operators* operators = nullptr;
  pipeline::StepShape shape{};  // of one rank
  int ranks = 1;
  int shard_group = 0;  // 0: without hybrid_shard
  DType reduce_dtype = DType::kF32;
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;
};

/// Nothing is searched: everything rests on the device.
void print_classic(const ClassicRequest& request, bool as_json);

}  // namespace strata::app
