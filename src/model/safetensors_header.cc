#include "model/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "base/bytes.h"

namespace strata::model {
namespace {

using Json = nlohmann::json;

constexpr const char* kMetadataKey = "__metadata__";

struct ElementTraits {
  std::string_view name;
  int64_t bits;
};

// In the order of ElementType.
constexpr std::array<ElementTraits, 22> kElementTypes{
    {{"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
     {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
     {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
     {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
     {"I64", 64},        {"U64", 64}}};
static_assert(kElementTypes[static_cast<size_t>(ElementType::kBf16)].name == "BF16");
static_assert(kElementTypes[static_cast<size_t>(ElementType::kU64)].name == "U64");

struct TensorSize {
  int64_t elements;
  int64_t bytes;
};

// Empty where it does not fit in 63 bits or ends within a byte.
std::optional<TensorSize> size_of_tensor(ElementType type, std::span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) return std::nullopt;
  }
  int64_t bits = 0;
  if (__builtin_mul_overflow(elements, bits_of(type), &bits) || bits % 8 != 0) return std::nullopt;
  return TensorSize{elements, bits / 8};
}

// Receives the header as the parser meets it: it never exists as a tree, and every field is checked
// where it stands. Offsets are those of the header, from the start of the data.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  HeaderReader(const std::filesystem::path& path, int64_t data_bytes)
      : path_(path), data_bytes_(data_bytes) {}

  [[nodiscard]] std::vector<TensorInfo> take_tensors() { return std::move(tensors_); }
  [[nodiscard]] Metadata take_metadata() { return std::move(metadata_); }

  bool key(string_t& key) override {
    if (place_ == Place::kTop) {
      name_ = key;
      if (!names_.insert(key).second) throw fault("is in the header twice");
    } else {
      field_ = key;
      if (place_ == Place::kTensor) check_field();
    }
    return true;
  }

  bool start_object(size_t /*elements*/) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop && name_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTop) {
      place_ = Place::kTensor;
      type_.reset();
      shape_.reset();
      range_.reset();
    } else {
      refuse_value("an object");
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) add_tensor();
    place_ = Place::kTop;  // also at the very end, after which nothing comes
    return true;
  }

  bool start_array(size_t /*elements*/) override {
    if (place_ == Place::kTensor && field_ == "shape") {
      place_ = Place::kShape;
      shape_.emplace();
    } else if (place_ == Place::kTensor && field_ == "data_offsets") {
      place_ = Place::kRange;
      range_.emplace();
    } else {
      refuse_value("an array");
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      if (!metadata_.emplace(field_, value).second) {
        throw file_fault(path_, fmt::format("has {} twice in {}", quote(field_), kMetadataKey));
      }
    } else if (place_ == Place::kTensor && field_ == "dtype") {
      const auto* found = std::ranges::find(kElementTypes, value, &ElementTraits::name);
      if (found == kElementTypes.end()) {
        throw fault(fmt::format("has the unknown type {}", quote(value)));
      }
      type_ = static_cast<ElementType>(found - kElementTypes.begin());
    } else {
      refuse_value("a string");
    }
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kShape && place_ != Place::kRange) refuse_value("a number");
    if (value > INT64_MAX) throw fault(fmt::format("has the impossible size or offset {}", value));
    (place_ == Place::kShape ? *shape_ : *range_).push_back(static_cast<int64_t>(value));
    return true;
  }
  bool number_integer(number_integer_t value) override {
    refuse_value(fmt::format("the negative number {}", value));
  }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    refuse_value(fmt::format("the number {}", quote(text)));
  }
  bool null() override { refuse_value("null"); }
  bool boolean(bool /*value*/) override { refuse_value("a boolean"); }
  bool binary(binary_t& /*value*/) override { refuse_value("binary data"); }

  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& /*error*/) override {
    throw file_fault(path_, fmt::format("has a header that is not JSON at its byte {}", position));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kRange };

  [[nodiscard]] Error fault(const std::string& what) const {
    return tensor_fault(path_, name_, what);
  }

  void check_field() const {
    const bool known = field_ == "dtype" || field_ == "shape" || field_ == "data_offsets";
    if (!known) throw fault(fmt::format("has the unknown field {}", quote(field_)));
    const bool repeated = (field_ == "dtype" && type_) || (field_ == "shape" && shape_) ||
                          (field_ == "data_offsets" && range_);
    if (repeated) throw fault(fmt::format("has the field {} twice", field_));
  }

  [[noreturn]] void refuse_value(const std::string& what) const {
    if (place_ == Place::kStart) throw file_fault(path_, "has a header that is not a JSON object");
    if (place_ == Place::kTop) {
      throw file_fault(path_,
                       fmt::format("has {} where the header must describe {}", what, quote(name_)));
    }
    if (place_ == Place::kMetadata) {
      throw file_fault(path_, fmt::format("has {} for {} in {}, which holds strings only", what,
                                          quote(field_), kMetadataKey));
    }
    throw fault(fmt::format("has {} in its {}", what, field_));
  }

  void add_tensor() {
    if (!type_) throw fault("has no dtype");
    if (!shape_) throw fault("has no shape");
    if (!range_) throw fault("has no data_offsets");
    if (range_->size() != 2) {
      throw fault(fmt::format("has {} data_offsets, not a begin and an end", range_->size()));
    }
    const int64_t begin = (*range_)[0];
    const int64_t end = (*range_)[1];
    if (begin > end) throw fault(fmt::format("begins at byte {} and ends at {}", begin, end));
    if (end > data_bytes_) {
      throw fault(
          fmt::format("ends at byte {} of the data, and the file has {}: it is cut short or "
                      "its header is wrong",
                      end, data_bytes_));
    }
    const std::optional<TensorSize> size = size_of_tensor(*type_, *shape_);
    const std::string described =
        fmt::format("{} of shape [{}]", name_of(*type_), fmt::join(*shape_, ", "));
    if (!size) throw fault(fmt::format("cannot be {}: no file could hold that", described));
    if (size->bytes != end - begin) {
      throw fault(fmt::format("takes {} bytes in the file, and {} as {}", end - begin, size->bytes,
                              described));
    }
    tensors_.push_back({.name = name_,
                        .type = *type_,
                        .shape = std::move(*shape_),
                        .elements = size->elements,
                        .offset_bytes = begin,
                        .size_bytes = size->bytes});
  }

  const std::filesystem::path& path_;
  int64_t data_bytes_;
  Place place_ = Place::kStart;
  std::unordered_set<std::string> names_;
  std::string name_;   // the key at the top
  std::string field_;  // the key below it
  std::optional<ElementType> type_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<int64_t>> range_;
  std::vector<TensorInfo> tensors_;
  Metadata metadata_;
};

// Sorted tensors lie end to end over all of the data.
void check_coverage(const std::filesystem::path& path, std::span<const TensorInfo> tensors,
                    int64_t data_bytes) {
  int64_t covered = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.offset_bytes < covered) {
      throw tensor_fault(path, tensor.name,
                         fmt::format("overlaps tensor {}", quote(previous->name)));
    }
    if (tensor.offset_bytes > covered) {
      throw tensor_fault(path, tensor.name,
                         fmt::format("begins at byte {} of the data, and the {} bytes before it "
                                     "belong to no tensor",
                                     tensor.offset_bytes, tensor.offset_bytes - covered));
    }
    covered += tensor.size_bytes;
    previous = &tensor;
  }
  if (covered != data_bytes) {
    throw file_fault(path, fmt::format("has {} bytes at its end that belong to no tensor",
                                       data_bytes - covered));
  }
}

}  // namespace

std::string_view name_of(ElementType type) noexcept {
  return kElementTypes[static_cast<size_t>(type)].name;
}

int64_t bits_of(ElementType type) noexcept { return kElementTypes[static_cast<size_t>(type)].bits; }

bool is_weight_type(ElementType type) noexcept {
  return type == ElementType::kBf16 || type == ElementType::kF16 || type == ElementType::kF32 ||
         type == ElementType::kF64;
}

// Text out of a file as messages show it: on one line and of bounded length.
std::string quote(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string shown = "'" + std::string(text.substr(0, kLongest));
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return shown + (text.size() > kLongest ? "...'" : "'");
}

Error file_fault(const std::filesystem::path& path, const std::string& what) {
  return usage_error(fmt::format("'{}' {}", path.string(), what));
}

Error tensor_fault(const std::filesystem::path& path, std::string_view tensor,
                   const std::string& what) {
  return usage_error(fmt::format("'{}': tensor {} {}", path.string(), quote(tensor), what));
}

Header parse_header(const std::filesystem::path& path, const std::string& text,
                    int64_t data_bytes) {
  if (!text.starts_with('{')) throw file_fault(path, "has a header that is not a JSON object");
  // The parser takes a NUL for the end of its input and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != std::string::npos) {
    throw file_fault(path, fmt::format("has a header that is not JSON at its byte {}", nul + 1));
  }
  HeaderReader reader(path, data_bytes);
  Json::sax_parse(text, &reader);
  Header header{.tensors = reader.take_tensors(), .metadata = reader.take_metadata()};
  std::ranges::sort(header.tensors, {}, [](const TensorInfo& tensor) {
    return std::pair(tensor.offset_bytes, tensor.size_bytes);
  });
  check_coverage(path, header.tensors, data_bytes);
  return header;
}

int64_t checked_size_bytes(const std::filesystem::path& path, const TensorHeader& tensor) {
  const std::optional<TensorSize> size = size_of_tensor(tensor.type, tensor.shape);
  if (!size || tensor.name == kMetadataKey) {
    throw tensor_fault(path, tensor.name,
                       fmt::format("cannot be written as {} of shape [{}]", name_of(tensor.type),
                                   fmt::join(tensor.shape, ", ")));
  }
  return size->bytes;
}

HeaderText format_header(const std::filesystem::path& path, std::span<const TensorHeader> tensors,
                         const Metadata& metadata) {
  HeaderText header;
  std::set<std::string_view> names;
  header.text = "{";
  if (!metadata.empty()) {
    header.text += fmt::format("\"{}\":{}", kMetadataKey, Json(metadata).dump());
  }
  for (const TensorHeader& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      throw tensor_fault(path, tensor.name, "is to be written twice");
    }
    const int64_t begin = header.data_bytes;
    if (__builtin_add_overflow(begin, checked_size_bytes(path, tensor), &header.data_bytes)) {
      throw tensor_fault(path, tensor.name, "makes the file larger than any file can be");
    }
    header.text +=
        fmt::format(R"({}{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                    header.text.size() > 1 ? "," : "", Json(tensor.name).dump(),
                    name_of(tensor.type), fmt::join(tensor.shape, ","), begin, header.data_bytes);
  }
  header.text += "}";
  header.text.resize(align_up(header.text.size(), 8), ' ');
  if (static_cast<int64_t>(header.text.size()) > kMaxHeaderBytes ||
      header.data_bytes > INT64_MAX - 2 * kMaxHeaderBytes) {
    throw file_fault(path,
                     fmt::format("would be too large: a header of {} bytes for {} bytes of data",
                                 header.text.size(), header.data_bytes));
  }
  return header;
}

}  // namespace strata::model
