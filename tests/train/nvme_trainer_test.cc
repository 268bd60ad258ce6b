// Runs whose state rests on drives: what is learned, what is kept, and what is refused.
#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "catch.h"
#include "nvme/arena_file.h"
#include "nvme/store.h"
#include "train/run_store.h"
#include "train/trainer_fixture.h"

namespace strata::train {
namespace {

using cpu_adam::MomentFormat;
using pipeline::Tier;

/// A run with its state on so many drives, with a place for each and for its output by `name`.
TrainConfig on_drives(const Bench& bench, const std::string& name, int drives = 1) {
  TrainConfig config = bench.config(name);
  config.offload = OffloadChoice::kNvme;
  for (int d = 0; d < drives; ++d) {
    config.nvme.push_back(
        {bench.output(name + "-drive" + std::to_string(d)).string(), std::nullopt});
  }
  return config;
}

/// Ends after that step as a killed process would.
void crash(const TrainConfig& config, Recorder& recorder, int64_t after) {
  recorder.crash_after = after;
  CHECK_THROWS_AS(run(config, recorder), Recorder::Crash);
}

std::vector<nlohmann::json> lines_of(const TrainConfig& config) {
  std::ifstream file(fs::path(config.output_dir) / "metrics.jsonl");
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json json = nlohmann::json::parse(line);
    for (const char* measured :
         {"seconds", "tokens_per_second", "nvme_bytes_written", "device_bytes", "host_bytes"}) {
      json.erase(measured);
    }
    lines.push_back(std::move(json));
  }
  return lines;
}

std::string final_state(const TrainConfig& config) {
  return bytes_of(checkpoint_path(config.output_dir, config.max_steps));
}

size_t bytes_of(const Recorder& recorder, Tier tier) {
  return recorder.tier_bytes[static_cast<size_t>(tier)];
}

/// Refused by one sentence with those words, before anything has changed on the disk.
void check_refused(const TrainConfig& config, ErrorKind kind,
                   const std::vector<std::string>& words) {
  const auto there = [&] {
    std::vector<fs::path> paths{config.output_dir};
    for (const DriveSpec& drive : config.nvme) {
      paths.emplace_back(drive.path);
      paths.push_back(nvme::arena_path(drive.path));
      paths.push_back(nvme::partial_arena_path(drive.path));
    }
    std::vector<bool> exist;
    for (const fs::path& path : paths) exist.push_back(fs::exists(path));
    return exist;
  };
  const std::vector<bool> before = there();
  Recorder recorder;
  try {
    run(config, recorder);
    FAIL_CHECK("not refused: " << words.front());
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.kind() == kind);
    for (const std::string& word : words) CHECK_THAT(error.what(), Catch::Contains(word));
    CHECK_THAT(error.what(), !Catch::Contains("\n"));
  }
  CHECK(recorder.steps.empty());
  CHECK(there() == before);
}

}  // namespace

TEST_CASE("state on drives is trained to the same bits") {
  const Bench bench;
  const MomentFormat moments = GENERATE(MomentFormat::kF32, MomentFormat::kInt8);
  TrainConfig reference = bench.config("reference");
  reference.optimizer_state = moments;
  reference.offload = OffloadChoice::kNone;
  Recorder expected;
  run(reference, expected);
  // Steps with and without clipping are different work for state on drives: of both, some.
  std::vector<double> sorted = norms(expected);
  std::sort(sorted.begin(), sorted.end());
  reference.max_grad_norm = sorted[sorted.size() / 2];
  reference.output_dir = bench.output("between").string();
  expected = {};
  run(reference, expected);
  const auto clipped = std::count_if(expected.steps.begin(), expected.steps.end(),
                                     [](const TrainMetrics& step) { return step.clipped; });
  REQUIRE(clipped > 0);
  REQUIRE(clipped < static_cast<int64_t>(expected.steps.size()));

  const auto check_same = [&](TrainConfig config) {
    config.optimizer_state = moments;
    config.max_grad_norm = reference.max_grad_norm;
    Recorder recorder;
    const TrainOutcome outcome = run(config, recorder);
    CHECK(losses(recorder) == losses(expected));
    CHECK(norms(recorder) == norms(expected));
    CHECK(final_state(config) == final_state(reference));
    CHECK(outcome.committed ==
          (config.offload == OffloadChoice::kNvme && config.commit == CommitChoice::kStep));
    CHECK((bytes_of(recorder, Tier::kNvme) > 0) == (config.offload == OffloadChoice::kNvme));
    for (const TrainMetrics& step : recorder.steps) {
      CHECK((step.nvme_bytes_written > 0) == (config.offload == OffloadChoice::kNvme));
    }
  };
  TrainConfig host = bench.config("host");
  host.offload = OffloadChoice::kHost;
  check_same(host);
  for (const CommitChoice commit : {CommitChoice::kStep, CommitChoice::kSave}) {
    for (const int drives : {1, 3}) {
      const std::string name =
          "nvme" + std::to_string(drives) + (commit == CommitChoice::kStep ? "step" : "save");
      CAPTURE(name);
      TrainConfig config = on_drives(bench, name, drives);
      config.commit = commit;
      check_same(config);
    }
  }
  TrainConfig slow = on_drives(bench, "slow", 2);
  slow.nvme_read_bandwidth = 60e6;
  slow.nvme_write_bandwidth = 30e6;
  slow.weight_slots = 1;
  check_same(slow);
}

TEST_CASE("a run goes on from its drives alone") {
  const Bench bench;
  TrainConfig whole = bench.config("whole");
  whole.optimizer_state = GENERATE(MomentFormat::kF32, MomentFormat::kInt8);
  whole.eval_steps = 5;
  Recorder expected;
  run(whole, expected);

  TrainConfig config = on_drives(bench, "parts", 2);
  config.optimizer_state = whole.optimizer_state;
  config.eval_steps = 5;
  config.save_strategy = SaveStrategy::kNo;
  config.resume = "auto";
  // Asked to stop, then killed, then asked to stop where an evaluation is due.
  Recorder first;
  const TrainOutcome stopped = run(config, first, 3);
  CHECK(stopped.interrupted);
  CHECK(stopped.committed);
  CHECK(stopped.checkpoint.empty());
  CHECK(first.first_step == 0);
  Recorder second;
  crash(config, second, 4);
  CHECK(second.first_step == 3);
  CHECK_THAT(second.notes.back(), Catch::Contains("last commit") && Catch::Contains("step 3"));
  Recorder third;
  run(config, third, 1);
  CHECK(third.first_step == 4);
  // Of the last step on, checkpoints are wanted.
  config.save_strategy = SaveStrategy::kSteps;
  Recorder last;
  const TrainOutcome outcome = run(config, last);
  CHECK(last.first_step == 5);
  CHECK(outcome.checkpoint == checkpoint_path(config.output_dir, 10));
  CHECK(list_checkpoints(config.output_dir).size() == 1);
  CHECK(final_state(config) == final_state(whole));
  CHECK(lines_of(config) == lines_of(whole));
}

TEST_CASE("what a kill has cut off after a commit is made up for") {
  const Bench bench;
  TrainConfig whole = on_drives(bench, "whole");
  whole.save_steps = 4;
  whole.eval_steps = 4;
  Recorder expected;
  run(whole, expected);
  const int64_t step = GENERATE(4, 10);
  TrainConfig config = on_drives(bench, "cut");
  config.save_steps = 4;
  config.eval_steps = 4;
  config.resume = "auto";
  Recorder cut;
  crash(config, cut, step);  // after the commit, before the checkpoint and the evaluation
  CHECK_FALSE(is_checkpoint(checkpoint_path(config.output_dir, step)));
  Recorder again;
  const TrainOutcome outcome = run(config, again);
  CHECK(again.first_step == step);
  CHECK(is_checkpoint(checkpoint_path(config.output_dir, 4)));
  CHECK(outcome.checkpoint == checkpoint_path(config.output_dir, 10));
  CHECK(final_state(config) == final_state(whole));
  CHECK(lines_of(config) == lines_of(whole));
  // Once is enough.
  Recorder complete;
  CHECK(run(config, complete).step == 10);
  CHECK(complete.evals.empty());
  CHECK(complete.checkpoints.empty());
}

TEST_CASE("other budgets of memory go on from the same drives") {
  const Bench bench;
  TrainConfig whole = on_drives(bench, "whole");
  Recorder expected;
  run(whole, expected);
  // The least that will do of each, found by asking for less and less.
  const auto least = [&](std::optional<size_t> TrainConfig::*budget, Tier tier) {
    size_t works = bytes_of(expected, tier) + (size_t{1} << 20);
    for (size_t tried = bytes_of(expected, tier) * 9 / 10; tried > 0; tried = tried * 9 / 10) {
      TrainConfig config =
          on_drives(bench, "try" + std::to_string(tried) + std::string(name_of(tier)));
      config.*budget = tried;
      config.max_steps = 2;
      config.save_strategy = SaveStrategy::kNo;
      Recorder recorder;
      try {
        run(config, recorder);
      } catch (const Error& error) {
        REQUIRE(error.kind() == ErrorKind::kDoesNotFit);
        return works;
      }
      works = tried;
    }
    return works;
  };
  const size_t device = least(&TrainConfig::device_memory, Tier::kDevice);
  const size_t host = least(&TrainConfig::host_memory, Tier::kHost);
  CHECK(device < bytes_of(expected, Tier::kDevice));
  CHECK(host < bytes_of(expected, Tier::kHost));

  const bool shrinks = GENERATE(true, false);
  TrainConfig config = on_drives(bench, "changed");
  config.resume = "auto";
  TrainConfig small = config;
  small.device_memory = device;
  Recorder first;
  run(shrinks ? config : small, first, 3);
  Recorder second;
  run(shrinks ? small : config, second, 3);
  CHECK(second.tier_bytes != first.tier_bytes);
  TrainConfig smaller = config;
  smaller.host_memory = host;
  Recorder third;
  run(shrinks ? smaller : config, third);
  CHECK(third.first_step == 6);
  // What only such a run needed, it has taken along.
  CHECK_FALSE(fs::exists(fs::path(config.nvme.front().path) / "scratch"));
  CHECK(final_state(config) == final_state(whole));
}

TEST_CASE("a run goes back to the step before its last, where another rank is behind") {
  const Bench bench;
  TrainConfig config = on_drives(bench, "run", 2);
  Recorder recorder;
  crash(config, recorder, 5);
  const std::vector<StoredRun> runs = find_stored_runs(config);
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].state.step == 5);
  CHECK(runs[1].state.step == 4);
  CHECK(find_stored_run(config)->generation == runs[0].generation);
  std::vector<nvme::StoreDirectory> directories;
  for (const DriveSpec& drive : config.nvme) directories.push_back({.directory = drive.path});
  nvme::StoreOptions options;
  options.generation = runs[1].generation;
  nvme::Store::open(directories, options).close();
  REQUIRE(find_stored_run(config)->state.step == 4);
  config.resume = "auto";
  Recorder again;
  CHECK(run(config, again).step == 10);
  CHECK(again.first_step == 4);
  TrainConfig whole = on_drives(bench, "whole", 2);
  Recorder expected;
  run(whole, expected);
  CHECK(final_state(config) == final_state(whole));
}

TEST_CASE("the last step that all ranks have") {
  using Steps = std::vector<std::vector<int64_t>>;
  CHECK(last_common_step(Steps{{7, 6}, {6, 5}, {7, 6}}) == 6);
  CHECK(last_common_step(Steps{{7, 6}, {7, 6}}) == 7);
  CHECK(last_common_step(Steps{{7, 6}, {7}}) == 7);
  CHECK(last_common_step(Steps{{7, 7}, {8, 7}}) == 7);
  CHECK_FALSE(last_common_step(Steps{{7, 6}, {5, 4}}));
  CHECK_FALSE(last_common_step(Steps{{7, 6}, {}}));
  CHECK_FALSE(last_common_step(Steps{}));
}

TEST_CASE("a store says whose state it has") {
  StoredRun run;
  const auto text = [&] {
    const std::vector<std::byte> bytes = to_metadata(run);
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  CHECK(text().find("rank") == std::string::npos);
  run.rank = 2;
  run.ranks = 6;
  run.shard_ranks = 3;
  CHECK_THAT(text(), Catch::Contains(R"("rank":2,"ranks":6,"shard_ranks":3)"));
}

TEST_CASE("a run on drives that hold another is refused") {
  const Bench bench;
  TrainConfig config = on_drives(bench, "run", 2);
  config.save_steps = 2;
  Recorder recorder;
  crash(config, recorder, 5);
  const auto check_still_there = [&] {
    config.resume = "auto";
    const auto stored = find_stored_run(config);
    REQUIRE(stored);
    CHECK(stored->state.step == 5);
  };

  TrainConfig fresh = config;
  fresh.output_dir = bench.output("fresh").string();
  check_refused(fresh, ErrorKind::kUsage, {"already holds a run", "step 5", "--resume auto"});
  TrainConfig other = config;
  other.resume = "auto";
  other.seed = 1;
  check_refused(other, ErrorKind::kUsage, {"arena.strata", "seed"});
  other = config;
  other.resume = "auto";
  other.sequence_len = 20;
  check_refused(other, ErrorKind::kUsage, {"arena.strata", "data"});
  other = config;
  other.resume = "auto";
  other.optimizer_state = MomentFormat::kBf16;
  check_refused(other, ErrorKind::kUsage, {"arena.strata", "optimizer_state"});
  other = config;
  other.resume = "auto";
  const fs::path model = bench.output("other.json");
  std::string text = read_text_file(fs::path(config.model) / "config.json");
  text.replace(text.find("1e-5"), 4, "1e-6");
  std::ofstream(model) << text;
  other.model = model.string();
  check_refused(other, ErrorKind::kUsage, {"arena.strata", "other.json"});
  // The store is later than that.
  other = config;
  other.resume = checkpoint_path(config.output_dir, 4).string();
  check_refused(other, ErrorKind::kUsage, {"later step 5", "--resume auto"});
  // What is kept every step is not given up unasked.
  for (const OffloadChoice offload : {OffloadChoice::kNone, OffloadChoice::kHost}) {
    other = config;
    other.resume = "auto";
    other.offload = offload;
    check_refused(other, ErrorKind::kUsage, {"arena.strata", "committed every step"});
  }
  other = config;
  other.resume = "auto";
  other.commit = CommitChoice::kSave;
  check_refused(other, ErrorKind::kUsage, {"arena.strata", "commit step"});
  // One of its two drives, or a strange one.
  other = config;
  other.resume = "auto";
  other.nvme.pop_back();
  check_refused(other, ErrorKind::kUsage, {"2 drives"});
  other.nvme.push_back({bench.output("strange").string(), std::nullopt});
  check_refused(other, ErrorKind::kUsage, {"strange", "no store"});
  check_still_there();
  {
    // A reader is enough to keep it from being written; two of them do not mind each other.
    const UniqueFd lock = nvme::lock_arena(config.nvme[1].path, /*shared=*/true);
    check_refused(config, ErrorKind::kUsage, {"in use by process"});
    check_still_there();
  }
  {
    const UniqueFd lock = nvme::lock_arena(config.nvme[1].path, /*shared=*/false);
    check_refused(config, ErrorKind::kUsage, {"in use by process"});
  }
  check_still_there();
  Recorder rest;
  CHECK(run(config, rest).step == 10);
  CHECK(rest.first_step == 5);
}

TEST_CASE("drives that cannot take a store are refused before anything is written") {
  const Bench bench;
  TrainConfig config = on_drives(bench, "never", 2);
  config.nvme[0].limit_bytes = config.nvme[1].limit_bytes = 20000;
  check_refused(config, ErrorKind::kDoesNotFit, {"NVMe", "39.1 KiB"});
  // Room for the state, and not for the tables of the store besides.
  Recorder recorder;
  run(on_drives(bench, "measured"), recorder);
  config = on_drives(bench, "never");
  config.nvme[0].limit_bytes = bytes_of(recorder, Tier::kNvme);
  check_refused(config, ErrorKind::kDoesNotFit, {"the store needs", "never-drive0"});

  config = on_drives(bench, "never", 2);
  config.nvme[1].path = (fs::path(config.model) / "text.txt").string();
  check_refused(config, ErrorKind::kUsage, {"nvme", "text.txt", "no directory"});
  config.nvme[1].path += "/below";
  check_refused(config, ErrorKind::kUsage, {"nvme", "text.txt/below", "no directory"});
  config.nvme[1].path = config.nvme[0].path + "/../never-drive0/";
  check_refused(config, ErrorKind::kUsage, {"nvme", "twice"});
  config = on_drives(bench, "never");
  config.trace = bench.output("nowhere/trace.json").string();
  check_refused(config, ErrorKind::kUsage, {"trace", "nowhere"});
  config.trace = config.model;
  check_refused(config, ErrorKind::kUsage, {"trace", "directory"});
}

TEST_CASE("what was never committed is replaced") {
  const Bench bench;
  TrainConfig whole = bench.config("whole");
  Recorder expected;
  run(whole, expected);
  TrainConfig config = on_drives(bench, "run", 2);
  SECTION("a run that commits only what it saves, and was killed") {
    config.commit = CommitChoice::kSave;
    config.save_steps = 4;
    Recorder recorder;
    crash(config, recorder, 6);
    CHECK_FALSE(find_stored_run(config));
    SECTION("and is resumed") {
      config.resume = "auto";
      Recorder again;
      run(config, again);
      CHECK(again.first_step == 4);
    }
    SECTION("and another begins there") {
      config.output_dir = bench.output("another").string();
      Recorder again;
      run(config, again);
      CHECK(again.first_step == 0);
    }
    SECTION("and one that commits every step goes on from its checkpoint") {
      config.commit = CommitChoice::kStep;
      config.resume = "auto";
      Recorder again;
      CHECK(run(config, again).committed);
      CHECK(again.first_step == 4);
    }
  }
  SECTION("a creation or a removal that was cut off between two drives") {
    Recorder recorder;
    crash(config, recorder, 2);
    REQUIRE(find_stored_run(config));
    fs::rename(nvme::arena_path(config.nvme[1].path),
               nvme::partial_arena_path(config.nvme[1].path));
    CHECK_FALSE(find_stored_run(config));
    config.output_dir = bench.output("another").string();
    Recorder again;
    run(config, again);
    CHECK(again.first_step == 0);
    CHECK_FALSE(fs::exists(nvme::partial_arena_path(config.nvme[1].path)));
  }
  CHECK(final_state(config) == final_state(whole));
}

}  // namespace strata::train
