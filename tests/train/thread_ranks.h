// Ranks as threads of the test.
#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "train/rank_exchange.h"

namespace strata::train {

class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : given_(static_cast<size_t>(ranks)) {}

  /// Runs `work(exchange)` on a thread for each rank; what they threw, empty where nothing.
  template <class Work>
  std::vector<std::string> run(const Work& work) {
    std::vector<std::string> messages(given_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < given_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        Exchange exchange(*this, static_cast<int>(rank));
        try {
          work(static_cast<RankExchange&>(exchange));
        } catch (const std::exception& error) {
          messages[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return messages;
  }

 private:
  using Bytes = std::vector<std::byte>;

  class Exchange final : public RankExchange {
   public:
    Exchange(ThreadRanks& all, int rank) : all_(all), rank_(rank) {}
    [[nodiscard]] int rank() const noexcept override { return rank_; }
    [[nodiscard]] int ranks() const noexcept override {
      return static_cast<int>(all_.given_.size());
    }
    [[nodiscard]] std::vector<Bytes> all_gather(std::span<const std::byte> mine) override {
      return all_.gather(static_cast<size_t>(rank_), mine);
    }

   private:
    ThreadRanks& all_;
    int rank_;
  };

  std::vector<Bytes> gather(size_t rank, std::span<const std::byte> mine) {
    std::unique_lock lock(mutex_);
    given_[rank].assign(mine.begin(), mine.end());
    const size_t round = round_;
    if (++arrived_ == given_.size()) {
      gathered_ = given_;
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
    // No later round ends before this rank has come to it.
    return gathered_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Bytes> given_, gathered_;
  size_t arrived_ = 0, round_ = 0;
};

}  // namespace strata::train
