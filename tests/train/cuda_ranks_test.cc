// Whole runs of two ranks, threads of this process, on the emulated CUDA device with a stand-in for
// NCCL.

#include <array>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"
#include "catch.h"
#include "comm/nccl_stand_in.h"
#include "comm/rendezvous.h"
#include "cuda_emulator/emulator.h"
#include "train/checkpoint_tensors.h"
#include "train/trainer_fixture.h"

namespace strata::train {
namespace {

namespace emulator = gpu::cuda::emulator;
using Catch::Matchers::Contains;

constexpr int kRanks = 2;

class RankRecorder final : public TrainObserver {
 public:
  void planned(const RunSummary& run) override { device = run.device.kind(); }
  void stepped(const TrainMetrics& metrics) override { losses.push_back(metrics.loss); }
  void evaluated(const EvalMetrics& metrics) override { losses.push_back(metrics.eval_loss); }
  void saved(const fs::path& /*checkpoint*/) override {}
  void noted(std::string_view /*message*/) override {}
  void finished(const TrainOutcome& outcome) override { last_step = outcome.step; }
  void failed(const AgreedError& error) override { error_told = error.what(); }

  std::string device;
  std::vector<double> losses;
  int64_t last_step = -1;
  std::string error_told, error_thrown;
};

TrainConfig config_of(const Bench& bench, const std::string& name) {
  TrainConfig config = bench.config(name);
  config.device = gpu::DeviceChoice::kCuda;
  config.max_steps = 4;
  config.save_steps = 2;
  config.eval_max_batches = 1;
  return config;
}

std::array<RankRecorder, kRanks> run_ranks(const TrainConfig& config) {
  const int port = comm::ControlListener("127.0.0.1", 0).port();
  std::array<RankRecorder, kRanks> recorders;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      RankRecorder& recorder = recorders[static_cast<size_t>(rank)];
      try {
        train(config, recorder, [] { return false; }, {},
              {.rank = rank,
               .ranks = kRanks,
               .local_rank = rank,
               .local_ranks = kRanks,
               .host = "here",
               .launcher = "torchrun",
               .master_addr = "127.0.0.1",
               .master_port = port});
      } catch (const AgreedError& error) {
        recorder.error_thrown = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return recorders;
}

void check_nothing_is_left() {
  CHECK(emulator::diagnoses().empty());
  CHECK(comm::nccl_stand_in::alive() == 0);
}

}  // namespace

TEST_CASE("ranks on cuda devices train, save, end and go on", "[cuda]") {
  const Bench bench;
  emulator::reset({.memory_bytes = 512 * kMiB});
  TrainConfig config = config_of(bench, "alone");
  Recorder alone;
  train(config, alone, [] { return false; });

  config = config_of(bench, "ranks");
  config.gradient_accumulation_steps /= kRanks;
  config.offload = OffloadChoice::kHost;
  const auto ranks = run_ranks(config);
  for (const RankRecorder& each : ranks) {
    CHECK(each.device == "cuda");
    CHECK(each.last_step == 4);
    CHECK(each.error_thrown.empty());
    CHECK(each.losses == ranks[0].losses);
  }
  for (size_t step = 0; step < alone.steps.size(); ++step) {
    CHECK(std::abs(alone.steps[step].loss - ranks[0].losses[step]) <=
          0x1p-8 * alone.steps[step].loss);
  }
  check_nothing_is_left();

  // From the checkpoint before the last: the same again.
  const fs::path last = checkpoint_path(config.output_dir, 4);
  REQUIRE(is_checkpoint(last));
  fs::remove_all(last);
  config.resume = "auto";
  const auto again = run_ranks(config);
  REQUIRE(again[1].losses.size() == 3);  // two steps, and the evaluation at the end
  for (size_t i = 0; i < 3; ++i) {
    CHECK(again[1].losses[i] == ranks[1].losses[ranks[1].losses.size() - 3 + i]);
  }
  check_nothing_is_left();
}

TEST_CASE("ranks on cuda devices that cannot begin are told why, once they are connected",
          "[cuda]") {
  const Bench bench;
  emulator::reset({.memory_bytes = 512 * kMiB});
  TrainConfig config = config_of(bench, "ranks");
  config.max_steps = 2;
  run_ranks(config);
  const fs::path of_rank_1 = checkpoint_path(config.output_dir, 2) / state_file_name(1, kRanks);
  std::string bytes = read_text_file(of_rank_1);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_text_file_atomically(of_rank_1, bytes);
  config.max_steps = 4;
  config.resume = "auto";
  const auto ranks = run_ranks(config);
  for (const RankRecorder& each : ranks) {
    CHECK_THAT(each.error_told, Contains("state-"));
    CHECK(each.error_told == each.error_thrown);
    CHECK(each.losses.empty());
  }
  check_nothing_is_left();
}

}  // namespace strata::train
