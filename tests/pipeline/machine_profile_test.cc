#include "pipeline/machine_profile.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "catch.h"
#include "temporary_directory.h"

namespace strata::pipeline {
namespace {

using Json = nlohmann::ordered_json;

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

/// What parsing says, which must be a usage error.
std::string refusal(const std::string& json) {
  try {
    (void)parse_profile(json, "box.json");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kUsage);
    return error.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("shipped profiles are whole, and every figure says where it comes from") {
  const std::vector<std::string_view> names = shipped_profiles();
  CHECK(std::is_sorted(names.begin(), names.end()));
  for (const std::string_view wanted : {"a100", "h100", "h200", "rtx4090-ddr5", "rtx4090-server"}) {
    CHECK(std::find(names.begin(), names.end(), wanted) != names.end());
  }
  for (const std::string_view name : names) {
    INFO(name);
    const MachineProfile profile = find_profile(std::string(name));
    CHECK(profile.name == name);
    CHECK(!profile.measured);
    CHECK(profile.device == "cuda");
    CHECK(profile.sources.size() == figure_keys().size());
    for (const std::string_view key : figure_keys()) CHECK(profile.sources.count(key) == 1);
    // What is true of any such machine, so that a slip in an exponent is found.
    CHECK(profile.matmul_bf16_flops_per_s > profile.matmul_fp32_flops_per_s);
    CHECK(profile.device_memory_bytes_per_s > profile.adam_bytes_per_s);
    CHECK(profile.adam_bytes_per_s > profile.upload_bytes_per_s);
    CHECK(profile.host_memory_bytes_per_s >= profile.adam_bytes_per_s);
    CHECK(profile.compute_with_adam == 1);
    CHECK(profile.read_bytes_per_s >= profile.write_bytes_per_s);
    CHECK(profile.read_bytes_per_s < 8e9 * profile.drives);
    CHECK(profile.host_memory_bytes > profile.device_memory_bytes);
    CHECK(profile.nvme_bytes > profile.host_memory_bytes);
    CHECK(profile.launch_s < 1e-3);
    CHECK(profile.collective_bytes_per_s > profile.network_bytes_per_s);
    CHECK(profile.network_latency_s > profile.collective_latency_s);
    CHECK(profile.device_memory_bytes_per_s > profile.collective_bytes_per_s);
  }
}

TEST_CASE("figures between ranks may be missing and are unknown then") {
  Json root = Json::parse(to_json(find_profile("h100")));
  for (const char* key : {"ranks_per_node", "collective_bytes_per_s", "collective_latency_s",
                          "network_bytes_per_s", "network_latency_s"}) {
    REQUIRE(root["figures"].erase(key) == 1);
  }
  const MachineProfile old = parse_profile(root.dump(), "old.json");
  CHECK(old.ranks_per_node == 0);
  CHECK(old.collective_bytes_per_s == 0);
  CHECK(old.network_bytes_per_s == 0);
  CHECK(old.sources.size() == figure_keys().size() - 5);
  CHECK(parse_profile(to_json(old), "old.json") == old);
}

TEST_CASE("a profile comes back from its file as it was") {
  const TemporaryDirectory directory;
  MachineProfile profile = find_profile("h200");
  profile.name = "mine";
  profile.measured = true;
  profile.device = "host";
  profile.upload_bytes_per_s = 1.0 / 3 * 1e11;  // needs all 17 digits
  profile.both_links = 0.5;
  profile.nvme_bytes = 0;
  profile.drives = 0;
  profile.read_bytes_per_s = profile.write_bytes_per_s = 0;
  profile.sources["launch_s"] = "a \"quoted\" source";
  const std::string path = directory.path("mine.json");
  write_profile(path, profile);
  CHECK(read_profile(path) == profile);
  CHECK(find_profile(path) == profile);
}

TEST_CASE("what lanes cost each other comes from the profile's speeds") {
  MachineProfile profile = find_profile("h200");
  profile.both_links = 0.75;
  profile.compute_with_adam = 0.5;
  profile.host_memory_bytes_per_s = 100e9;
  profile.upload_bytes_per_s = 50e9;
  profile.adam_bytes_per_s = 80e9;
  profile.write_bytes_per_s = 5e9;
  const LaneSharing sharing = profile.sharing();
  CHECK(sharing.both_links == 0.75);
  CHECK(sharing.compute_with_cpu == 0.5);
  CHECK(sharing.host_memory[static_cast<size_t>(Lane::kUpload)] == 0.5);
  CHECK(sharing.host_memory[static_cast<size_t>(Lane::kCpu)] == 0.8);
  CHECK(sharing.host_memory[static_cast<size_t>(Lane::kWrite)] == 0.05);
  CHECK(sharing.host_memory[static_cast<size_t>(Lane::kCompute)] == 0);
}

TEST_CASE("a profile that could not be read is not written") {
  const TemporaryDirectory directory;
  MachineProfile profile = find_profile("a100");
  profile.download_bytes_per_s = 0;
  const std::string path = directory.path("bad.json");
  const std::string message = message_of([&] { write_profile(path, profile); });
  CHECK(message.find("figures.download_bytes_per_s.value") != std::string::npos);
  CHECK(!std::filesystem::exists(path));
}

TEST_CASE("a name that is no profile names those that are") {
  const std::string message = message_of([] { (void)find_profile("rtx9090"); });
  CHECK(message.find("'rtx9090'") != std::string::npos);
  CHECK(message.find("rtx4090-ddr5") != std::string::npos);
}

TEST_CASE("bad profiles are refused with file and key") {
  const std::string good = to_json(find_profile("rtx4090-server"));
  REQUIRE(refusal(good) == "accepted");
  // `key` of `root`, a dotted path, set to `value`; or taken out.
  const auto with = [&](const std::string& path, const Json& value) {
    Json root = Json::parse(good);
    root[Json::json_pointer(path)] = value;
    return root.dump();
  };
  const auto without = [&](const std::string& parent, const std::string& key) {
    Json root = Json::parse(good);
    REQUIRE(root[Json::json_pointer(parent)].erase(key) == 1);
    return root.dump();
  };
  const struct {
    std::string json;
    std::string says;
  } cases[] = {
      {"", "not a machine profile in JSON"},
      {good.substr(0, good.size() / 2), "not a machine profile in JSON"},
      {good + "{}", "not a machine profile in JSON"},
      {"[1, 2]", "must be an object"},
      {with("/version", 2), "'version' is 2"},
      {with("/version", "1"), "'version' is \"1\""},
      {without("", "version"), "'version' is missing"},
      {without("", "machine"), "'machine' is missing"},
      {with("/speed", 3), "'speed' is not a key"},
      {with("/name", ""), "'name' is empty"},
      {with("/name", 7), "'name' must be a text"},
      {with("/device", "tpu"), "'device' is 'tpu'"},
      {with("/measured", "yes"), "'measured' must be true or false"},
      {with("/figures", 1), "'figures' must be an object"},
      {without("/figures", "launch_s"), "'figures.launch_s' is missing"},
      {with("/figures/warp_factor", 9), "'figures.warp_factor' is not a key"},
      {with("/figures/launch_s", 1e-5), "'figures.launch_s' must be an object"},
      {without("/figures/launch_s", "source"), "'figures.launch_s.source' is missing"},
      {with("/figures/launch_s/source", " "), "'figures.launch_s.source' is empty"},
      {with("/figures/launch_s/unit", "s"), "'figures.launch_s.unit' is not a key"},
      {with("/figures/launch_s/value", -1e-5), "'figures.launch_s.value' is -1e-05"},
      {with("/figures/launch_s/value", "fast"), "'figures.launch_s.value' must be a number"},
      {with("/figures/launch_s/value", nullptr), "'figures.launch_s.value' must be a number"},
      {with("/figures/upload_bytes_per_s/value", 0), "'figures.upload_bytes_per_s.value' is 0"},
      {with("/figures/upload_bytes_per_s/value", 25), "'figures.upload_bytes_per_s.value' is 25"},
      {with("/figures/matmul_bf16_flops_per_s/value", 145),
       "'figures.matmul_bf16_flops_per_s.value' is 145"},
      {with("/figures/both_links/value", 1.2), "'figures.both_links.value' is 1.2"},
      {with("/figures/host_memory_bytes/value", 64), "'figures.host_memory_bytes.value' is 64"},
      {with("/figures/host_memory_bytes/value", 1.5e9), "must be a whole number"},
      {with("/figures/host_memory_bytes/value", -68719476736), "'figures.host_memory_bytes.value'"},
      {with("/figures/drives/value", 2.5), "'figures.drives.value' must be a whole number"},
      {with("/figures/drives/value", 0), "with 0 drives"},
      {with("/figures/ranks_per_node/value", 0), "'figures.ranks_per_node.value' is 0"},
      {with("/figures/network_bytes_per_s/value", -1), "'figures.network_bytes_per_s.value'"},
      {without("/figures/network_latency_s", "source"),
       "'figures.network_latency_s.source' is missing"},
      {with("/figures/read_bytes_per_s/value", 0), "with 4 drives"},
      {replaced(good, "\"launch_s\": {\n      \"value\": 2e-05",
                "\"launch_s\": {\n      \"value\": 1e999"),
       "not a machine profile in JSON"},
      {replaced(good, "\"name\":", "\"name\": \"first\", \"name\":"), "'name' is there twice"},
      {replaced(good, "\"drives\": {", "\"drives\": {\"value\": 1,"), "'value' is there twice"},
  };
  for (const auto& bad : cases) {
    const std::string message = refusal(bad.json);
    INFO(bad.says << " <- " << message);
    CHECK(message.find("box.json: ") == 0);
    CHECK(message.find(bad.says) != std::string::npos);
  }
}

}  // namespace strata::pipeline
