#include "train/checkpoint_tensors.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/file.h"
#include "train/checkpoint.h"

namespace strata::train {
namespace {

namespace fs = std::filesystem;
using cpu_adam::MomentFormat;
using model::ElementType;
using pipeline::StateKind;

constexpr std::array kSavedKinds{StateKind::kWeight, StateKind::kResidual, StateKind::kMoment1,
                                 StateKind::kMoment2};
constexpr size_t kBufferBytes = size_t{1} << 20;
constexpr size_t kDigits = 16;

}  // namespace

std::string state_file_name(int index, int files) {
  return fmt::format("state-{:05}-of-{:05}.safetensors", index + 1, files);
}

std::vector<StateTensor> state_tensors(const model::Llama& llama, MomentFormat moments) {
  std::vector<StateTensor> list;
  for (const StateKind kind : kSavedKinds) {
    const bool is_moment = kind == StateKind::kMoment1 || kind == StateKind::kMoment2;
    if (is_moment && moments == MomentFormat::kInt8) {
      // Blocks do not end where tensors do: a unit's moment is one tensor of bytes.
      for (size_t unit = 0; unit < llama.units().size(); ++unit) {
        const pipeline::UnitSpec& spec = llama.units()[unit];
        const size_t bytes =
            pipeline::state_bytes(kind, spec.parameter_count, llama.dtype(), moments);
        list.push_back({{fmt::format("{}.{}", name_of(kind), spec.name),
                         ElementType::kU8,
                         {static_cast<int64_t>(bytes)}},
                        static_cast<int>(unit),
                        kind,
                        0,
                        bytes});
      }
      continue;
    }
    const size_t size = pipeline::state_bytes(kind, 1, llama.dtype(), moments);
    if (size == 0) continue;
    const ElementType type = size == 4                      ? ElementType::kF32
                             : kind == StateKind::kResidual ? ElementType::kU16
                                                            : ElementType::kBf16;
    for (const model::TensorPlace& place : llama.tensors()) {
      list.push_back(
          {{fmt::format("{}.{}", name_of(kind), place.tensor.name), type, place.tensor.shape},
           place.unit,
           kind,
           static_cast<size_t>(place.first) * size,
           static_cast<size_t>(place.tensor.elements()) * size});
    }
  }
  return list;
}

void Checksum::Free::operator()(XXH3_state_s* state) const noexcept { XXH3_freeState(state); }
Checksum::Checksum() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_.get(), bytes.data(), bytes.size());
}
std::string Checksum::take() {
  std::string text = fmt::format("{:016x}", XXH3_64bits_digest(state_.get()));
  XXH3_64bits_reset(state_.get());
  return text;
}

Error damaged(const fs::path& checkpoint, const std::string& what) {
  return usage_error(
      fmt::format("'{}' {}; resume from an older checkpoint", checkpoint.string(), what));
}

nlohmann::json read_run_file(const fs::path& checkpoint) {
  if (!is_checkpoint(checkpoint)) {
    throw usage_error(fmt::format("'{}' is not a checkpoint: there is no {} in it",
                                  checkpoint.string(), kRunFile));
  }
  nlohmann::json run = nlohmann::json::parse(read_text_file(checkpoint / kRunFile), nullptr, false);
  if (!run.is_object() || !run.contains("format")) {
    throw damaged(checkpoint, fmt::format("has a broken {}", kRunFile));
  }
  if (run["format"] != kOneFileFormat && run["format"] != kManyFilesFormat) {
    throw usage_error(
        fmt::format("'{}' is a checkpoint of format {}, and this version reads {} and {}",
                    checkpoint.string(), run["format"].dump(), kOneFileFormat, kManyFilesFormat));
  }
  return run;
}

CheckpointTensors::CheckpointTensors(const fs::path& checkpoint) : checkpoint_(checkpoint) {
  const nlohmann::json run = read_run_file(checkpoint);
  try {
    if (run["format"] == kOneFileFormat) {
      open_one_file(run);
    } else {
      open_many_files(run);
    }
  } catch (const nlohmann::json::exception& error) {
    throw damaged(checkpoint, fmt::format("has a broken {} ({})", kRunFile, error.what()));
  }
  for (auto& [name, tensor] : tensors_) {
    auto& slices = tensor.slices;
    std::sort(slices.begin(), slices.end(),
              [](const auto& a, const auto& b) { return a.first_bytes < b.first_bytes; });
    size_t at = 0;
    for (const Tensor::Slice& slice : slices) {
      const auto size = static_cast<size_t>(slice.info->size_bytes);
      const size_t pieces = (size + slice.piece_bytes - 1) / slice.piece_bytes;
      if (slice.first_bytes != at || slice.info->type != tensor.type ||
          slice.checksums.size() != pieces * kDigits) {
        throw damaged(checkpoint, fmt::format("is damaged: the parts of tensor '{}' in {} do not "
                                              "fit together",
                                              name, kRunFile));
      }
      at += size;
    }
    if (at != tensor.size_bytes) {
      throw damaged(checkpoint, fmt::format("is damaged: tensor '{}' has {} of {} bytes", name, at,
                                            tensor.size_bytes));
    }
  }
}

const model::SafetensorsFile& CheckpointTensors::open_file(const std::string& name) {
  try {
    files_.push_back(std::make_unique<const model::SafetensorsFile>(
        model::SafetensorsFile::open(checkpoint_ / name)));
  } catch (const Error& error) {
    throw damaged(checkpoint_, fmt::format("is damaged ({})", error.what()));
  }
  return *files_.back();
}

void CheckpointTensors::open_one_file(const nlohmann::json& run) {
  const nlohmann::json& checksums = run.at("xxh3_64");
  for (const model::TensorInfo& info : open_file(kStateFile).tensors()) {
    Tensor& tensor = tensors_[info.name];
    tensor.type = info.type;
    tensor.shape = info.shape;
    tensor.size_bytes = static_cast<size_t>(info.size_bytes);
    tensor.slices.push_back({.file = 0,
                             .info = &info,
                             .first_bytes = 0,
                             .piece_bytes = std::max<size_t>(tensor.size_bytes, 1),
                             .checksums = checksums.at(info.name).get<std::string>()});
  }
}

void CheckpointTensors::open_many_files(const nlohmann::json& run) {
  const auto piece_bytes = run.at("piece_bytes").get<size_t>();
  if (piece_bytes == 0) throw damaged(checkpoint_, fmt::format("has a broken {}", kRunFile));
  // Of the whole tensors no file knows: a slice is a row of elements.
  std::map<std::string, ElementType> types;
  for (const nlohmann::json& file : run.at("files")) {
    const auto file_name = file.at("name").get<std::string>();
    if (fs::path(file_name).filename() != file_name) {
      throw damaged(checkpoint_,
                    fmt::format("has a broken {}: it names a file '{}'", kRunFile, file_name));
    }
    const model::SafetensorsFile& opened = open_file(file_name);
    for (const auto& [name, slice] : file.at("slices").items()) {
      const model::TensorInfo* info = opened.find(name);
      if (info == nullptr || info->elements == 0) {
        throw damaged(checkpoint_,
                      fmt::format("is damaged: tensor '{}' is not in '{}'", name, file_name));
      }
      Tensor& tensor = tensors_[name];
      tensor.type = info->type;
      tensor.slices.push_back(
          {.file = files_.size() - 1,
           .info = info,
           .first_bytes = slice.at("first").get<size_t>() *
                          static_cast<size_t>(info->size_bytes / info->elements),
           .piece_bytes = piece_bytes,
           .checksums = slice.at("xxh3_64").get<std::string>()});
    }
  }
  for (const auto& [name, shape] : run.at("shapes").items()) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) {
      throw damaged(checkpoint_, fmt::format("is damaged: tensor '{}' is missing", name));
    }
    Tensor& tensor = found->second;
    tensor.shape = shape.get<std::vector<int64_t>>();
    tensor.size_bytes = static_cast<size_t>(bits_of(tensor.type) / 8);
    for (const int64_t length : tensor.shape) tensor.size_bytes *= static_cast<size_t>(length);
  }
}

const CheckpointTensors::Tensor* CheckpointTensors::find(const std::string& name) const noexcept {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void CheckpointTensors::read(const Tensor& tensor, size_t begin_bytes,
                             std::span<std::byte> out) const {
  STRATA_CHECK(begin_bytes + out.size() <= tensor.size_bytes, "a range lies within its tensor");
  for (const Tensor::Slice& slice : tensor.slices) {
    const size_t end = slice.first_bytes + static_cast<size_t>(slice.info->size_bytes);
    if (out.empty() || begin_bytes >= end) continue;
    const size_t size = std::min(out.size(), end - begin_bytes);
    files_[slice.file]->read(*slice.info, static_cast<int64_t>(begin_bytes - slice.first_bytes),
                             out.first(size));
    out = out.subspan(size);
    begin_bytes += size;
  }
}

void CheckpointTensors::read_verified(const std::string& name, size_t begin_bytes, size_t end_bytes,
                                      const Sink& sink) const {
  const Tensor* tensor = find(name);
  STRATA_CHECK(tensor != nullptr && end_bytes <= tensor->size_bytes,
               "a range lies within its tensor");
  Checksum checksum;
  for (const Tensor::Slice& slice : tensor->slices) {
    const auto size = static_cast<size_t>(slice.info->size_bytes);
    if (begin_bytes >= end_bytes || end_bytes <= slice.first_bytes ||
        begin_bytes >= slice.first_bytes + size) {
      continue;
    }
    // Within the slice, as is all below.
    const size_t begin = std::max(begin_bytes, slice.first_bytes) - slice.first_bytes;
    const size_t end = std::min(end_bytes - slice.first_bytes, size);
    for (size_t piece = begin / slice.piece_bytes; piece * slice.piece_bytes < end; ++piece) {
      const size_t piece_end = std::min((piece + 1) * slice.piece_bytes, size);
      for (size_t at = piece * slice.piece_bytes; at < piece_end;) {
        buffer_.resize(std::min(kBufferBytes, piece_end - at));
        files_[slice.file]->read(*slice.info, static_cast<int64_t>(at), buffer_);
        checksum.add(buffer_);
        const size_t from = std::max(at, begin);
        const size_t to = std::min(at + buffer_.size(), end);
        if (from < to) {
          sink(slice.first_bytes + from, std::span(buffer_).subspan(from - at, to - from));
        }
        at += buffer_.size();
      }
      if (slice.checksums.compare(piece * kDigits, kDigits, checksum.take()) != 0) {
        throw damaged(checkpoint_,
                      fmt::format("is damaged: the checksum of tensor '{}' in '{}' "
                                  "differs",
                                  name, files_[slice.file]->path().filename().string()));
      }
    }
  }
}

}  // namespace strata::train
