#include "pipeline/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "pipeline/plan_choice.h"
#include "pipeline/plan_estimate.h"

namespace strata::pipeline {
namespace {

/// What one search may cost: tasks of plans built, of which a million take some seconds. A number
/// and not a time, so that the same request has the same answer everywhere.
constexpr int64_t kSearchTasks = 400'000;
/// Of the choices around the best one, so many of those that look best are simulated.
constexpr size_t kSimulatedNeighbours = 6;
/// Writing wears drives out: a step may be so many seconds longer for each that they write less.
constexpr double kWear = 1e-3;
constexpr double kWorthwhile = 1e-5;  // of the step, for a change of the choice
constexpr double kMuchBetter = 1e-3;
/// So many choices are made better by simulation.
constexpr int kStarts = 3;

/// Of bytes over the budget, by tier.
using Weights = std::array<double, kTiers.size()>;
constexpr Weights kScarcity{16, 4, 1};

/// Bytes over the budget, those of scarcer tiers weighing more; 0 where it fits.
double overflow(const std::array<int64_t, kTiers.size()>& bytes, const Budget& budget,
                const Weights& weights) {
  double sum = 0;
  for (const Tier tier : kTiers) {
    const auto t = static_cast<size_t>(tier);
    const double over = static_cast<double>(bytes[t]) - static_cast<double>(budget.bytes(tier));
    if (over > 0) sum += over * weights[t];
  }
  return sum;
}

bool fits(const Plan& plan, const Budget& budget) {
  return std::all_of(kTiers.begin(), kTiers.end(),
                     [&](Tier tier) { return plan.bytes(tier) <= budget.bytes(tier); });
}

double writing_s(const Foretold& foretold) {
  double seconds = 0;
  for (size_t i = 0; i < foretold.seconds.size(); ++i) {
    if (foretold.plan.train[i].lane == Lane::kWrite) seconds += foretold.seconds[i];
  }
  return seconds;
}

/// How good a choice looks: that it fits before that it is fast.
struct Rank {
  double over = 0, seconds = 0;
  friend auto operator<=>(const Rank&, const Rank&) = default;
};

class Search {
 public:
  Search(const UnitModel& model, const gpu::Operators& operators, const MachineProfile& profile,
         const PlanRequest& request, const UnitCosts* measured)
      : model_(model),
        operators_(operators),
        profile_(profile),
        request_(request),
        measured_(measured),
        space_(model, request),
        estimator_(model, operators, profile, request.shape, measured) {}

  /// The best plan found; nothing if none fits.
  std::optional<Foretold> run() {
    const std::vector<Choice> seeds = space_.seeds();
    std::set<std::pair<double, Choice>> starts;
    const auto start = [&](const Choice& choice) {
      if (const std::optional<double> cost = consider(choice)) starts.emplace(*cost, choice);
    };
    for (const Choice& seed : seeds) {
      const Choice rough = descend(seed, kMuchBetter, kScarcity);
      start(rough);
      start(descend(rough, kWorthwhile, kScarcity));
    }
    for (const Choice& seed : seeds) {
      if (rank(seed, kScarcity).over == 0) start(seed);
    }
    int improved = 0;
    for (const auto& [cost, choice] : starts) {
      if (improved++ < kStarts) improve(choice, cost);
    }
    if (best_) best_->simulations = simulations_;
    return std::move(best_);
  }

  /// The choice that looks best of those that lead downhill from `start`.
  Choice descend(const Choice& start, double worthwhile, const Weights& weights) {
    Choice best = start;
    Rank best_rank = rank(best, weights);
    for (int scale = std::max(1, space_.inner() / 2); scale > 0; scale /= 2) {
      for (bool better = true; better;) {
        better = false;
        std::optional<Choice> next;
        Rank next_rank = best_rank;
        space_.neighbours(best, scale, [&](const Choice& choice) {
          const Rank r = rank(choice, weights);
          if (!(r < next_rank)) return;
          next = choice;
          next_rank = r;
        });
        if (!next || (next_rank.over == best_rank.over &&
                      next_rank.seconds > best_rank.seconds * (1 - worthwhile))) {
          continue;
        }
        best = *next;
        best_rank = next_rank;
        better = true;
      }
    }
    return best;
  }

  /// Simulates the choice. Returns its seconds, with what its writing costs, or nothing if it does
  /// not fit.
  std::optional<double> consider(const Choice& choice) {
    const auto known = seen_.find(choice);
    if (known != seen_.end()) return known->second;
    std::optional<double> cost;
    Plan plan = build_plan(model_, operators_, request_.shape, space_.placement(choice));
    tasks_ += static_cast<int64_t>(plan.train.size() + plan.replay.size());
    if (fits(plan, request_.budget)) {
      Foretold foretold = foretell(std::move(plan), model_, profile_, measured_);
      ++simulations_;
      cost = foretold.step_s + kWear * writing_s(foretold);
      if (!best_ || *cost < best_cost_) {
        best_ = std::move(foretold);
        best_cost_ = *cost;
      }
    }
    seen_.emplace(choice, cost);
    return cost;
  }

  /// From a choice to better ones around it, by simulation.
  void improve(Choice here, double cost) {
    for (int scale = std::max(1, space_.inner() / 4); scale > 0; scale /= 2) {
      for (bool better = true; better;) {
        better = false;
        std::set<std::pair<double, Choice>> candidates;
        space_.neighbours(here, scale, [&](const Choice& choice) {
          if (seen_.contains(choice)) return;
          const Rank r = rank(choice, kScarcity);
          if (r.over > 0) return;
          candidates.emplace(r.seconds, choice);
          if (candidates.size() > kSimulatedNeighbours) {
            candidates.erase(std::prev(candidates.end()));
          }
        });
        for (const auto& [estimated, choice] : candidates) {
          if (tasks_ >= kSearchTasks) return;
          const std::optional<double> other = consider(choice);
          if (!other || *other >= cost * (1 - kWorthwhile)) continue;
          here = choice;
          cost = *other;
          better = true;
        }
      }
    }
  }

  /// A plan that is as small as the search can make it by the weights.
  Plan smallest(const Weights& weights) {
    std::optional<Choice> best;
    Rank best_rank;
    for (const Choice& seed : space_.seeds()) {
      const Choice choice = descend(seed, kWorthwhile, weights);
      const Rank r = rank(choice, weights);
      if (best && !(r < best_rank)) continue;
      best = choice;
      best_rank = r;
    }
    return build_plan(model_, operators_, request_.shape, space_.placement(*best));
  }

  Rank rank(const Choice& choice, const Weights& weights) {
    const auto [known, is_new] = estimates_.try_emplace(choice);
    if (is_new) known->second = estimator_.estimate(space_.placement(choice));
    return {.over = overflow(known->second.bytes, request_.budget, weights),
            .seconds = known->second.seconds};
  }

 private:
  const UnitModel& model_;
  const gpu::Operators& operators_;
  const MachineProfile& profile_;
  const PlanRequest& request_;
  const UnitCosts* measured_;
  ChoiceSpace space_;
  Estimator estimator_;
  std::map<Choice, Estimate> estimates_;
  std::map<Choice, std::optional<double>> seen_;
  std::optional<Foretold> best_;
  double best_cost_ = 0;
  int64_t tasks_ = 0;
  int simulations_ = 0;
};

/// A request with one tier's budget changed.
PlanRequest with_bytes(PlanRequest request, Tier tier, size_t bytes) {
  if (tier == Tier::kDevice) request.budget.device_bytes = bytes;
  if (tier == Tier::kHost) request.budget.host_bytes = bytes;
  if (tier == Tier::kNvme) request.budget.nvme_bytes = bytes;
  return request;
}

std::string_view memory_of(Tier tier) {
  return tier == Tier::kDevice ? "device memory" : tier == Tier::kHost ? "host memory" : "NVMe";
}

/// What a budget has to have beside the plan's own.
size_t beside(const PlanRequest& request, Tier tier) {
  return tier == Tier::kHost ? request.host_beside_bytes : 0;
}

/// The budgets that would do, each alone, in words.
std::vector<std::string> what_would_fit(const UnitModel& model, const gpu::Operators& operators,
                                        const MachineProfile& profile, const PlanRequest& request,
                                        const Plan& smallest, const UnitCosts* measured) {
  std::vector<std::string> answers;
  constexpr double kNever = 1e9;
  for (const Tier tier : {Tier::kHost, Tier::kNvme, Tier::kDevice}) {
    const FixedChoices& fixed = request.fixed;
    if (tier == Tier::kNvme &&
        (profile.drives == 0 || fixed.offload.value_or(Tier::kNvme) != Tier::kNvme)) {
      continue;
    }
    const PlanRequest least = with_bytes(request, tier, 1);
    Weights weights{kNever, kNever, kNever};
    weights[static_cast<size_t>(tier)] = 1;
    const Plan plan = Search(model, operators, profile, least, measured).smallest(weights);
    size_t needed = plan.bytes(tier);
    const auto would_do = [&](const Plan& one) {
      return fits(one, with_bytes(request, tier, one.bytes(tier)).budget);
    };
    if (would_do(smallest)) {
      needed = would_do(plan) ? std::min(needed, smallest.bytes(tier)) : smallest.bytes(tier);
    } else if (!would_do(plan)) {
      continue;
    }
    needed += beside(request, tier);
    answers.push_back(
        fmt::format("{} ({} bytes) of {}", format_bytes(needed), needed, memory_of(tier)));
  }
  PlanRequest smaller = request;
  const int64_t sequences = std::max<int64_t>(request.shape.max_sequences, 1);
  const int64_t tokens = request.shape.tokens / sequences;  // of a sequence
  for (int64_t n = sequences / 2; n >= 1; n /= 2) {
    smaller.shape.max_sequences = n;
    smaller.shape.tokens = n * tokens;
    const Plan plan = Search(model, operators, profile, smaller, measured).smallest(kScarcity);
    if (!fits(plan, request.budget)) continue;
    answers.push_back(fmt::format("micro_batch_size {}", n));
    break;
  }
  return answers;
}

[[noreturn]] void refuse(const UnitModel& model, const gpu::Operators& operators,
                         const MachineProfile& profile, const PlanRequest& request,
                         const Plan& smallest, const UnitCosts* measured) {
  std::string missing;
  for (const Tier tier : kTiers) {
    const size_t needed = smallest.bytes(tier);
    const size_t allowed = request.budget.bytes(tier);
    if (needed <= allowed) continue;
    const size_t more = beside(request, tier);
    missing +=
        fmt::format("{}{} ({} bytes) of {} where {} ({} bytes) are allowed",
                    missing.empty() ? "" : " and ", format_bytes(needed + more), needed + more,
                    memory_of(tier), format_bytes(allowed + more), allowed + more);
  }
  const std::vector<std::string> answers =
      what_would_fit(model, operators, profile, request, smallest, measured);
  std::string advice;
  for (size_t i = 0; i < answers.size(); ++i) {
    advice += (i == 0 ? "" : i + 1 == answers.size() ? ", or " : ", ") + answers[i];
  }
  throw Error(ErrorKind::kDoesNotFit,
              fmt::format("the model does not fit: the smallest plan needs {}; {}", missing,
                          advice.empty() ? "allow more of each, or lower sequence_len"
                                         : "what would fit: " + advice));
}

}  // namespace

Foretold foretell(Plan plan, const UnitModel& model, const MachineProfile& profile,
                  const UnitCosts* measured) {
  Foretold foretold;
  foretold.seconds = task_seconds(plan, plan.train, model, profile, measured);
  foretold.timeline = simulate(plan.train, foretold.seconds, profile.sharing());
  if (!plan.replay.empty()) {
    foretold.replay_s = predict(plan, plan.replay, model, profile, measured).seconds;
  }
  foretold.step_s = foretold.timeline.seconds + kAssumedClippedSteps * foretold.replay_s;
  foretold.plan = std::move(plan);
  return foretold;
}

Foretold choose_plan(const UnitModel& model, const gpu::Operators& operators,
                     const MachineProfile& profile, const PlanRequest& request,
                     const UnitCosts* measured) {
  if (request.budget.nvme_bytes > 0 && profile.drives == 0) {
    throw usage_error(
        fmt::format("machine profile '{}' has no drives, and the plan may use NVMe; give a profile "
                    "with drives, or a plan without",
                    profile.name));
  }
  Search search(model, operators, profile, request, measured);
  if (std::optional<Foretold> found = search.run()) return std::move(*found);
  refuse(model, operators, profile, request, search.smallest(kScarcity), measured);
}

std::vector<Advice> advise(const Foretold& now, const UnitModel& model,
                           const gpu::Operators& operators, const MachineProfile& profile,
                           const PlanRequest& request, const UnitCosts* measured) {
  std::vector<Advice> all;
  const auto ask = [&](std::string change, const PlanRequest& changed,
                       const MachineProfile& machine) {
    Search search(model, operators, machine, changed, measured);
    const std::optional<Foretold> then = search.run();
    if (!then) return;
    const double speed = tokens_per_s(*then);
    all.push_back(
        {.change = std::move(change), .tokens_per_s = speed, .gain = speed - tokens_per_s(now)});
  };
  const Budget& budget = request.budget;
  const auto twice = [&](Tier tier) {
    ask(fmt::format("{} instead of {} of {}", format_bytes(2 * budget.bytes(tier)),
                    format_bytes(budget.bytes(tier)), memory_of(tier)),
        with_bytes(request, tier, 2 * budget.bytes(tier)), profile);
  };
  twice(Tier::kHost);
  if (budget.nvme_bytes > 0) {
    MachineProfile more = profile;
    const double ratio = (profile.drives + 1.0) / profile.drives;
    more.drives += 1;
    more.read_bytes_per_s *= ratio;
    more.write_bytes_per_s *= ratio;
    ask(fmt::format("{} instead of {} drives", more.drives, profile.drives),
        with_bytes(request, Tier::kNvme,
                   static_cast<size_t>(static_cast<double>(budget.nvme_bytes) * ratio)),
        more);
  }
  PlanRequest tokens = request;
  tokens.shape.micro_batches *= 2;
  ask(fmt::format("{} instead of {} tokens a step (gradient_accumulation_steps {})",
                  tokens.shape.micro_batches * tokens.shape.tokens,
                  request.shape.micro_batches * request.shape.tokens, tokens.shape.micro_batches),
      tokens, profile);
  twice(Tier::kDevice);
  return all;
}

}  // namespace strata::pipeline
