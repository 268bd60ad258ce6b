// A small model trained by several ranks, each a thread with a device of its own.
#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/thread_communicator.h"
#include "model/small_run.h"
#include "temporary_directory.h"

namespace strata::model {

/// What a rank works with.
struct RankPlace {
  std::unique_ptr<gpu::Device> device;
  comm::RankGroups groups;  // of the device, so they go first
};
/// That of a rank, once for each, on its thread. With CUDA devices it waits for the other ranks.
using OpenRank = std::function<RankPlace(int rank)>;
/// For the ranks of one run.
using MakeRanks = std::function<OpenRank(const pipeline::RankLayout&)>;

inline OpenRank host_ranks(const pipeline::RankLayout& layout) {
  const auto groups = std::make_shared<std::vector<comm::RankGroups>>(
      comm::create_thread_rank_groups(layout.ranks, layout.shard_ranks));
  return [groups](int rank) {
    return RankPlace{.device = gpu::create_host_device({.threads = 1}),
                     .groups = std::move((*groups)[static_cast<size_t>(rank)])};
  };
}

struct RankRunOptions {
  DType dtype = DType::kBf16;
  double max_grad_norm = 0.6;
  /// What a step works on whatever the number of ranks, which divides it.
  int micro_batches = 12;
  MakeRanks ranks = host_ranks;
};

struct RankRun {
  /// The same on all ranks (which is checked), `state` gathered and without padding.
  Trajectory trajectory;
  std::vector<std::string> differences;                     // between what ranks say
  size_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;  // of a rank's plan
  size_t collective_bytes = 0;  // that a rank sends in a step, as the graph counts
  /// That the first rank's thread communicators have received in all training steps.
  size_t received_bytes = 0;
};

/// Of groups of threads; 0 of others.
inline size_t received_by(const comm::RankGroups& groups) {
  size_t bytes = 0;
  for (const auto* group : {&groups.world, &groups.shard, &groups.replica}) {
    const auto* threads = dynamic_cast<const comm::ThreadCommunicator*>(group->get());
    if (threads != nullptr) bytes += threads->received_bytes();
  }
  return bytes;
}

struct RankState {
  TemporaryDirectory directory;
  RankPlace place;
  std::unique_ptr<pipeline::Executor> executor;
};

/// Runs `body(rank, state)` on a thread for each, and throws the error that came first. What ranks
/// have goes when all have ended: memory is given back when no stream of a CUDA device is at work,
/// and the emulated one is that of all ranks.
inline void on_ranks(int ranks, const OpenRank& open,
                     const std::function<void(int, RankState&)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::barrier ended(ranks);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        RankState state;
        try {
          state.place = open(rank);
          body(rank, state);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
          if (state.place.groups.world) state.place.groups.abort();
        }
        ended.arrive_and_wait();
      });
    }
  }
  if (first) std::rethrow_exception(first);
}

/// State of all units by kind, as one rank has it.
inline std::vector<std::vector<std::byte>> initial_masters(const LlamaConfig& config, DType dtype) {
  const std::unique_ptr<gpu::Device> device = gpu::create_host_device({.threads = 1});
  const Llama llama(config, dtype, 64);
  pipeline::Executor executor(
      *device, llama,
      pipeline::build_plan(
          llama, device->operators(), {.micro_batches = 1, .tokens = 64, .max_sequences = 5},
          pipeline::Placement::all_on(pipeline::Tier::kDevice, llama.units().size())));
  initialize_weights(5, llama, executor);
  return {state_of(llama, executor, pipeline::StateKind::kWeight),
          state_of(llama, executor, pipeline::StateKind::kResidual)};
}

inline constexpr std::array kRankKinds{pipeline::StateKind::kWeight, pipeline::StateKind::kResidual,
                                       pipeline::StateKind::kMoment1,
                                       pipeline::StateKind::kMoment2};

/// As train_small, with the same global batches for any number of ranks.
inline RankRun train_on_ranks(const LlamaConfig& config, const pipeline::Placement& placement,
                              int steps, const RankRunOptions& options = {}) {
  using pipeline::StateKind;
  const int ranks = placement.ranks.ranks;
  const DType dtype = options.dtype;
  const int64_t micro_batches = options.micro_batches / ranks;
  const std::vector<int32_t> lengths{19, 1, 33, 11};
  const Llama llama(config, dtype, 64);
  const std::vector<std::vector<std::byte>> masters = initial_masters(config, dtype);
  std::vector<Trajectory> all(static_cast<size_t>(ranks));
  std::vector<std::vector<std::pair<int64_t, std::vector<std::byte>>>> shards(
      static_cast<size_t>(ranks));  // [rank][kind and unit]: first element, bytes
  RankRun run;
  on_ranks(ranks, options.ranks(placement.ranks), [&](int rank, RankState& of_rank) {
    gpu::Device& device = *of_rank.place.device;
    of_rank.executor = std::make_unique<pipeline::Executor>(
        device, llama,
        pipeline::build_plan(llama, device.operators(),
                             {.micro_batches = micro_batches, .tokens = 64, .max_sequences = 5},
                             placement),
        pipeline::ExecutorOptions{
            .cpu_threads = 1,
            .nvme = {.directories = {{.directory = of_rank.directory.path()}}},
            .ranks = &of_rank.place.groups});
    pipeline::Executor& executor = *of_rank.executor;
    const comm::RankGroups& groups = of_rank.place.groups;
    const auto units = static_cast<int>(llama.units().size());
    for (size_t kind = 0; kind < masters.size(); ++kind) {
      const size_t size = pipeline::state_bytes(kRankKinds[kind], 1, dtype, placement.moments);
      size_t begin = 0;
      for (int unit = 0; unit < units && size > 0; ++unit) {
        const pipeline::ElementRange range = executor.shard(unit);
        executor.write_state(unit, kRankKinds[kind], 0,
                             std::span(masters[kind])
                                 .subspan(begin + static_cast<size_t>(range.first) * size,
                                          static_cast<size_t>(range.count) * size));
        begin +=
            static_cast<size_t>(llama.units()[static_cast<size_t>(unit)].parameter_count) * size;
      }
    }
    for (const StateKind kind : {StateKind::kMoment1, StateKind::kMoment2}) {
      for (int unit = 0; unit < units; ++unit) {
        executor.write_state(unit, kind, 0,
                             std::vector<std::byte>(executor.state_size_bytes(unit, kind)));
      }
    }
    Trajectory& trajectory = all[static_cast<size_t>(rank)];
    int64_t optimizer_steps = 0;
    for (int step = 0; step < steps; ++step) {
      std::vector<TestBatch> batches;
      int64_t unmasked = 0;
      for (int m = 0; m < options.micro_batches; ++m) {
        batches.push_back(TestBatch::random(
            lengths, config.vocab_size, static_cast<uint64_t>(step * options.micro_batches + m)));
        unmasked += batches.back().unmasked();
      }
      std::vector<pipeline::HostMicroBatch> views;
      for (int64_t m = 0; m < micro_batches; ++m) {
        views.push_back(batches[static_cast<size_t>(rank * micro_batches + m)].view());
      }
      constexpr int kBadStep = 6;
      const size_t received_before = received_by(groups);
      const pipeline::StepResult result = executor.train_step(
          views,
          step == kBadStep && rank == ranks - 1 ? std::numeric_limits<float>::infinity()
                                                : 1.0F / static_cast<float>(unmasked),
          {.hyper = {.learning_rate = 3e-3, .weight_decay = 0.1},
           .step = optimizer_steps + 1,
           .max_grad_norm = options.max_grad_norm,
           .seed = 11});
      if (rank == 0) run.received_bytes += received_by(groups) - received_before;
      trajectory.losses.push_back(result.loss_sum);
      optimizer_steps += result.finite;
      trajectory.norms.push_back(result.finite ? result.gradient_norm : -1);
      trajectory.clipped += result.clipped;
      trajectory.replayed += result.replayed;
      if (step % 7 == 1) trajectory.eval_losses.push_back(executor.evaluate(views));
    }
    for (const StateKind kind : kRankKinds) {
      const size_t size = pipeline::state_bytes(kind, 1, dtype, placement.moments);
      // Blocks of int8 moments are not a number of bytes an element.
      if (size > 4) continue;
      for (int unit = 0; unit < units; ++unit) {
        const pipeline::ElementRange range = executor.shard(unit);
        std::vector<std::byte> bytes(static_cast<size_t>(range.count) * size);
        if (!bytes.empty()) executor.read_state(unit, kind, 0, bytes);
        shards[static_cast<size_t>(rank)].emplace_back(range.first, std::move(bytes));
      }
    }
    if (rank != 0) return;
    const pipeline::Plan& plan = executor.plan();
    run.device_bytes = plan.bytes(pipeline::Tier::kDevice);
    run.host_bytes = plan.bytes(pipeline::Tier::kHost);
    run.nvme_bytes = plan.bytes(pipeline::Tier::kNvme);
    for (const pipeline::Task& task : plan.train) {
      if (task.lane == pipeline::Lane::kCollective) run.collective_bytes += task.moved_bytes;
    }
  });
  for (int rank = 1; rank < ranks; ++rank) {
    if (!(all[static_cast<size_t>(rank)] == all[0])) {
      run.differences.push_back("results of rank " + std::to_string(rank));
    }
    const int twin = rank % placement.ranks.shard_ranks;
    if (shards[static_cast<size_t>(rank)] != shards[static_cast<size_t>(twin)]) {
      run.differences.push_back("state of rank " + std::to_string(rank) + " and its replica");
    }
  }
  run.trajectory = all[0];
  const size_t units = llama.units().size();
  for (size_t kind = 0; kind < kRankKinds.size(); ++kind) {
    std::vector<std::byte>& whole = run.trajectory.state.emplace_back();
    for (size_t unit = 0; unit < units; ++unit) {
      for (int rank = 0; rank < placement.ranks.shard_ranks; ++rank) {
        const auto& shard = shards[static_cast<size_t>(rank)];
        if (shard.size() <= kind * units + unit) continue;
        const auto& bytes = shard[kind * units + unit].second;
        whole.insert(whole.end(), bytes.begin(), bytes.end());
      }
    }
  }
  return run;
}

}  // namespace strata::model
