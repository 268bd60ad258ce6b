#include "train/trainer.h"

#include <algorithm>
#include <fstream>

#include "base/error.h"
#include "base/file.h"
#include "catch.h"
#include "model/safetensors.h"
#include "train/checkpoint.h"
#include "train/export.h"
#include "train/trainer_fixture.h"

namespace strata::train {

TEST_CASE("a run learns, evaluates and leaves a whole record") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.eval_steps = 5;
  config.save_steps = 3;
  config.save_total_limit = 2;
  Recorder recorder;
  const TrainOutcome outcome = run(config, recorder);
  CHECK(outcome.step == 10);
  CHECK_FALSE(outcome.interrupted);
  REQUIRE(recorder.steps.size() == 10);
  CHECK(recorder.steps.back().loss < recorder.steps.front().loss - 0.5);
  REQUIRE(recorder.evals.size() == 2);
  CHECK(recorder.evals[1].eval_loss < recorder.evals[0].eval_loss);
  CHECK(outcome.eval_loss == recorder.evals[1].eval_loss);
  const auto clipped = std::count_if(recorder.steps.begin(), recorder.steps.end(),
                                     [](const TrainMetrics& step) { return step.clipped; });
  CHECK(clipped > 0);
  for (const TrainMetrics& step : recorder.steps) CHECK(step.clipped == (step.grad_norm > 0.9));
  // Four windows of 24 tokens a step.
  CHECK(recorder.steps.back().tokens == 10 * 4 * 24);
  CHECK(list_checkpoints(config.output_dir) ==
        std::vector<fs::path>{checkpoint_path(config.output_dir, 9),
                              checkpoint_path(config.output_dir, 10)});
  CHECK(fs::exists(fs::path(config.output_dir) / "config.yaml"));
  const std::string log = read_text_file(fs::path(config.output_dir) / "metrics.jsonl");
  CHECK(std::count(log.begin(), log.end(), '\n') == 12);
}

TEST_CASE("an interrupted run resumes to the same bits") {
  const Bench bench;
  const OffloadChoice offload = GENERATE(OffloadChoice::kNone, OffloadChoice::kHost);
  TrainConfig config = bench.config("whole");
  config.offload = offload;
  config.optimizer_state = GENERATE(cpu_adam::MomentFormat::kF32, cpu_adam::MomentFormat::kBf16,
                                    cpu_adam::MomentFormat::kInt8);
  Recorder whole;
  run(config, whole);

  config.output_dir = bench.output("parts").string();
  config.resume = "auto";  // nothing is there yet: starts afresh
  std::vector<double> in_parts;
  for (const int64_t stop_after : {3, 4, 1000}) {
    Recorder part;
    const TrainOutcome outcome = run(config, part, stop_after);
    CHECK(outcome.interrupted == (stop_after < 1000));
    CHECK(part.first_step == static_cast<int64_t>(in_parts.size()));
    for (const double loss : losses(part)) in_parts.push_back(loss);
  }
  CHECK(in_parts == losses(whole));
  CHECK(bytes_of(checkpoint_path(bench.output("parts"), 10)) ==
        bytes_of(checkpoint_path(bench.output("whole"), 10)));
  // Resuming what is complete says so and trains no more.
  Recorder again;
  CHECK(run(config, again).step == 10);
  CHECK(again.steps.empty());
  REQUIRE_FALSE(again.notes.empty());
  CHECK_THAT(again.notes.back(), Catch::Contains("complete"));
}

TEST_CASE("accumulation is the same as one large batch, to rounding") {
  const Bench bench;
  TrainConfig config = bench.config("two");
  config.compute_dtype = DType::kF32;
  Recorder two;
  run(config, two);
  config.output_dir = bench.output("one").string();
  config.micro_batch_size = 4;
  config.gradient_accumulation_steps = 1;
  Recorder one;
  run(config, one);
  for (size_t i = 0; i < two.steps.size(); ++i) {
    CHECK(two.steps[i].loss == Approx(one.steps[i].loss).epsilon(1e-4));
    CHECK(two.steps[i].grad_norm == Approx(one.steps[i].grad_norm).epsilon(1e-3));
  }
}

TEST_CASE("a damaged checkpoint is refused by name") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.max_steps = 2;
  Recorder recorder;
  run(config, recorder);
  const fs::path checkpoint = checkpoint_path(config.output_dir, 2);
  {
    std::fstream file(checkpoint_state_file(checkpoint),
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-5, std::ios::end);
    const auto byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(-5, std::ios::end);
    file.put(byte);
  }
  CHECK(is_checkpoint(checkpoint));
  config.max_steps = 4;
  config.resume = "auto";
  Recorder again;
  CHECK_THROWS_WITH(run(config, again), Catch::Contains("damaged") && Catch::Contains("moment2"));
  config.seed = 43;
  CHECK_THROWS_AS(run(config, again), Error);
}

TEST_CASE("only the same run is continued") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.max_steps = 4;
  config.save_steps = 2;
  Recorder recorder;
  run(config, recorder);
  config.resume = "auto";
  config.max_steps = 6;
  const auto refused = [&](const TrainConfig& other, const std::string& words) {
    Recorder again;
    CHECK_THROWS_WITH(run(other, again), Catch::Contains(words));
  };
  TrainConfig other = config;
  other.seed = 1;
  refused(other, "seed");
  other = config;
  other.sequence_len = 20;
  refused(other, "data");
  other = config;
  other.shuffle = false;
  refused(other, "data");
  other = config;
  other.compute_dtype = DType::kF32;
  refused(other, "compute_dtype");
  other = config;
  other.optimizer_state = cpu_adam::MomentFormat::kInt8;
  refused(other, "optimizer_state fp32, not int8");
  // Going on from an older checkpoint would leave two histories in one directory.
  other = config;
  other.resume = checkpoint_path(config.output_dir, 2).string();
  refused(other, "checkpoint-000004");
  other.output_dir = bench.output("branch").string();
  Recorder branch;
  CHECK(run(other, branch).step == 6);
  CHECK(branch.first_step == 2);
  CHECK(std::count(branch.notes.begin(), branch.notes.end(),
                   "changed since: max_steps 6 (was 4)") == 1);
  other.output_dir = bench.output("larger batch").string();
  other.gradient_accumulation_steps = 4;
  Recorder larger;
  CHECK(run(other, larger).step == 6);
  CHECK(std::count(larger.notes.begin(), larger.notes.end(),
                   "changed since: gradient_accumulation_steps 4 (was 2), max_steps 6 (was 4), "
                   "sequences of a step 8 (was 4)") == 1);
}

TEST_CASE("what an interrupted save left behind is never resumed and is cleared away") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.max_steps = 2;
  Recorder recorder;
  run(config, recorder);
  const fs::path partial = checkpoint_path(config.output_dir, 3).string() + ".partial";
  fs::create_directory(partial);
  std::ofstream(partial / "state.safetensors") << "half";
  CHECK(list_checkpoints(config.output_dir).size() == 1);
  config.max_steps = 3;
  config.resume = "auto";
  Recorder again;
  run(config, again);
  CHECK(again.first_step == 2);
  CHECK_FALSE(fs::exists(partial));
  CHECK(list_checkpoints(config.output_dir).size() == 2);
}

TEST_CASE("export gives the masters or the weights under their own names, and trains on") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  Recorder recorder;
  run(config, recorder);
  const ExportSummary fp32 = export_model(config.output_dir, bench.output("fp32"), {});
  CHECK(fp32.type == model::ElementType::kF32);  // as the config's torch_dtype says
  export_model(config.output_dir, bench.output("bf16"),
               {.type = model::ElementType::kBf16, .max_shard_bytes = 20000});
  CHECK(fs::exists(bench.output("bf16") / "model.safetensors.index.json"));
  CHECK(read_text_file(bench.output("fp32") / "config.json") ==
        read_text_file(fs::path(config.model) / "config.json"));
  const auto masters = model::CheckpointReader::open(bench.output("fp32"));
  const auto weights = model::CheckpointReader::open(bench.output("bf16"));
  CHECK(masters.names() == weights.names());
  for (const std::string& name : masters.names()) {
    std::vector<float> a(static_cast<size_t>(masters.tensor(name).elements));
    std::vector<float> b(a.size());
    masters.read_floats(name, 0, a);
    weights.read_floats(name, 0, b);
    for (size_t i = 0; i < a.size(); ++i) REQUIRE(std::abs(a[i] - b[i]) <= std::abs(a[i]) * 0x1p-8);
  }
  CHECK_THROWS_WITH(export_model(config.output_dir, bench.output("fp32"), {}),
                    Catch::Contains("already"));

  // The export is a model to start from: its first loss is where the run had come to.
  TrainConfig next = bench.config("next");
  next.model = bench.output("fp32").string();
  next.max_steps = 1;
  Recorder on;
  run(next, on);
  CHECK(on.steps.front().loss < recorder.steps.front().loss - 0.5);
}

TEST_CASE("runs that cannot be are refused before anything is written") {
  const Bench bench;
  const auto refused = [&](TrainConfig config, ErrorKind kind, const std::string& words) {
    Recorder recorder;
    try {
      run(config, recorder);
      FAIL("not refused: " << words);
    } catch (const Error& error) {
      INFO(error.what());
      CHECK(error.kind() == kind);
      CHECK(std::string(error.what()).find(words) != std::string::npos);
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
    CHECK_FALSE(fs::exists(config.output_dir));
  };
  TrainConfig config = bench.config("never");
  config.device_memory = 10000;
  refused(config, ErrorKind::kDoesNotFit, "device memory");
  config.offload = OffloadChoice::kNone;
  refused(config, ErrorKind::kDoesNotFit, "device memory");
  config = bench.config("never");
  config.offload = OffloadChoice::kHost;
  config.host_memory = 1000;
  refused(config, ErrorKind::kDoesNotFit, "host memory");
  config = bench.config("never");
  config.sequence_len = 65;
  refused(config, ErrorKind::kUsage, "max_position_embeddings");
  config = bench.config("never");
  config.model = bench.output("nowhere").string();
  refused(config, ErrorKind::kUsage, "nowhere");
  config = bench.config("never");
  config.device = DeviceChoice::kCuda;
  refused(config, ErrorKind::kUsage, "cuda");
}

}  // namespace strata::train
