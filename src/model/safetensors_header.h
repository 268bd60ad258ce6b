// The header of a safetensors file as text: parsed with every check that needs no other part of the
// file, and formatted. Internal to model/safetensors.cc.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/safetensors.h"

namespace strata::model {

inline constexpr int64_t kLengthBytes = 8;  // of the field before the header
/// The limit of the reference implementation, so that no file is written that it would not read.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

/// Text out of a file as messages show it: in quotes, on one line and of bounded length.
[[nodiscard]] std::string quote(std::string_view text);
[[nodiscard]] Error file_fault(const std::filesystem::path& path, const std::string& what);
[[nodiscard]] Error tensor_fault(const std::filesystem::path& path, std::string_view tensor,
                                 const std::string& what);

struct Header {
  std::vector<TensorInfo> tensors;  // by offset; offsets count from the start of the data
  Metadata metadata;
};

/// The faults are those that SafetensorsFile::open lists.
[[nodiscard]] Header parse_header(const std::filesystem::path& path, const std::string& text,
                                  int64_t data_bytes);

struct HeaderText {
  std::string text;  // padded so that the data begins at a multiple of 8
  int64_t data_bytes = 0;
};

[[nodiscard]] HeaderText format_header(const std::filesystem::path& path,
                                       std::span<const TensorHeader> tensors,
                                       const Metadata& metadata);

/// A usage error where no file could hold the tensor.
[[nodiscard]] int64_t checked_size_bytes(const std::filesystem::path& path,
                                         const TensorHeader& tensor);

}  // namespace strata::model
