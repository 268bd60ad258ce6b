#include "train/config.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "base/error.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::train {
namespace {

TrainConfig read_text(const std::string& text) {
  const TemporaryDirectory directory;
  return read_config(directory.write("run.yaml", text));
}

/// Checks that reading `text` is refused with a message that has all of `words`.
void check_refused(const std::string& text, const std::vector<std::string>& words) {
  CAPTURE(text);
  try {
    read_text(text);
    FAIL_CHECK("was not refused");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kUsage);
    CHECK_THAT(error.what(), Catch::Contains("run.yaml'"));
    for (const std::string& word : words) CHECK_THAT(error.what(), Catch::Contains(word));
    CHECK_THAT(error.what(), !Catch::Contains("\n"));
  }
}

/// A value other than the default for each key.
const std::vector<std::pair<std::string, std::string>> kOtherValues{
    {"model", "models/tiny"},
    {"datasets", "a.txt,b.bin:tokens_u32"},
    {"eval_datasets", "c.md"},
    {"val_set_size", "0.125"},
    {"sequence_len", "1048576"},
    {"micro_batch_size", "3"},
    {"gradient_accumulation_steps", "4"},
    {"max_steps", "1000000000000"},
    {"num_epochs", "7"},
    {"learning_rate", "0.1234567890123"},
    {"lr_scheduler", "linear"},
    {"warmup_steps", "9"},
    {"cosine_min_lr_ratio", "1"},
    {"weight_decay", "0"},
    {"adam_beta1", "0"},
    {"adam_beta2", "0.999"},
    {"adam_epsilon", "1e-15"},
    {"max_grad_norm", "0"},
    {"seed", "9007199254740991"},
    {"shuffle", "false"},
    {"output_dir", "out"},
    {"resume", "auto"},
    {"save_strategy", "no"},
    {"save_steps", "10"},
    {"save_total_limit", "2"},
    {"eval_steps", "11"},
    {"eval_max_batches", "12"},
    {"logging_steps", "1"},
    {"device", "host"},
    {"device_memory", "24GiB"},
    {"host_memory", "1000001"},
    {"nvme", "/mnt/a:512GiB,b,/mnt/c:d"},
    {"commit", "save"},
    {"threads", "2"},
    {"offload", "host"},
    {"weight_slots", "3"},
    {"profile", "h100"},
    {"trace", "trace.json"},
    {"optimizer_state", "int8"},
    {"compute_dtype", "fp32"},
    {"sharding", "hybrid_shard"},
    {"shard_group_size", "4"},
    {"reduce_dtype", "bf16"},
    {"rank_timeout", "7"},
    {"upload_bandwidth", "3GiB"},
    {"download_bandwidth", "800MB"},
    {"nvme_read_bandwidth", "7GB"},
    {"nvme_write_bandwidth", "5GB"},
};

TEST_CASE("every key sets a member of its own and reads back", "[config]") {
  REQUIRE(config_keys().size() == kOtherValues.size());
  std::set<std::string_view> names;
  TrainConfig all;
  for (size_t i = 0; i < kOtherValues.size(); ++i) {
    const ConfigKey& key = config_keys()[i];
    const auto& [name, text] = kOtherValues[i];
    CAPTURE(name);
    CHECK(key.name == name);
    CHECK_FALSE(key.help.empty());
    CHECK_FALSE(key.type.empty());
    CHECK(names.insert(key.name).second);

    TrainConfig config;
    CHECK(get(config, name) != text);
    set(config, name, text);
    CHECK(get(config, name) == text);
    // Only this key has changed: with its default put back, everything is as before.
    set(config, name, get(TrainConfig{}, name));
    CHECK(config == TrainConfig{});
    set(all, name, text);
  }
  for (const auto& [name, text] : kOtherValues) CHECK(get(all, name) == text);
}

TEST_CASE("the defaults pass their own checks", "[config]") {
  for (const ConfigKey& key : config_keys()) {
    CAPTURE(key.name);
    TrainConfig config;
    CHECK_NOTHROW(set(config, key.name, get(config, key.name)));
    CHECK(config == TrainConfig{});
  }
}

TEST_CASE("a stored configuration is the same when read", "[config]") {
  CHECK(read_text(to_yaml(TrainConfig{})) == TrainConfig{});
  TrainConfig config;
  for (const auto& [name, text] : kOtherValues) set(config, name, text);
  CHECK(read_text(to_yaml(config)) == config);

  // What YAML would take for something else, and paths that flags cannot give.
  for (const std::string odd :
       {"null", "~", "true", "12", "a: b", "#x", "- x", "it's \"so\"", " a ", "a,b.txt", "é",
        "a\\b", "*x", "{a}", "text", "a\tb", "x:text"}) {
    CAPTURE(odd);
    TrainConfig strange;
    strange.model = odd;
    strange.datasets = {{odd, SourceType::kAuto}, {odd, SourceType::kText}};
    strange.nvme = {{odd, std::nullopt}, {odd, size_t{1} << 30}};
    CHECK(read_text(to_yaml(strange)) == strange);
  }
}

TEST_CASE("a YAML file sets what it says and leaves the rest", "[config]") {
  const TrainConfig config = read_text(R"(
# A comment.
model: models/llama
datasets:
  - a.txt
  - path: b.bin
    type: tokens_u32
  - c.bin:tokens_u16
eval_datasets: d.txt
learning_rate: 1e-3
max_steps: "20"
shuffle: no
resume:
device_memory: 1.5GiB
upload_bandwidth: 12GB/s
optimizer_state: bf16
compute_dtype: fp32
nvme:
  - /mnt/a
  - /mnt/b:500GB
  - c:d
commit: save
save_strategy: no
weight_slots:
profile: machine.json
trace: last.json
sharding: shard_grad_op
reduce_dtype: bf16
nvme_read_bandwidth: 7GB/s
nvme_write_bandwidth: 5GB
)");
  TrainConfig expected;
  expected.model = "models/llama";
  expected.datasets = {{"a.txt", SourceType::kAuto},
                       {"b.bin", SourceType::kTokensU32},
                       {"c.bin", SourceType::kTokensU16}};
  expected.eval_datasets = {{"d.txt", SourceType::kAuto}};
  expected.learning_rate = 1e-3;
  expected.max_steps = 20;
  expected.shuffle = false;
  expected.device_memory = size_t{3} << 29;
  expected.upload_bandwidth = 12e9;
  expected.optimizer_state = cpu_adam::MomentFormat::kBf16;
  expected.compute_dtype = DType::kF32;
  expected.nvme = {{"/mnt/a", std::nullopt}, {"/mnt/b", 500'000'000'000}, {"c:d", std::nullopt}};
  expected.commit = CommitChoice::kSave;
  expected.save_strategy = SaveStrategy::kNo;
  expected.profile = "machine.json";
  expected.trace = "last.json";
  expected.sharding = pipeline::Sharding::kShardGradOp;
  expected.reduce_dtype = DType::kBf16;
  expected.nvme_read_bandwidth = 7e9;
  expected.nvme_write_bandwidth = 5e9;
  CHECK(config == expected);
}

TEST_CASE("drives are written in three ways", "[config]") {
  const std::vector<DriveSpec> expected{{"/mnt/a", size_t{3} << 30}, {"/mnt/b", std::nullopt}};
  CHECK(read_text("nvme: [/mnt/a:3GiB, /mnt/b]\n").nvme == expected);
  CHECK(read_text("nvme:\n  - /mnt/a:3GiB\n  - /mnt/b\n").nvme == expected);
  CHECK(read_text("nvme: /mnt/a:3GiB, /mnt/b\n").nvme == expected);
  TrainConfig config;
  set(config, "nvme", "/mnt/a:3GiB,/mnt/b");
  CHECK(config.nvme == expected);
  // Taken back, as a flag can do with what the file says.
  set(config, "nvme", "");
  CHECK(config.nvme.empty());
  CHECK(read_text("nvme: []\n").nvme.empty());
  CHECK(read_text("nvme:\n").nvme.empty());
}

TEST_CASE("files that are no configuration are refused", "[config]") {
  const TemporaryDirectory directory;
  const std::string missing = directory.path("missing.yaml");
  CHECK_THAT(message_of([&] { (void)read_config(missing); }), Catch::Contains(missing));
  check_refused("", {"empty"});
  check_refused("# nothing\n", {"empty"});
  check_refused("- model\n", {"line 1", "map"});
  check_refused("model\n", {"line 1", "map"});
  check_refused("model: a\n---\nmodel: b\n", {"2 YAML documents"});
  check_refused("model: a\ndatasets: [a, b\nseed: 1\n", {"line 3", "not YAML"});
  check_refused("model: a\n\tseed: 1\n", {"line 2", "not YAML"});
  check_refused("model: \"a\n", {"not YAML"});
  check_refused("model: 'a\nseed: 1\n\n", {"line 2", "not YAML"});
}

TEST_CASE("unknown keys are refused with the nearest known one", "[config]") {
  check_refused("model: a\nlearning_rte: 1\n", {"line 2", "'learning_rte'", "mean learning_rate?"});
  check_refused("max_step: 1\n", {"line 1", "mean max_steps?"});
  check_refused("gradient_accumulation: 1\n", {"mean gradient_accumulation_steps?"});
  check_refused("Seed: 1\n", {"mean seed?"});
  check_refused("lr: 1\n", {"'lr'"});
  const std::string message = message_of([] { (void)find_key("completely_different"); });
  CHECK_THAT(message, Catch::Contains("'completely_different'"));
  CHECK_THAT(message, !Catch::Contains("did you mean"));
}

TEST_CASE("keys given twice are refused", "[config]") {
  check_refused("seed: 1\nmodel: a\nseed: 1\n", {"line 3", "seed", "second time"});
}

TEST_CASE("values of the wrong type or size are refused", "[config]") {
  const std::vector<std::pair<std::string, std::vector<std::string>>> wrong{
      {"sequence_len",
       {"", "abc", "1.5", "0", "-1", "1048577", "12x", "99999999999999999999", "[1]", "{a: 1}",
        "true", "1e3", "0x10"}},
      {"micro_batch_size", {"0", "-8"}},
      {"learning_rate", {"", "abc", "-1e-3", "11", "nan", ".nan", "inf", "1e999", "[1]"}},
      {"adam_beta1", {"1", "-0.1", "nan"}},
      {"adam_epsilon", {"0", "-1"}},
      {"val_set_size", {"1", "-0.1", "95"}},
      {"cosine_min_lr_ratio", {"1.01", "-1"}},
      {"weight_decay", {"-0.1"}},
      {"max_grad_norm", {"-1", "nan"}},
      {"seed", {"-1", "9007199254740992"}},
      {"logging_steps", {"0"}},
      {"shuffle", {"", "maybe", "1", "[true]"}},
      {"lr_scheduler", {"", "cosin", "Cosine"}},
      {"device", {"gpu"}},
      {"offload", {"disk"}},
      {"optimizer_state", {"fp8"}},
      {"compute_dtype", {"fp16"}},
      {"device_memory", {"lots", "-1GiB", "0", "24gib", "nan", "1GiB/s"}},
      {"upload_bandwidth", {"fast", "0", "1GiB/h"}},
      {"model", {"[a, b]", "{path: a}"}},
      {"datasets",
       {"{path: a}", "[[a]]", "[{type: text}]", "[{path: a, type: text, x: 1}]",
        "[{path: a, type: jsonl}]", "[{path: [a]}]", "[\"\"]", "a,", "',a'", "[':text']"}},
      {"weight_slots", {"0", "1025", "two"}},
      {"nvme",
       {"a,", "',a'", "/mnt/a:0", "/mnt/a:12parsecs", "/mnt/a:5GB/s", "{a: 1GiB}", "[[a]]",
        "[{path: a}]", "[\"\"]", "[':1GiB']"}},
      {"commit", {"", "steps", "never", "[step]"}},
      {"save_strategy", {"", "epoch", "false", "steps,no"}},
      {"profile", {"[h100]", "{name: h100}"}},
      {"trace", {"[a, b]"}},
      {"sharding", {"", "zero3", "full_shard,no_shard"}},
      {"shard_group_size", {"-1", "two"}},
      {"reduce_dtype", {"fp16"}},
      {"rank_timeout", {"0", "soon"}},
      {"nvme_read_bandwidth", {"fast", "0", "-1GB/s", "1GB/min"}},
      {"nvme_write_bandwidth", {"fast", "0", "-1GB/s", "1GB/min"}},
      {"num_epochs", {"0"}},
  };
  for (const auto& [key, texts] : wrong) {
    for (const std::string& text : texts) {
      check_refused("# A run.\n" + key + ": " + text + "\n", {key, "line 2"});
    }
  }
}

TEST_CASE("an error in a list names the line of the entry", "[config]") {
  check_refused("datasets:\n  - a.txt\n  - path: b.bin\n    type: words\n",
                {"line 3", "datasets", "tokens_u16", "'words'"});
  check_refused("nvme:\n  - /mnt/a\n  - [b]\n", {"line 3", "nvme", "PATH:BYTES"});
}

TEST_CASE("a refused value leaves the config as it was", "[config]") {
  TrainConfig config;
  for (const auto& [name, text] : kOtherValues) set(config, name, text);
  const TrainConfig before = config;
  for (const std::string_view name : {"datasets", "sequence_len", "device_memory", "shuffle"}) {
    CHECK_THROWS_AS(set(config, name, "a,,"), Error);
  }
  CHECK(config == before);
}

TEST_CASE("changes are told by key", "[config]") {
  TrainConfig before;
  CHECK(changes(before, before).empty());
  TrainConfig after = before;
  set(after, "learning_rate", "1e-4");
  set(after, "profile", "h100");
  set(before, "trace", "trace.json");
  const std::vector<std::string> all = changes(before, after);
  REQUIRE(all.size() == 3);
  CHECK(std::count(all.begin(), all.end(), "profile h100 (was not set)") == 1);
  CHECK(std::count(all.begin(), all.end(), "trace not set (was trace.json)") == 1);
  CHECK(std::count(all.begin(), all.end(),
                   "learning_rate 0.0001 (was " + get(before, "learning_rate") + ")") == 1);
}

TEST_CASE("messages say what was expected", "[config]") {
  TrainConfig config;
  const auto message = [&](std::string_view name, std::string_view text) {
    return message_of([&] { set(config, name, text); });
  };
  CHECK(message("sequence_len", "0") ==
        "sequence_len must be a whole number from 1 to 1048576, not '0'");
  CHECK(message("max_steps", "many") ==
        "max_steps must be a whole number from 0 to 1000000000000, not 'many'");
  CHECK(message("learning_rate", "nan") ==
        "learning_rate must be a number from 0 to 10, not 'nan'");
  CHECK(message("adam_beta1", "1") == "adam_beta1 must be a number from 0 to below 1, not '1'");
  CHECK(message("device", "gpu") == "device must be one of auto, cuda, host, not 'gpu'");
  CHECK(message("device_memory", "big") ==
        "device_memory must be an amount of memory such as 512MiB or 24GiB, not 'big'");
  CHECK(message("commit", "always") == "commit must be one of step, save, not 'always'");
  CHECK(message("save_strategy", "all") == "save_strategy must be one of steps, no, not 'all'");
  CHECK(message("offload", "disk") == "offload must be one of auto, none, host, nvme, not 'disk'");
  CHECK(message("nvme", "/mnt/a:7x") ==
        "nvme must be directories with amounts such as /mnt/drive:500GB, not '/mnt/a:7x'");
  CHECK(message("nvme_read_bandwidth", "x") ==
        "nvme_read_bandwidth must be an amount for each second such as 800MB/s or 12GiB/s, not "
        "'x'");
}

TEST_CASE("what is missing or does not go together is refused", "[config]") {
  TrainConfig config;
  const auto problem = [&] { return message_of([&] { check(config); }); };
  CHECK_THAT(problem(), Catch::Contains("model is missing"));
  config.model = "m";
  CHECK_THAT(problem(), Catch::Contains("datasets is missing"));
  set(config, "datasets", "a.txt");
  CHECK_THAT(problem(), Catch::Contains("output_dir is missing"));
  CHECK_NOTHROW(check(config, {"model", "datasets"}));
  config.output_dir = "out";
  CHECK(problem().empty());

  config.warmup_steps = 11;
  CHECK(problem().empty());
  config.max_steps = 11;
  CHECK(problem().empty());
  config.max_steps = 10;
  CHECK_THAT(problem(), Catch::Contains("warmup_steps (11)"));
  config.warmup_steps = 0;

  config.sequence_len = 1 << 20;
  config.micro_batch_size = 2047;
  CHECK(problem().empty());
  config.micro_batch_size = 2048;
  CHECK_THAT(problem(), Catch::Contains("micro_batch_size (2048)"));
  config.micro_batch_size = 1;

  config.offload = OffloadChoice::kNvme;
  CHECK_THAT(problem(), Catch::Contains("offload is nvme") && Catch::Contains("no directory"));
  set(config, "nvme", "/mnt/a");
  CHECK(problem().empty());
}

TEST_CASE("types describe what can be given", "[config]") {
  CHECK(find_key("lr_scheduler").type == "cosine|linear|constant");
  CHECK(find_key("shuffle").type == "true|false");
  CHECK(find_key("device_memory").type == "BYTES");
  CHECK(find_key("upload_bandwidth").type == "BYTES/s");
  CHECK(find_key("sequence_len").type == "N");
  CHECK(find_key("nvme").type == "PATH[:BYTES],...");
  CHECK(find_key("commit").type == "step|save");
  CHECK(find_key("offload").type == "auto|none|host|nvme");
}

}  // namespace
}  // namespace strata::train
