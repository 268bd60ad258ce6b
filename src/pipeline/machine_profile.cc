#include "pipeline/machine_profile.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <variant>

#include "base/error.h"
#include "base/file.h"
#include "pipeline/shipped_profiles.h"

namespace strata::pipeline {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;

using Member =
    std::variant<size_t MachineProfile::*, double MachineProfile::*, int MachineProfile::*>;

enum class Needed : uint8_t {
  kAlways,
  kWithDrives,  // 0 without drives, within the bounds with them
  kNever,       // 0 where the file does not have it
};

/// A figure, and what it can be on any machine.
struct Figure {
  std::string_view key;
  Member member;
  double least, most;
  Needed needed = Needed::kAlways;
};

const Figure kFigures[] = {
    {"device_memory_bytes", &MachineProfile::device_memory_bytes, 0x1p20, 0x1p50},
    {"host_memory_bytes", &MachineProfile::host_memory_bytes, 0x1p20, 0x1p50},
    {"nvme_bytes", &MachineProfile::nvme_bytes, 0x1p20, 0x1p60, Needed::kWithDrives},
    {"matmul_bf16_flops_per_s", &MachineProfile::matmul_bf16_flops_per_s, 1e7, 1e18},
    {"matmul_fp32_flops_per_s", &MachineProfile::matmul_fp32_flops_per_s, 1e7, 1e18},
    {"device_memory_bytes_per_s", &MachineProfile::device_memory_bytes_per_s, 1e6, 1e15},
    {"upload_bytes_per_s", &MachineProfile::upload_bytes_per_s, 1e5, 1e14},
    {"download_bytes_per_s", &MachineProfile::download_bytes_per_s, 1e5, 1e14},
    {"both_links", &MachineProfile::both_links, 0.5, 1},
    {"adam_bytes_per_s", &MachineProfile::adam_bytes_per_s, 1e6, 1e14},
    {"host_memory_bytes_per_s", &MachineProfile::host_memory_bytes_per_s, 1e6, 1e14},
    {"compute_with_adam", &MachineProfile::compute_with_adam, 0.1, 1},
    {"read_bytes_per_s", &MachineProfile::read_bytes_per_s, 1e5, 1e13, Needed::kWithDrives},
    {"write_bytes_per_s", &MachineProfile::write_bytes_per_s, 1e5, 1e13, Needed::kWithDrives},
    {"drives", &MachineProfile::drives, 0, 1024},
    {"launch_s", &MachineProfile::launch_s, 0, 1},
    {"link_latency_s", &MachineProfile::link_latency_s, 0, 1},
    {"ranks_per_node", &MachineProfile::ranks_per_node, 1, 1024, Needed::kNever},
    {"collective_bytes_per_s", &MachineProfile::collective_bytes_per_s, 1e5, 1e14, Needed::kNever},
    {"collective_latency_s", &MachineProfile::collective_latency_s, 0, 1, Needed::kNever},
    {"network_bytes_per_s", &MachineProfile::network_bytes_per_s, 1e4, 1e14, Needed::kNever},
    {"network_latency_s", &MachineProfile::network_latency_s, 0, 1, Needed::kNever},
};

/// Reads members of objects, naming file and key where something is wrong.
class Reader {
 public:
  explicit Reader(const std::string& origin) : origin_(origin) {}

  [[noreturn]] void refuse(std::string_view key, std::string_view what) const {
    throw usage_error(fmt::format("{}: '{}' {}", origin_, key, what));
  }
  /// That `object` is one and has all of `keys`, perhaps of `optional`, and no others.
  void check_keys(const Json& object, std::string_view path,
                  const std::vector<std::string_view>& keys,
                  const std::vector<std::string_view>& optional = {}) const {
    if (!object.is_object()) refuse(path, "must be an object in braces");
    const auto full = [&](std::string_view key) {
      return path.empty() ? std::string(key) : fmt::format("{}.{}", path, key);
    };
    const auto has = [](const std::vector<std::string_view>& all, std::string_view key) {
      return std::find(all.begin(), all.end(), key) != all.end();
    };
    for (const auto& [key, value] : object.items()) {
      if (!has(keys, key) && !has(optional, key)) {
        refuse(full(key), "is not a key of machine profiles; take it out");
      }
    }
    for (const std::string_view key : keys) {
      if (!object.contains(key)) refuse(full(key), "is missing");
    }
  }
  std::string text(const Json& value, std::string_view key) const {
    if (!value.is_string()) refuse(key, "must be a text");
    auto text = value.get<std::string>();
    if (text.find_first_not_of(" \t\n") == std::string::npos) refuse(key, "is empty");
    return text;
  }
  void figure(const Json& value, const Figure& figure, MachineProfile& profile) const {
    const std::string key = fmt::format("figures.{}.value", figure.key);
    if (!value.is_number()) refuse(key, "must be a number");
    const auto number = value.get<double>();
    const bool of_drives = figure.needed == Needed::kWithDrives;
    const bool none = of_drives && number == 0;
    if (!none && !(number >= figure.least && number <= figure.most)) {
      refuse(key, fmt::format("is {:g}; it must be between {:g} and {:g}", number, figure.least,
                              figure.most));
    }
    std::visit(
        [&](auto member) {
          using Value = std::remove_reference_t<decltype(profile.*member)>;
          if constexpr (std::is_same_v<Value, double>) {
            profile.*member = number;
          } else {
            if (!value.is_number_integer()) refuse(key, "must be a whole number");
            profile.*member = value.get<Value>();
          }
        },
        figure.member);
    if (of_drives && none != (profile.drives == 0)) {
      refuse(key, fmt::format("is {:g} with {} drives; there are both or neither", number,
                              profile.drives));
    }
  }

 private:
  const std::string& origin_;
};

std::vector<std::string_view> keys_of(bool optional) {
  std::vector<std::string_view> keys;
  for (const Figure& figure : kFigures) {
    if ((figure.needed == Needed::kNever) == optional) keys.push_back(figure.key);
  }
  return keys;
}

/// Throws where an object has a key twice, of which the parser would keep the last.
Json parse_strictly(std::string_view text, const std::string& origin) {
  std::vector<std::set<std::string>> open;
  const auto watch = [&](int /*depth*/, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key &&
        !open.back().insert(parsed.get<std::string>()).second) {
      throw usage_error(
          fmt::format("{}: '{}' is there twice; keep one", origin, parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& error) {
    throw usage_error(fmt::format("{}: not a machine profile in JSON: {}", origin, error.what()));
  }
}

}  // namespace

LaneSharing MachineProfile::sharing() const {
  LaneSharing sharing{.both_links = both_links, .compute_with_cpu = compute_with_adam};
  const auto takes = [&](Lane lane, double bytes_per_s) {
    sharing.host_memory[static_cast<size_t>(lane)] = bytes_per_s / host_memory_bytes_per_s;
  };
  takes(Lane::kUpload, upload_bytes_per_s);
  takes(Lane::kDownload, download_bytes_per_s);
  takes(Lane::kCpu, adam_bytes_per_s);
  takes(Lane::kReadWeight, read_bytes_per_s);
  takes(Lane::kReadState, read_bytes_per_s);
  takes(Lane::kWrite, write_bytes_per_s);
  return sharing;
}

std::vector<std::string_view> figure_keys() {
  std::vector<std::string_view> keys;
  for (const Figure& figure : kFigures) keys.push_back(figure.key);
  return keys;
}

MachineProfile parse_profile(std::string_view json, const std::string& origin) {
  const Json root = parse_strictly(json, origin);
  const Reader reader(origin);
  reader.check_keys(root, "", {"version", "name", "machine", "device", "measured", "figures"});
  const Json& version = root["version"];
  if (!version.is_number_integer() || version.get<int64_t>() != kVersion) {
    reader.refuse("version",
                  fmt::format("is {}; this program reads version {}", version.dump(), kVersion));
  }
  MachineProfile profile;
  profile.name = reader.text(root["name"], "name");
  profile.machine = reader.text(root["machine"], "machine");
  profile.device = reader.text(root["device"], "device");
  if (profile.device != "cuda" && profile.device != "host") {
    reader.refuse("device", fmt::format("is '{}'; it must be cuda or host", profile.device));
  }
  if (!root["measured"].is_boolean()) reader.refuse("measured", "must be true or false");
  profile.measured = root["measured"].get<bool>();
  const Json& figures = root["figures"];
  reader.check_keys(figures, "figures", keys_of(/*optional=*/false), keys_of(/*optional=*/true));
  for (const bool of_drives : {false, true}) {  // which are held against the number of drives
    for (const Figure& figure : kFigures) {
      if ((figure.needed == Needed::kWithDrives) != of_drives) continue;
      if (!figures.contains(figure.key)) continue;
      const Json& entry = figures[std::string(figure.key)];
      const std::string path = fmt::format("figures.{}", figure.key);
      reader.check_keys(entry, path, {"value", "source"});
      reader.figure(entry["value"], figure, profile);
      profile.sources[std::string(figure.key)] = reader.text(entry["source"], path + ".source");
    }
  }
  return profile;
}

std::string to_json(const MachineProfile& profile) {
  Json figures = Json::object();
  for (const Figure& figure : kFigures) {
    Json entry = Json::object();
    std::visit([&](auto member) { entry["value"] = profile.*member; }, figure.member);
    const auto source = profile.sources.find(figure.key);
    if (figure.needed == Needed::kNever && source == profile.sources.end() &&
        entry["value"].get<double>() == 0) {
      continue;
    }
    entry["source"] = source == profile.sources.end() ? "" : source->second;
    figures[std::string(figure.key)] = std::move(entry);
  }
  const Json root = {{"version", kVersion},          {"name", profile.name},
                     {"machine", profile.machine},   {"device", profile.device},
                     {"measured", profile.measured}, {"figures", std::move(figures)}};
  return root.dump(2) + "\n";
}

MachineProfile read_profile(const std::filesystem::path& path) {
  return parse_profile(read_text_file(path), path.string());
}

void write_profile(const std::filesystem::path& path, const MachineProfile& profile) {
  const std::string json = to_json(profile);
  (void)parse_profile(json, path.string());
  write_text_file_atomically(path, json);
}

std::vector<std::string_view> shipped_profiles() {
  std::vector<std::string_view> names;
  for (const ShippedProfile& file : shipped_profile_files()) names.push_back(file.name);
  return names;
}

MachineProfile find_profile(const std::string& name_or_path) {
  for (const ShippedProfile& file : shipped_profile_files()) {
    if (file.name == name_or_path) return parse_profile(file.json, std::string(file.name));
  }
  if (!std::filesystem::exists(name_or_path)) {
    throw usage_error(fmt::format(
        "machine profile '{}' is neither a file nor one of the shipped ones; those are {}",
        name_or_path, fmt::join(shipped_profiles(), ", ")));
  }
  return read_profile(name_or_path);
}

}  // namespace strata::pipeline
