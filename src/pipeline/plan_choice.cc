#include "pipeline/plan_choice.h"

#include <algorithm>

#include "base/error.h"

namespace strata::pipeline {
namespace {

using C = Coordinate;

/// Whether `index` is one of `count` that lie evenly among `total`.
bool is_one_of(int index, int count, int total) {
  return total > 0 && (index + 1) * count / total > index * count / total;
}

int scaled(int count, int from, int to) { return from == 0 ? 0 : (count * to + from / 2) / from; }

std::vector<int64_t> part_sizes(const UnitModel& model) {
  constexpr int64_t kSmall = cpu_adam::kChunkElements;
  constexpr int64_t kLarge = int64_t{1} << 19;
  const auto units = model.units();
  int64_t unit = 0;
  int64_t largest = 0;
  for (size_t u = 0; u < units.size(); ++u) {
    largest = std::max(largest, units[u].parameter_count);
    if (u > 0 && u + 1 < units.size()) unit = std::max(unit, units[u].parameter_count);
  }
  if (unit == 0) unit = largest;
  std::vector<int64_t> sizes;
  if (largest > unit) sizes.push_back(0);
  for (const int64_t parts : {1, 2, 4, 8, 16}) {
    const int64_t step = unit / parts >= 4 * kLarge ? kLarge : kSmall;
    const int64_t size = ((unit + parts - 1) / parts + step - 1) / step * step;
    if (sizes.empty() || sizes.back() != size) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace

const std::vector<UnitPlacement>& end_placements() {
  static const std::vector<UnitPlacement> kAll = [] {
    std::vector<UnitPlacement> all{UnitPlacement::all_on(Tier::kDevice),
                                   UnitPlacement::all_on(Tier::kHost)};
    for (const Update update : {Update::kDeferred, Update::kSpeculated}) {
      for (const Tier weight : {Tier::kHost, Tier::kNvme}) {
        for (const Tier gradient : {Tier::kHost, Tier::kNvme}) {
          all.push_back(
              {.weight = weight, .gradient = gradient, .optimizer = Tier::kNvme, .update = update});
        }
      }
    }
    return all;
  }();
  return kAll;
}

ChoiceSpace::ChoiceSpace(const UnitModel& model, const PlanRequest& request)
    : request_(request),
      inner_(static_cast<int>(model.units().size()) - 2),
      nvme_(request.budget.nvme_bytes > 0),
      gathers_(request.ranks.shard_ranks > 1 && !request.ranks.keeps_whole_weights()),
      part_elements_(request.fixed.part_elements ? std::vector{*request.fixed.part_elements}
                                                 : part_sizes(model)) {
  const FixedChoices& fixed = request.fixed;
  if (fixed.offload == Tier::kNvme && !nvme_) {
    throw usage_error("the optimizer's state cannot rest on NVMe without any; name drives");
  }
  if (request.durable && (!nvme_ || fixed.offload.value_or(Tier::kNvme) != Tier::kNvme)) {
    throw usage_error(
        "each step can be committed only where all state rests on NVMe; name drives, and no other "
        "place for it");
  }
  const bool nvme_only = request.durable || fixed.offload == Tier::kNvme;
  nvme_allowed_ = nvme_ && fixed.offload.value_or(Tier::kNvme) == Tier::kNvme;
  host_allowed_ = !nvme_only && fixed.offload != Tier::kDevice;
  device_allowed_ = !nvme_only && request.state_on_device && fixed.offload != Tier::kHost;
  if (!nvme_allowed_ && !host_allowed_ && !device_allowed_) {
    throw usage_error("the device cannot keep the optimizer's state in that format of moments");
  }
  const auto range = [&](C c) -> Range& { return ranges_[static_cast<size_t>(c)]; };
  const auto options = [&](C c, std::optional<int> chosen, std::vector<int> all) {
    range(c).values = chosen ? std::vector{*chosen} : std::move(all);
  };
  const auto tier = [](std::optional<Tier> t) {
    return t ? std::optional(static_cast<int>(*t)) : std::nullopt;
  };
  options(C::kSlots, fixed.slots, {1, 2, 3});
  options(C::kHostSlots, fixed.host_slots, {1, 2, 3, 4});
  options(C::kActivationSlots, {}, {1, 2, 4});
  std::vector<int> parts;
  for (size_t i = 0; i < part_elements_.size(); ++i) parts.push_back(static_cast<int>(i));
  options(C::kPart, {}, std::move(parts));
  std::vector<int> tiers{0, 1};
  if (nvme_) tiers.push_back(2);
  options(C::kBoundaries, tier(fixed.boundaries), tiers);
  options(C::kSavedTier, tier(fixed.saved_activations), tiers);
  for (const C end : {C::kFirst, C::kLast}) {
    for (size_t i = 0; i < end_placements().size(); ++i) {
      const UnitPlacement& unit = end_placements()[i];
      const bool allowed =
          unit.optimizer == Tier::kDevice ? device_allowed_
          : unit.optimizer == Tier::kHost
              ? host_allowed_
              : nvme_allowed_ && (!request.durable || (unit.update == Update::kSpeculated &&
                                                       unit.weight == Tier::kNvme));
      if (allowed) range(end).values.push_back(static_cast<int>(i));
    }
  }
  options(C::kOrder, {}, {0, 1, 2, 3});
  const auto count = [&](C c, int least, int most) {
    range(c).least = least;
    range(c).most = most;
  };
  const int n = inner_;
  count(C::kDevice, !host_allowed_ && !nvme_allowed_ ? n : 0, device_allowed_ ? n : 0);
  count(C::kHost, 0, host_allowed_ ? n : 0);
  if (nvme_allowed_) {
    count(C::kSpeculated, request.durable ? n : 0, n);
    count(C::kWeightHost, 0, request.durable ? 0 : n);
    count(C::kGradientHost, 0, n);
  }
  const bool all_resident = request.ranks.shard_ranks > 1 && !gathers_;
  const bool none_brought = !host_allowed_ && !nvme_allowed_ && !gathers_;
  count(C::kResident, 0, all_resident || none_brought ? 0 : n);
  const auto level = [&](SavedActivations wanted) {
    return fixed.saved ? std::pair(*fixed.saved == wanted ? n : 0, *fixed.saved == wanted ? n : 0)
                       : std::pair(0, n);
  };
  const auto all = level(SavedActivations::kAll);
  const auto attention = level(SavedActivations::kAttention);
  count(C::kSavedAll, all.first, all.second);
  count(C::kSavedAttention, attention.first, attention.second);
  // Without NVMe, what is not on the device is in host memory.
  if (!nvme_allowed_ && host_allowed_ && !device_allowed_) count(C::kHost, n, n);
}

Choice ChoiceSpace::normal(Choice choice) const {
  const auto clamp = [&](C c, int most) {
    const Range& range = ranges_[static_cast<size_t>(c)];
    choice[c] = std::clamp(choice[c], std::min(range.least, most), std::min(range.most, most));
  };
  clamp(C::kDevice, inner_);
  clamp(C::kHost, inner_ - choice[C::kDevice]);
  if (!nvme_allowed_) {
    if (host_allowed_) {
      choice[C::kHost] = inner_ - choice[C::kDevice];
    } else {
      choice[C::kDevice] = inner_;
    }
  }
  const int on_nvme = inner_ - choice[C::kDevice] - choice[C::kHost];
  for (const C c : {C::kSpeculated, C::kWeightHost, C::kGradientHost}) clamp(c, on_nvme);
  clamp(C::kResident, brought(choice[C::kDevice]));
  clamp(C::kSavedAll, inner_);
  clamp(C::kSavedAttention, inner_ - choice[C::kSavedAll]);
  if (on_nvme == 0 || choice[C::kHost] + choice[C::kSpeculated] == 0) {
    const bool one_group = on_nvme == 0 || choice[C::kSpeculated] == on_nvme;
    if (one_group) choice[C::kOrder] = 0;
  }
  if (choice[C::kSavedAll] + choice[C::kSavedAttention] == 0) {
    choice[C::kSavedTier] = ranges_[static_cast<size_t>(C::kSavedTier)].values.front();
  }
  return choice;
}

std::vector<Choice> ChoiceSpace::seeds() const {
  std::vector<Choice> seeds;
  const auto put = [&](Tier tier, Update update, Tier others, bool least) {
    Choice choice;
    const auto set = [&](C c, int value) {
      const Range& range = ranges_[static_cast<size_t>(c)];
      if (static_cast<size_t>(c) >= kFirstCount) {
        choice[c] = value;
      } else {
        const bool has =
            std::find(range.values.begin(), range.values.end(), value) != range.values.end();
        choice[c] = has ? value : range.values.front();
      }
    };
    set(C::kSlots, least ? 1 : 2);
    set(C::kHostSlots, least ? 1 : 2);
    set(C::kActivationSlots, least ? 1 : 2);
    set(C::kPart, least ? static_cast<int>(part_elements_.size()) - 1 : 0);
    set(C::kBoundaries, !least ? 0 : nvme_ ? 2 : 1);
    set(C::kSavedTier, 0);
    const UnitPlacement unit{
        .weight = others, .gradient = others, .optimizer = tier, .update = update};
    const auto& ends = end_placements();
    const auto end = static_cast<int>(std::find(ends.begin(), ends.end(), unit) - ends.begin());
    for (const C c : {C::kFirst, C::kLast}) set(c, end);
    set(C::kDevice, tier == Tier::kDevice ? inner_ : 0);
    set(C::kHost, tier == Tier::kHost ? inner_ : 0);
    set(C::kSpeculated, update == Update::kSpeculated ? inner_ : 0);
    const int on_host = tier == Tier::kNvme && others == Tier::kHost ? inner_ : 0;
    set(C::kWeightHost, on_host);
    set(C::kGradientHost, on_host);
    choice = normal(choice);
    if (std::find(seeds.begin(), seeds.end(), choice) == seeds.end()) seeds.push_back(choice);
  };
  for (const bool least : {false, true}) {
    put(Tier::kDevice, Update::kDeferred, Tier::kDevice, least);
    put(Tier::kHost, Update::kDeferred, Tier::kHost, least);
    put(Tier::kNvme, Update::kDeferred, Tier::kHost, least);
    put(Tier::kNvme, Update::kDeferred, Tier::kNvme, least);
    put(Tier::kNvme, Update::kSpeculated, Tier::kNvme, least);
  }
  return seeds;
}

Placement ChoiceSpace::placement(const Choice& choice) const {
  Placement placement{.units = {},
                      .boundaries = static_cast<Tier>(choice[C::kBoundaries]),
                      .saved_activations = static_cast<Tier>(choice[C::kSavedTier]),
                      .slots = choice[C::kSlots],
                      .activation_slots = choice[C::kActivationSlots],
                      .host_slots = choice[C::kHostSlots],
                      .part_elements = part_elements_[static_cast<size_t>(choice[C::kPart])],
                      .ranks = request_.ranks,
                      .clipping = request_.clipping,
                      .moments = request_.moments};
  placement.units.assign(static_cast<size_t>(inner_) + 2, UnitPlacement::all_on(Tier::kDevice));
  placement.units.front() = end_placements()[static_cast<size_t>(choice[C::kFirst])];
  placement.units.back() = end_placements()[static_cast<size_t>(choice[C::kLast])];

  // The last unit of forward is the first of backward, and the first waits for nothing: units enter
  // the device from both ends.
  const int device = choice[C::kDevice];
  const int rest = inner_ - device;
  const int begin = 1 + device / 2;
  const int host = choice[C::kHost];
  const int on_nvme = rest - host;
  const int speculated = choice[C::kSpeculated];
  const int deferred = on_nvme - speculated;
  int nvme_seen = 0;
  for (int i = 0; i < rest; ++i) {
    bool is_host = false;
    bool is_speculated = false;
    switch (static_cast<Order>(choice[C::kOrder])) {
      case Order::kSpread:
        is_host = is_one_of(i, host, rest);
        is_speculated = !is_host && is_one_of(nvme_seen, speculated, on_nvme);
        break;
      case Order::kHostFirst:
        is_host = i < host;
        is_speculated = i >= host + deferred;
        break;
      case Order::kSpeculatedFirst:
        is_speculated = i < speculated;
        is_host = !is_speculated && i < speculated + host;
        break;
      case Order::kHostLast:
        is_speculated = i >= deferred && i < on_nvme;
        is_host = i >= on_nvme;
        break;
    }
    UnitPlacement& unit = placement.units[static_cast<size_t>(begin + i)];
    if (is_host) {
      unit = UnitPlacement::all_on(Tier::kHost);
    } else {
      const auto place = [&](C c) {
        return is_one_of(nvme_seen, choice[c], on_nvme) ? Tier::kHost : Tier::kNvme;
      };
      unit = {.weight = place(C::kWeightHost),
              .gradient = place(C::kGradientHost),
              .optimizer = Tier::kNvme,
              .update = is_speculated ? Update::kSpeculated : Update::kDeferred};
      ++nvme_seen;
    }
    unit.resident_weight = !gathers_ && is_one_of(i, choice[C::kResident], rest);
  }
  for (int i = 0; gathers_ && i < inner_; ++i) {
    placement.units[static_cast<size_t>(1 + i)].resident_weight =
        is_one_of(i, choice[C::kResident], inner_);
  }
  int not_all = 0;
  const int all = choice[C::kSavedAll];
  for (int i = 0; i < inner_; ++i) {
    UnitPlacement& unit = placement.units[static_cast<size_t>(1 + i)];
    if (is_one_of(i, all, inner_)) {
      unit.saved = SavedActivations::kAll;
    } else if (is_one_of(not_all++, choice[C::kSavedAttention], inner_ - all)) {
      unit.saved = SavedActivations::kAttention;
    }
  }
  return placement;
}

void ChoiceSpace::neighbours(const Choice& choice, int scale,
                             const std::function<void(const Choice&)>& visit) const {
  const auto offer = [&](const Choice& changed) {
    const Choice next = normal(changed);
    if (next != choice) visit(next);
  };
  for (size_t c = 0; c < kFirstCount; ++c) {
    for (const int value : ranges_[c].values) {
      Choice next = choice;
      next.values[c] = value;
      offer(next);
    }
  }
  // More or fewer units on NVMe keep the parts of them that are speculated and so on.
  const auto moved = [&](Choice next, size_t c, int by) {
    const int before = inner_ - next[C::kDevice] - next[C::kHost];
    next.values[c] = std::clamp(next.values[c] + by, ranges_[c].least, ranges_[c].most);
    if (c == static_cast<size_t>(C::kDevice)) {
      next[C::kHost] = std::min(next[C::kHost], inner_ - next[C::kDevice]);
    }
    if (c <= static_cast<size_t>(C::kHost)) {
      const int after = inner_ - next[C::kDevice] - next[C::kHost];
      for (const C part : {C::kSpeculated, C::kWeightHost, C::kGradientHost}) {
        next[part] = scaled(next[part], before, after);
      }
    }
    return next;
  };
  for (size_t a = kFirstCount; a < kCoordinates; ++a) {
    for (const int by : {scale, -scale}) {
      const Choice one = moved(choice, a, by);
      offer(one);
      for (size_t b = kFirstCount; b < kCoordinates; ++b) {
        if (b == a) continue;
        offer(moved(one, b, scale));
        offer(moved(one, b, -scale));
        offer(moved(one, b, -2 * scale));
      }
    }
  }
  // Units that come to NVMe where there are none yet, with weight and gradient in host memory.
  if (inner_ - choice[C::kDevice] - choice[C::kHost] == 0) {
    for (const C from : {C::kDevice, C::kHost}) {
      for (const int speculated : {0, scale}) {
        Choice next = moved(choice, static_cast<size_t>(from), -scale);
        next[C::kSpeculated] = speculated;
        next[C::kWeightHost] = scale;
        next[C::kGradientHost] = scale;
        offer(next);
      }
    }
  }
  // Both ends together.
  for (const int value : ranges_[static_cast<size_t>(C::kFirst)].values) {
    Choice next = choice;
    next[C::kFirst] = next[C::kLast] = value;
    offer(next);
  }
}

}  // namespace strata::pipeline
