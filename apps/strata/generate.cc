#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "apps/strata/commands.h"
#include "apps/strata/console.h"
#include "apps/strata/device_option.h"
#include "base/bytes.h"
#include "base/error.h"
#include "gpu/open_device.h"
#include "model/generator.h"
#include "model/tokenizer.h"
#include "model/weights.h"
#include "pipeline/executor.h"
#include "train/checkpoint.h"
#include "train/export.h"
#include "train/process_memory.h"

namespace strata::app {
namespace {

namespace fs = std::filesystem;

struct Arguments {
  std::string source;
  std::string prompt = "\n";
  std::vector<int32_t> prompt_ids;
  int64_t max_tokens = 256;
  int64_t context = 0;
  int threads = 0;
  gpu::DeviceChoice device = gpu::DeviceChoice::kAuto;
  model::SamplingOptions sampling;
  bool json = false;
};

/// Ids of the prompt, each one in the vocabulary.
std::vector<int32_t> encode_prompt(const Arguments& arguments, int64_t vocabulary) {
  const model::ByteTokenizer bytes;
  std::vector<int32_t> ids = arguments.prompt_ids;
  if (ids.empty()) {
    if (vocabulary != bytes.vocab_size()) {
      throw usage_error(
          fmt::format("'{}' has a vocabulary of {}, and text is only known for byte "
                      "models (256); give token ids with --prompt-ids",
                      arguments.source, vocabulary));
    }
    ids = bytes.encode(arguments.prompt);
  }
  if (ids.empty()) throw usage_error("the prompt is empty; give at least one character");
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocabulary) {
      throw usage_error(
          fmt::format("prompt id {} is outside the vocabulary of {}", id, vocabulary));
    }
  }
  return ids;
}

void load(const fs::path& source, const model::Llama& llama, pipeline::Executor& executor) {
  if (train::is_checkpoint(source)) {
    train::load_checkpoint(source, llama, executor);
  } else {
    model::load_weights(model::CheckpointReader::open(source), llama, executor);
  }
}

void run(const Arguments& arguments) {
  fs::path source = arguments.source;
  // A run's directory stands for its newest checkpoint; another one is a model itself.
  std::error_code none;
  if (!train::list_checkpoints(source).empty() || !fs::exists(source / "config.json", none)) {
    source = train::find_checkpoint(source);
  }
  const model::LlamaConfig config = model::read_llama_config(source);
  std::vector<int32_t> ids = encode_prompt(arguments, config.vocab_size);
  const int64_t longest = arguments.context > 0
                              ? std::min(arguments.context, config.max_position_embeddings)
                              : std::min<int64_t>(config.max_position_embeddings, 2048);
  const int64_t context =
      std::min(longest, static_cast<int64_t>(ids.size()) + arguments.max_tokens);

  const size_t available = train::available_memory_bytes();
  const gpu::OpenedDevice opened =
      gpu::open_device({.choice = arguments.device,
                        .host = {.threads = arguments.threads, .memory_bytes = available}});
  if (!opened.note.empty()) say(opened.note);
  gpu::Device& device = *opened.device;
  const DType dtype =
      train::is_checkpoint(source) ? train::read_run_state(source).compute_dtype : DType::kBf16;
  const model::Llama llama(config, dtype, context);
  pipeline::Plan plan = model::generation_plan(llama, device.operators(), context);
  const auto require = [](size_t needed, size_t free, std::string_view where) {
    if (needed <= free) return;
    throw Error(ErrorKind::kDoesNotFit,
                fmt::format("generating needs {} of {}, and {} are free; lower --context",
                            format_bytes(needed), where, format_bytes(free)));
  };
  const size_t on_device = plan.bytes(pipeline::Tier::kDevice);
  const size_t on_host = plan.bytes(pipeline::Tier::kHost);
  if (device.kind() == "host") {
    require(on_device + on_host, available, "memory");
  } else {
    require(on_device, device.free_memory_bytes(), "device memory");
    require(on_host, available, "host memory");
  }
  pipeline::Executor executor(device, llama, std::move(plan));
  load(source, llama, executor);
  model::Generator generator(llama, executor);

  const bool text = arguments.prompt_ids.empty();
  const model::ByteTokenizer bytes;
  if (!arguments.json && text) fmt::print("{}", arguments.prompt);
  const size_t prompt_length = ids.size();
  for (int64_t i = 0; i < arguments.max_tokens; ++i) {
    const int32_t id = generator.next(ids, arguments.sampling);
    if (std::find(config.eos_token_ids.begin(), config.eos_token_ids.end(), id) !=
        config.eos_token_ids.end()) {
      break;
    }
    ids.push_back(id);
    if (arguments.json) continue;
    fmt::print("{}", text ? bytes.decode({&id, 1}) : fmt::format("{}{}", i == 0 ? "" : " ", id));
    std::fflush(stdout);
  }
  if (!arguments.json) {
    fmt::print("\n");
    return;
  }
  const std::vector<int32_t> generated(ids.begin() + static_cast<std::ptrdiff_t>(prompt_length),
                                       ids.end());
  nlohmann::ordered_json json{{"schema", 1}, {"model", source.string()}, {"ids", generated}};
  if (text) json["text"] = bytes.decode(generated);
  // A byte model may end within a character; JSON is UTF-8.
  fmt::print("{}\n", json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

void add_generate(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = app.add_subcommand("generate", "Sample text from a model");
  command
      ->add_option("model", arguments->source,
                   "Output directory of a run, a checkpoint in it, or a Hugging Face directory")
      ->required()
      ->type_name("MODEL");
  CLI::Option* prompt =
      command->add_option("--prompt", arguments->prompt, "Text to continue (byte-level models)");
  command->add_option("--prompt-ids", arguments->prompt_ids, "Token ids to continue: 1,2,3")
      ->delimiter(',')
      ->excludes(prompt);
  command->add_option("--max-tokens", arguments->max_tokens, "Tokens to generate")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--temperature", arguments->sampling.temperature, "0: the likeliest token")
      ->check(CLI::Range(0.0, 100.0))
      ->check([](const std::string& text) {
        return text.find("nan") == std::string::npos ? "" : "a number is needed";
      })
      ->capture_default_str();
  command->add_option("--top-k", arguments->sampling.top_k, "Choose among the k likeliest; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--seed", arguments->sampling.seed, "Of the random choices")
      ->capture_default_str();
  command
      ->add_option("--context", arguments->context,
                   "Tokens that the model looks back; 0: all it knows, at most 2048")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--threads", arguments->threads, "0: one for each core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  add_device_option(*command, arguments->device);
  command->add_flag("--json", arguments->json, "Print ids and text as JSON");
  command->footer(
      "Examples:\n"
      "  strata generate runs/mine --prompt 'In the beginning' --max-tokens 400\n"
      "  strata generate runs/mine/checkpoint-001000 --temperature 0 --json\n"
      "  strata generate exported/ --prompt-ids 1,15043 --top-k 40");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace strata::app
