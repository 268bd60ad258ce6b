// Checkpoints in the safetensors format: 8 bytes of header length, a JSON header (name, type, shape
// and byte range of each tensor), then the data, little-endian. One file, or several with an index.
//
// Nothing is mapped: bytes move in pieces that the caller sizes, so memory use is what the caller
// says. Readers hold their files open and are safe to use from several threads; writers belong to
// one thread. A file that breaks a rule of the format is a usage error of one sentence that names
// file, tensor and fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/file.h"

namespace strata::model {

/// Every element type that the format knows.
enum class ElementType : uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64
};

/// "BF16", "F32": as headers spell it.
[[nodiscard]] std::string_view name_of(ElementType type) noexcept;
[[nodiscard]] int64_t bits_of(ElementType type) noexcept;
/// Whether read_floats takes it: BF16, F16, F32, F64.
[[nodiscard]] bool is_weight_type(ElementType type) noexcept;

/// The value of an IEEE-754 binary16; exact, and a NaN stays a NaN.
[[nodiscard]] float half_to_float(uint16_t bits) noexcept;

struct TensorInfo {
  std::string name;
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;  // empty for a scalar
  int64_t elements = 0;
  int64_t offset_bytes = 0;  // from the start of the file
  int64_t size_bytes = 0;
};

using Metadata = std::map<std::string, std::string>;

/// One file, open for reading.
class SafetensorsFile {
 public:
  /// Reads and checks the header. Refused, beyond what is no header at all: headers over 100 MB,
  /// unknown or repeated fields, repeated names, unknown types, sizes that overflow or differ from
  /// type and shape, ranges out of the file, overlaps, and bytes that belong to no tensor.
  [[nodiscard]] static SafetensorsFile open(const std::filesystem::path& path);

  /// In the order of their data.
  [[nodiscard]] std::span<const TensorInfo> tensors() const noexcept { return tensors_; }
  /// Null where there is none of that name.
  [[nodiscard]] const TensorInfo* find(const std::string& name) const noexcept;
  /// `__metadata__`; empty where the header has none.
  [[nodiscard]] const Metadata& metadata() const noexcept { return metadata_; }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return file_.path(); }

  /// Fills `out` with the tensor's bytes from `begin_bytes` on. `tensor` is one of tensors(); a
  /// range beyond it is a programmer's error.
  void read(const TensorInfo& tensor, int64_t begin_bytes, std::span<std::byte> out) const;
  /// Fills `out` with the tensor's elements from `begin` on, as fp32 (F64 is rounded to nearest). A
  /// usage error for types that are no weights. Works in pieces of 64 KiB.
  void read_floats(const TensorInfo& tensor, int64_t begin, std::span<float> out) const;

 private:
  explicit SafetensorsFile(File file) : file_(std::move(file)) {}

  File file_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string, size_t> by_name_;
  Metadata metadata_;
};

/// The tensors of a checkpoint by name, wherever they lie.
class CheckpointReader {
 public:
  /// `path` is a .safetensors file, or a directory with model.safetensors or, where there is none,
  /// model.safetensors.index.json and the files it names. All of them are opened and checked, and
  /// every tensor of the index must be where the index says.
  [[nodiscard]] static CheckpointReader open(const std::filesystem::path& path);

  /// Sorted by name.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] bool contains(const std::string& name) const noexcept;
  /// A usage error that names the checkpoint where there is no such tensor.
  [[nodiscard]] const TensorInfo& tensor(const std::string& name) const;
  /// As those of SafetensorsFile; a usage error where there is no such tensor.
  void read(const std::string& name, int64_t begin_bytes, std::span<std::byte> out) const;
  void read_floats(const std::string& name, int64_t begin, std::span<float> out) const;

  [[nodiscard]] std::span<const SafetensorsFile> files() const noexcept { return files_; }
  /// As given to open().
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }

 private:
  struct Place {
    size_t file = 0;
    size_t tensor = 0;  // in the file's tensors()
  };

  [[nodiscard]] const Place& place_of(const std::string& name) const;
  void open_index(const std::filesystem::path& index);

  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Place> places_;
};

/// A tensor to be written.
struct TensorHeader {
  std::string name;
  ElementType type = ElementType::kBf16;
  std::vector<int64_t> shape;
};

/// Writes one file, as "<path>.partial" until it is whole. Data lies in the order of the list;
/// tensors are aligned to their element size if those of wider types come first. Names are UTF-8.
class SafetensorsWriter {
 public:
  /// Creates the partial file, reserves its full size (a full disk is found here) and writes the
  /// header. Names that repeat and shapes that overflow are usage errors.
  SafetensorsWriter(const std::filesystem::path& path, std::span<const TensorHeader> tensors,
                    const Metadata& metadata = {{"format", "pt"}});

  /// The next bytes of the data; a piece may span tensors. More than is left is an error, and then
  /// nothing of the piece is written.
  void write(std::span<const std::byte> piece);
  [[nodiscard]] int64_t bytes_left() const noexcept { return end_bytes_ - next_bytes_; }

  /// The data is on the disk and the file is closed; an error if bytes are missing. Once done,
  /// again does nothing.
  void complete();
  /// Gives the completed file its name. A writer that goes without this removes the partial file.
  void publish();
  void finish() {
    complete();
    publish();
  }

 private:
  // A file that is removed unless it is renamed first.
  class Partial {
   public:
    explicit Partial(std::filesystem::path path) : path_(std::move(path)) {}
    Partial(Partial&& other) noexcept : path_(std::exchange(other.path_, {})) {}
    Partial& operator=(Partial&&) = delete;
    ~Partial();
    [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
    void rename(const std::filesystem::path& to);

   private:
    std::filesystem::path path_;  // empty when there is nothing to remove
  };

  std::filesystem::path path_;
  Partial partial_;
  std::optional<File> file_;  // empty from complete() on
  int64_t next_bytes_ = 0;
  int64_t end_bytes_ = 0;
};

/// Writes a directory's model.safetensors, or model-0000i-of-0000n.safetensors and their index
/// where the data is more than `max_shard_bytes`. A shard is closed before the tensor that would
/// not fit; a larger tensor has a shard of its own.
class CheckpointWriter {
 public:
  /// Creates the directory where there is none, and all partial files at their full sizes.
  CheckpointWriter(std::filesystem::path directory, std::span<const TensorHeader> tensors,
                   int64_t max_shard_bytes);

  /// The next bytes of the data, in the order of the list; a piece may span tensors and shards.
  void write(std::span<const std::byte> piece);

  /// Syncs all files, then gives them their names, the index last, and removes what an earlier
  /// checkpoint or a killed export left in the directory under names that this class writes. An
  /// error if bytes are missing. A writer that goes without this leaves nothing behind.
  void finish();

 private:
  std::filesystem::path directory_;
  std::vector<std::string> file_names_;
  std::vector<SafetensorsWriter> shards_;
  size_t current_ = 0;
  std::string index_text_;  // empty for a single file
};

}  // namespace strata::model
