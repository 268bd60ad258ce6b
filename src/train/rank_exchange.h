// How the ranks of a run tell each other small things: that a file is written, what is in it.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace strata::train {

/// An error that all ranks throw, after which they end in order; whoever observes the run has been
/// told (TrainObserver::failed).
class AgreedError : public Error {
 public:
  using Error::Error;
};

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
  /// How messages name a rank.
  [[nodiscard]] virtual std::string describe_rank(int rank) const;

  /// Runs `work` on every rank and returns what each made, by rank. Where it throws on one, all
  /// throw an AgreedError with its kind and words; with one rank the error is passed on as it is.
  /// `work` does not wait for other ranks.
  std::vector<std::string> gather_agreed(const std::function<std::string()>& work);
  /// The same, where nothing is made.
  void agree(const std::function<void()>& work);

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
