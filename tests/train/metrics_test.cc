#include "train/metrics.h"

#include <bit>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "base/random.h"
#include "catch.h"
#include "temporary_directory.h"
#include "train/process_memory.h"

namespace strata::train {
namespace {

using nlohmann::json;

TrainMetrics train_line(int64_t step) {
  TrainMetrics metrics;
  metrics.step = step;
  metrics.loss = 1.0 / static_cast<double>(step + 1);
  return metrics;
}

TEST_CASE("a line holds every field by its name", "[metrics]") {
  const TrainMetrics metrics{7, 2.5, 1.25, true, 3e-4, 1000.5, 4096, 1.5, 1ULL << 40, 12345, 678};
  CHECK(to_json(metrics) ==
        R"({"step":7,"loss":2.5,"grad_norm":1.25,"clipped":true,"lr":0.0003,)"
        R"("tokens_per_second":1000.5,"tokens":4096,"seconds":1.5,)"
        R"("device_bytes":1099511627776,"host_bytes":12345,"nvme_bytes_written":678})");
  CHECK(to_json(EvalMetrics{7, 2.25}) == R"({"step":7,"eval_loss":2.25})");
}

TEST_CASE("doubles round trip", "[metrics]") {
  constexpr uint64_t kSeed = 5;
  CAPTURE(kSeed);
  CounterRandom random(kSeed, 0);
  for (int i = 0; i < 10000;) {
    const double value = std::bit_cast<double>(random.next_u64());
    if (!std::isfinite(value)) continue;
    const double back = json::parse(to_json(EvalMetrics{1, value}))["eval_loss"].get<double>();
    REQUIRE(std::bit_cast<uint64_t>(back) == std::bit_cast<uint64_t>(value));
    ++i;
  }
}

TEST_CASE("what is not finite becomes null and is flagged", "[metrics]") {
  const double bad =
      GENERATE(std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
               -std::numeric_limits<double>::infinity());
  TrainMetrics metrics = train_line(3);
  metrics.grad_norm = bad;
  const json line = json::parse(to_json(metrics));
  CHECK(line["grad_norm"].is_null());
  CHECK(line["loss"] == 0.25);
  CHECK(line["finite"] == false);
  CHECK(json::parse(to_json(EvalMetrics{3, bad}))["finite"] == false);
  CHECK_FALSE(json::parse(to_json(train_line(3))).contains("finite"));
}

TEST_CASE("lines are in the file when append returns", "[metrics]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("metrics.jsonl");
  MetricsWriter writer(path, MetricsWriter::kFreshRun);
  CHECK(read_text_file(path).empty());
  writer.append(train_line(1));
  CHECK(read_text_file(path) == to_json(train_line(1)) + "\n");
  writer.append(EvalMetrics{1, 2.0});
  CHECK(read_text_file(path) ==
        to_json(train_line(1)) + "\n" + to_json(EvalMetrics{1, 2.0}) + "\n");
}

TEST_CASE("a resumed run goes on after the step it resumes", "[metrics]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("metrics.jsonl");
  {
    MetricsWriter writer(path, MetricsWriter::kFreshRun);
    for (int64_t step = 1; step <= 5; ++step) {
      writer.append(train_line(step));
      writer.append(EvalMetrics{step, 1.0});
    }
  }
  const auto resumed = [&](int64_t step) {
    { MetricsWriter writer(path, step); }
    return read_text_file(path);
  };
  const auto lines_to = [&](int64_t last) {
    std::string text;
    for (int64_t step = 1; step <= last; ++step) {
      text += to_json(train_line(step)) + "\n" + to_json(EvalMetrics{step, 1.0}) + "\n";
    }
    return text;
  };
  CHECK(resumed(6) == lines_to(5));
  CHECK(resumed(5) == lines_to(5));

  SECTION("later steps are cut off") {
    CHECK(resumed(3) == lines_to(3));
    MetricsWriter(path, 3).append(train_line(4));
    CHECK(read_text_file(path) == lines_to(3) + to_json(train_line(4)) + "\n");
    CHECK(resumed(0).empty());
  }
  SECTION("a torn end is cut off, wherever it is torn") {
    const std::string whole = lines_to(5);
    const std::string torn = to_json(train_line(6));
    for (size_t size = 0; size <= torn.size(); ++size) {
      CAPTURE(size);
      directory.write("metrics.jsonl", whole + torn.substr(0, size));
      REQUIRE(resumed(9) == whole);
    }
    // A power failure can leave zeros, with or without a line break.
    directory.write("metrics.jsonl", whole + std::string(20, '\0'));
    CHECK(resumed(9) == whole);
    directory.write("metrics.jsonl", whole + std::string(20, '\0') + "\n");
    CHECK(resumed(9) == whole);
  }
  SECTION("a foreign line in between does not cost what follows it") {
    const std::string text = lines_to(2) + "a note\n" + to_json(train_line(3)) + "\n";
    directory.write("metrics.jsonl", text);
    CHECK(resumed(3) == text);
  }
  SECTION("a fresh run empties the file") { CHECK(resumed(MetricsWriter::kFreshRun).empty()); }
}

TEST_CASE("a metrics file that cannot be opened is named", "[metrics]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path("missing/metrics.jsonl");
  const std::string message = message_of([&] { MetricsWriter(path, MetricsWriter::kFreshRun); });
  CHECK_THAT(message, Catch::Contains(path));
}

TEST_CASE("resident memory follows what is touched", "[process_memory]") {
  constexpr size_t kSize = size_t{64} << 20;
  constexpr size_t kSlack = size_t{8} << 20;
  const ProcessMemory before = read_process_memory();
  CHECK(before.resident_bytes > 0);
  ProcessMemory during;
  {
    const std::vector<char> block(kSize, 1);
    during = read_process_memory();
    CHECK(block[kSize / 2] == 1);
  }
  CHECK(during.resident_bytes + kSlack >= before.resident_bytes + kSize);
  const ProcessMemory after = read_process_memory();
  CHECK(after.peak_resident_bytes + kSlack >= before.resident_bytes + kSize);
  if (reset_peak_resident()) {
    const ProcessMemory reset = read_process_memory();
    CHECK(reset.peak_resident_bytes <= reset.resident_bytes + kSlack);
  } else {
    WARN("skipped: this system does not let a process reset its peak");
  }
}

}  // namespace
}  // namespace strata::train
