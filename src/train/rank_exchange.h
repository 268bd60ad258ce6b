// How the ranks of a run tell each other small things: that a file is written, what is in it.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace strata::train {

/// All ranks make the same calls in the same order.
class RankExchange {
 public:
  virtual ~RankExchange() = default;
  [[nodiscard]] virtual int rank() const noexcept = 0;
  [[nodiscard]] virtual int ranks() const noexcept = 0;
  /// What each rank gave, in the order of ranks. Blocks until all have called; throws where one
  /// will not. Sizes may differ: from nothing to some MiB.
  [[nodiscard]] virtual std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> mine) = 0;

 protected:
  RankExchange() = default;
  RankExchange(const RankExchange&) = default;
  RankExchange& operator=(const RankExchange&) = default;
};

/// That of a run of one rank.
class OneRank final : public RankExchange {
 public:
  [[nodiscard]] int rank() const noexcept override { return 0; }
  [[nodiscard]] int ranks() const noexcept override { return 1; }
  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> mine) override {
    return {{mine.begin(), mine.end()}};
  }
};

}  // namespace strata::train
