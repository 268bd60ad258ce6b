// The tensors of a checkpoint and the files that they lie in: one, or one for each rank that held a
// part of the state. docs/formats.md describes them. Between checkpoint.cc, checkpoint_save.cc and
// export.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "model/llama.h"
#include "model/safetensors.h"
#include "pipeline/placement.h"

struct XXH3_state_s;  // NOLINT: that of xxhash.h

namespace strata::train {

inline constexpr std::string_view kCheckpointPrefix = "checkpoint-";
inline constexpr int kOneFileFormat = 1;
inline constexpr int kManyFilesFormat = 2;
inline constexpr const char* kStateFile = "state.safetensors";
inline constexpr const char* kRunFile = "trainer_state.json";
/// Bytes of a slice that have one checksum, in checkpoints of many files.
inline constexpr size_t kChecksumPieceBytes = size_t{4} << 20;

/// "state-00001-of-00004.safetensors", the first of them for `index` 0.
[[nodiscard]] std::string state_file_name(int index, int files);

/// One tensor of one kind of state, and where it lies in its unit.
struct StateTensor {
  model::TensorHeader header;
  int unit;
  pipeline::StateKind kind;
  size_t offset_bytes, size_bytes;
};

/// All that is saved of a model, in the order in which it is.
[[nodiscard]] std::vector<StateTensor> state_tensors(const model::Llama& llama,
                                                     cpu_adam::MomentFormat moments);

/// XXH3-64 of bytes that come in pieces.
class Checksum {
 public:
  Checksum();
  void add(std::span<const std::byte> bytes);
  /// 16 hexadecimal digits, of what came since the last call.
  [[nodiscard]] std::string take();

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const noexcept;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

/// "'<checkpoint>' <what>; resume from an older checkpoint": a usage error.
[[nodiscard]] Error damaged(const std::filesystem::path& checkpoint, const std::string& what);

/// trainer_state.json of a checkpoint in a format that this version reads.
[[nodiscard]] nlohmann::json read_run_file(const std::filesystem::path& checkpoint);

/// The tensors of a checkpoint, whichever files they lie in. For one thread.
class CheckpointTensors {
 public:
  /// Opens all files and checks that each tensor is there from its first to its last byte. Throws
  /// as load_checkpoint.
  explicit CheckpointTensors(const std::filesystem::path& checkpoint);

  /// What a tensor is as a whole.
  struct Tensor {
    model::ElementType type = model::ElementType::kF32;
    std::vector<int64_t> shape;
    size_t size_bytes = 0;

   private:
    friend class CheckpointTensors;
    struct Slice {
      size_t file = 0;
      const model::TensorInfo* info = nullptr;
      size_t first_bytes = 0;  // of the tensor
      size_t piece_bytes = 0;  // that have one checksum
      std::string checksums;   // 16 digits each
    };
    std::vector<Slice> slices;  // in their order
  };

  /// By name.
  [[nodiscard]] const std::map<std::string, Tensor>& all() const noexcept { return tensors_; }
  /// Null where there is none of that name.
  [[nodiscard]] const Tensor* find(const std::string& name) const noexcept;

  /// Fills `out` with the tensor's bytes from `begin_bytes` on, unverified.
  void read(const Tensor& tensor, size_t begin_bytes, std::span<std::byte> out) const;

  /// Hands out the bytes from `begin_bytes` to `end_bytes`, at most 1 MiB at a time and in their
  /// order, with the offset of the first of them. Reads whole pieces of those that have a checksum,
  /// and throws once one has been handed out whose checksum differs.
  using Sink = std::function<void(size_t offset_bytes, std::span<const std::byte> bytes)>;
  void read_verified(const std::string& name, size_t begin_bytes, size_t end_bytes,
                     const Sink& sink) const;

 private:
  void open_one_file(const nlohmann::json& run);
  void open_many_files(const nlohmann::json& run);
  const model::SafetensorsFile& open_file(const std::string& name);

  std::filesystem::path checkpoint_;
  std::vector<std::unique_ptr<const model::SafetensorsFile>> files_;
  std::map<std::string, Tensor> tensors_;
  mutable std::vector<std::byte> buffer_;
};

}  // namespace strata::train
