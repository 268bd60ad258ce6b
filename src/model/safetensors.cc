#include "model/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/bf16.h"
#include "base/bytes.h"
#include "base/error.h"
#include "model/safetensors_header.h"

namespace strata::model {
namespace {

using Json = nlohmann::json;

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kPartialSuffix = ".partial";

Json parse_index(const std::filesystem::path& path) {
  // A repeated key would silently win over the first.
  std::set<std::string> seen;
  const auto refuse_repeats = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::key && depth == 1) seen.clear();
    if (event == Json::parse_event_t::key && depth == 2) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!seen.insert(key).second) throw tensor_fault(path, key, "is listed twice");
    }
    return true;
  };
  const std::string text = read_text_file(path);
  Json index;
  try {
    index = Json::parse(text, refuse_repeats);
  } catch (const Json::exception&) {
    throw file_fault(path, "is not JSON");
  }
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    throw file_fault(path, "has no weight_map, the object that names each tensor's file");
  }
  return index;
}

// "model-00001-of-00003.safetensors"
bool is_shard_name(std::string_view name) {
  constexpr std::string_view kPattern = "model-#####-of-#####.safetensors";
  return std::ranges::equal(name, kPattern, [](char c, char wanted) {
    return wanted == '#' ? c >= '0' && c <= '9' : c == wanted;
  });
}

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

}  // namespace

float half_to_float(uint16_t bits) noexcept {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fU;
  const uint32_t mantissa = bits & 0x3ffU;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t widened = exponent == 0x1f ? 0xffU : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (widened << 23) | (mantissa << 13));
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile opened(File::open_for_read(path));
  const File& file = opened.file_;
  const int64_t file_bytes = file.size_bytes();
  if (file_bytes < kLengthBytes) {
    throw file_fault(path,
                     fmt::format("is {} bytes long, too short for a safetensors file", file_bytes));
  }
  uint64_t length = 0;
  file.read_at(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > static_cast<uint64_t>(kMaxHeaderBytes)) {
    throw file_fault(path, fmt::format("has a header of {} bytes, more than the {} that the format "
                                       "allows, or is no safetensors file",
                                       length, kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<int64_t>(length);
  const int64_t data_bytes = file_bytes - kLengthBytes - header_bytes;
  if (data_bytes < 0) {
    throw file_fault(path,
                     fmt::format("is cut short: its header takes {} bytes, and only {} follow",
                                 header_bytes, file_bytes - kLengthBytes));
  }
  std::string header(length, '\0');
  file.read_at(kLengthBytes, std::as_writable_bytes(std::span(header)));

  Header parsed = parse_header(path, header, data_bytes);
  opened.tensors_ = std::move(parsed.tensors);
  opened.metadata_ = std::move(parsed.metadata);
  for (size_t i = 0; i < opened.tensors_.size(); ++i) {
    opened.tensors_[i].offset_bytes += kLengthBytes + header_bytes;
    opened.by_name_.emplace(opened.tensors_[i].name, i);
  }
  return opened;
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const noexcept {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsFile::read(const TensorInfo& tensor, int64_t begin_bytes,
                           std::span<std::byte> out) const {
  STRATA_CHECK(begin_bytes >= 0 && begin_bytes <= tensor.size_bytes &&
                   out.size() <= static_cast<size_t>(tensor.size_bytes - begin_bytes),
               "a range of bytes lies within its tensor");
  file_.read_at(tensor.offset_bytes + begin_bytes, out);
}

void SafetensorsFile::read_floats(const TensorInfo& tensor, int64_t begin,
                                  std::span<float> out) const {
  if (!is_weight_type(tensor.type)) {
    throw tensor_fault(path(), tensor.name,
                       fmt::format("is of type {}, and weights must be BF16, F16, F32 or F64",
                                   name_of(tensor.type)));
  }
  STRATA_CHECK(begin >= 0 && begin <= tensor.elements &&
                   out.size() <= static_cast<size_t>(tensor.elements - begin),
               "a range of elements lies within its tensor");
  const auto convert = [&]<class Stored>(Stored /*type*/, auto to_float_of) {
    constexpr size_t kPieceElements = 64 * kKiB / sizeof(Stored);
    std::vector<Stored> piece(std::min(out.size(), kPieceElements));
    for (size_t done = 0; done < out.size(); done += piece.size()) {
      const std::span part = std::span(piece).first(std::min(piece.size(), out.size() - done));
      read(tensor, (begin + static_cast<int64_t>(done)) * static_cast<int64_t>(sizeof(Stored)),
           std::as_writable_bytes(part));
      std::ranges::transform(part, out.begin() + static_cast<std::ptrdiff_t>(done), to_float_of);
    }
  };
  if (tensor.type == ElementType::kF32) {
    read(tensor, begin * static_cast<int64_t>(sizeof(float)), std::as_writable_bytes(out));
  } else if (tensor.type == ElementType::kBf16) {
    convert(Bf16{}, [](Bf16 value) { return to_float(value); });
  } else if (tensor.type == ElementType::kF16) {
    convert(uint16_t{}, half_to_float);
  } else {
    convert(double{}, [](double value) { return static_cast<float>(value); });
  }
}

CheckpointReader CheckpointReader::open(const std::filesystem::path& path) {
  CheckpointReader reader;
  reader.path_ = path;
  std::filesystem::path single = path;
  if (std::filesystem::is_directory(path)) {
    single = path / kSingleName;
    if (!std::filesystem::exists(single)) {
      const std::filesystem::path index = path / kIndexName;
      if (!std::filesystem::exists(index)) {
        throw file_fault(path, fmt::format("holds no weights: neither {} nor {} is there",
                                           kSingleName, kIndexName));
      }
      reader.open_index(index);
      return reader;
    }
  }
  if (!std::filesystem::exists(single)) {
    throw file_fault(
        path, "does not exist; weights are a .safetensors file or a directory that holds one");
  }
  reader.files_.push_back(SafetensorsFile::open(single));
  const std::span<const TensorInfo> tensors = reader.files_.front().tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    reader.places_.emplace(tensors[i].name, Place{.file = 0, .tensor = i});
  }
  return reader;
}

void CheckpointReader::open_index(const std::filesystem::path& index) {
  const Json parsed = parse_index(index);
  std::map<std::string, size_t> opened;
  for (const auto& [name, value] : parsed.at("weight_map").items()) {
    const std::string shard = value.is_string() ? value.get<std::string>() : "";
    const std::filesystem::path shard_name = shard;
    if (shard.empty() || shard == "." || shard == ".." || shard_name.filename() != shard_name) {
      throw tensor_fault(index, name, "must be placed in a file of the same directory");
    }
    const auto [entry, is_new] = opened.emplace(shard, files_.size());
    if (is_new) {
      const std::filesystem::path file = index.parent_path() / shard_name;
      if (!std::filesystem::exists(file)) {
        throw tensor_fault(index, name,
                           fmt::format("is placed in {}, which does not exist", quote(shard)));
      }
      files_.push_back(SafetensorsFile::open(file));
    }
    const SafetensorsFile& file = files_[entry->second];
    const TensorInfo* tensor = file.find(name);
    if (tensor == nullptr) {
      throw tensor_fault(index, name,
                         fmt::format("is placed in {}, which does not hold it", quote(shard)));
    }
    places_.emplace(name, Place{.file = entry->second,
                                .tensor = static_cast<size_t>(tensor - file.tensors().data())});
  }
}

std::vector<std::string> CheckpointReader::names() const {
  std::vector<std::string> names;
  names.reserve(places_.size());
  for (const auto& [name, place] : places_) names.push_back(name);
  return names;
}

bool CheckpointReader::contains(const std::string& name) const noexcept {
  return places_.find(name) != places_.end();
}

const CheckpointReader::Place& CheckpointReader::place_of(const std::string& name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) throw tensor_fault(path_, name, "is missing");
  return found->second;
}

const TensorInfo& CheckpointReader::tensor(const std::string& name) const {
  const Place& place = place_of(name);
  return files_[place.file].tensors()[place.tensor];
}

void CheckpointReader::read(const std::string& name, int64_t begin_bytes,
                            std::span<std::byte> out) const {
  const Place& place = place_of(name);
  const SafetensorsFile& file = files_[place.file];
  file.read(file.tensors()[place.tensor], begin_bytes, out);
}

void CheckpointReader::read_floats(const std::string& name, int64_t begin,
                                   std::span<float> out) const {
  const Place& place = place_of(name);
  const SafetensorsFile& file = files_[place.file];
  file.read_floats(file.tensors()[place.tensor], begin, out);
}

SafetensorsWriter::Partial::~Partial() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove(path_, ignored);
}

void SafetensorsWriter::Partial::rename(const std::filesystem::path& to) {
  std::error_code code;
  std::filesystem::rename(path_, to, code);
  if (code) throw IoError("rename to its final name", path_.string(), code.value());
  path_.clear();
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     std::span<const TensorHeader> tensors,
                                     const Metadata& metadata)
    : path_(path), partial_(path.string() + kPartialSuffix) {
  const HeaderText header = format_header(path, tensors, metadata);
  const uint64_t length = header.text.size();
  next_bytes_ = kLengthBytes + static_cast<int64_t>(length);
  end_bytes_ = next_bytes_ + header.data_bytes;
  file_ = File::create(partial_.path());
  file_->allocate(end_bytes_);
  file_->write_at(0, std::as_bytes(std::span(&length, 1)));
  file_->write_at(kLengthBytes, std::as_bytes(std::span(header.text)));
}

void SafetensorsWriter::write(std::span<const std::byte> piece) {
  if (piece.size() > static_cast<size_t>(bytes_left())) {
    throw failure(fmt::format("'{}' has room for {} more bytes of tensor data, and {} came",
                              path_.string(), bytes_left(), piece.size()));
  }
  if (piece.empty()) return;
  STRATA_CHECK(file_.has_value(), "nothing is written to a completed file");
  file_->write_at(next_bytes_, piece);
  next_bytes_ += static_cast<int64_t>(piece.size());
}

void SafetensorsWriter::complete() {
  if (!file_) return;
  if (bytes_left() != 0) {
    throw failure(fmt::format("'{}' is not whole: {} bytes of tensor data never came",
                              path_.string(), bytes_left()));
  }
  file_->sync();
  file_->close();
  file_.reset();
}

void SafetensorsWriter::publish() {
  STRATA_CHECK(!file_ && !partial_.path().empty(), "a file is completed, then published, once");
  partial_.rename(path_);
  sync_directory(directory_of(path_));
}

CheckpointWriter::CheckpointWriter(std::filesystem::path directory,
                                   std::span<const TensorHeader> tensors, int64_t max_shard_bytes)
    : directory_(std::move(directory)) {
  if (max_shard_bytes <= 0) {
    throw usage_error(fmt::format("shards of {} bytes cannot hold weights", max_shard_bytes));
  }
  std::vector<std::span<const TensorHeader>> shards{tensors.first(0)};
  int64_t total_bytes = 0;
  int64_t shard_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t bytes = checked_size_bytes(directory_, tensors[i]);
    if (__builtin_add_overflow(total_bytes, bytes, &total_bytes)) {
      throw tensor_fault(directory_, tensors[i].name, "makes the checkpoint impossibly large");
    }
    if (shard_bytes > 0 && bytes > max_shard_bytes - shard_bytes) {
      shards.push_back(tensors.subspan(i, 0));
      shard_bytes = 0;
    }
    shards.back() = std::span(shards.back().data(), shards.back().size() + 1);
    shard_bytes += bytes;
  }

  std::error_code code;
  std::filesystem::create_directories(directory_, code);
  if (code) throw IoError("create", directory_.string(), code.value());
  Json weight_map = Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    file_names_.push_back(
        shards.size() == 1 ? std::string(kSingleName)
                           : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
    for (const TensorHeader& tensor : shards[i]) {
      if (weight_map.contains(tensor.name)) {
        throw tensor_fault(directory_, tensor.name, "is to be written twice");
      }
      weight_map[tensor.name] = file_names_.back();
    }
    shards_.emplace_back(directory_ / file_names_.back(), shards[i]);
  }
  if (shards.size() > 1) {
    const Json index{{"metadata", {{"total_size", total_bytes}}}, {"weight_map", weight_map}};
    index_text_ = index.dump(2) + "\n";
  }
}

void CheckpointWriter::write(std::span<const std::byte> piece) {
  while (!piece.empty()) {
    if (current_ == shards_.size()) {
      throw failure(fmt::format("'{}' has all its tensor data, and {} bytes more came",
                                directory_.string(), piece.size()));
    }
    SafetensorsWriter& shard = shards_[current_];
    const size_t now = std::min(piece.size(), static_cast<size_t>(shard.bytes_left()));
    shard.write(piece.first(now));
    piece = piece.subspan(now);
    // Early, so that a full shard goes to the disk while the next one is filled.
    if (shard.bytes_left() == 0) {
      shard.complete();
      ++current_;
    }
  }
}

void CheckpointWriter::finish() {
  for (SafetensorsWriter& shard : shards_) shard.complete();
  // Names change only when all data is safe, so an earlier checkpoint of this directory is replaced
  // in an instant, not over the time that writing takes.
  for (SafetensorsWriter& shard : shards_) shard.publish();
  if (!index_text_.empty()) write_text_file_atomically(directory_ / kIndexName, index_text_);

  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    std::string name = entry.path().filename().string();
    if (std::ranges::find(file_names_, name) != file_names_.end()) continue;
    if (name == kIndexName && !index_text_.empty()) continue;
    if (name.ends_with(kPartialSuffix)) name.resize(name.size() - std::strlen(kPartialSuffix));
    if (name == kSingleName || name == kIndexName || is_shard_name(name)) {
      std::error_code code;
      std::filesystem::remove(entry.path(), code);
      if (code) throw IoError("remove", entry.path().string(), code.value());
    }
  }
  sync_directory(directory_);
}

}  // namespace strata::model
