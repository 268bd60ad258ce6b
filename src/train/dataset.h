// Training data: files of tokens, cut into windows, handed out as micro-batches.
//
// Files are read window by window as they are asked for, never whole and never mapped: what this
// takes of host memory is memory_bytes() and does not grow with use. Objects are for one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strata::train {

/// What a file holds. kAuto goes by the name: *.txt and *.md are text, *.u16.bin and *.u32.bin
/// tokens of that width, any other *.bin 16-bit tokens.
enum class SourceType : uint8_t { kAuto, kText, kTokensU16, kTokensU32 };

struct SourceSpec {
  std::string path;
  SourceType type = SourceType::kAuto;
  friend bool operator==(const SourceSpec&, const SourceSpec&) = default;
};

struct DatasetOptions {
  std::vector<SourceSpec> train{};
  std::vector<SourceSpec> eval{};  // held-out data of its own; empty: a part of `train` is held out
  double val_set_size = 0;         // that part, where `eval` is empty
  int64_t sequence_len = 0;
  int64_t vocab_size = 0;  // of the model: an id at or above it is refused when it is read
};

class TokenFile;

/// A numbered set of windows over one or more files.
///
/// A source of n tokens has ceil((n - 1) / sequence_len) windows. Window i has tokens
/// [i * sequence_len, (i + 1) * sequence_len) as inputs and the same range moved on by one as
/// targets, so each token but the first is a target exactly once. Where a source ends within its
/// last window, inputs go on with 0 and targets with -1 (not part of the loss).
class WindowSet {
 public:
  explicit WindowSet(int64_t sequence_len);

  [[nodiscard]] int64_t sequence_len() const noexcept { return sequence_len_; }
  [[nodiscard]] int64_t window_count() const noexcept { return starts_.back(); }
  /// Targets that are not padding.
  [[nodiscard]] int64_t target_count() const noexcept { return target_count_; }
  [[nodiscard]] size_t memory_bytes() const noexcept;

  /// Fills both spans, sequence_len each. Throws a usage error that names file, byte offset and id
  /// for an id outside the vocabulary, and an Error where the file cannot be read any more.
  void read(int64_t window, std::span<int32_t> tokens, std::span<int32_t> targets);
  /// Targets of the window that are not padding: at least one. Reads nothing.
  [[nodiscard]] int64_t targets_of(int64_t window) const;

 private:
  friend struct Datasets open_datasets(const DatasetOptions& options);
  struct Part {
    std::shared_ptr<const TokenFile> file;
    int64_t first_window;
  };
  void add(std::shared_ptr<const TokenFile> file, int64_t first_window, int64_t window_count);
  [[nodiscard]] size_t part_with(int64_t window) const;

  int64_t sequence_len_;
  std::vector<Part> parts_;
  std::vector<int64_t> starts_{0};  // of each part's windows in this set, and the end of the last
  int64_t target_count_ = 0;
  std::vector<std::byte> raw_;  // one window as it is in the file
};

struct Datasets {
  WindowSet train;
  WindowSet eval;  // no windows where nothing is held out
};

/// Opens and examines all sources. Held out of `train` are val_set_size of all windows, rounded, at
/// least one and never all, taken from the end of each source in proportion to its length. A target
/// of one part is never a target of the other.
/// Throws a usage error that names the file where one is missing, empty, shorter than
/// sequence_len + 1 tokens, of a size that is no multiple of its token, or of a type that its name
/// does not tell.
[[nodiscard]] Datasets open_datasets(const DatasetOptions& options);

/// Steps that show every window at least `num_epochs` times.
[[nodiscard]] constexpr int64_t steps_of_epochs(int64_t num_epochs, int64_t windows_per_epoch,
                                                int64_t windows_per_step) noexcept {
  return (num_epochs * windows_per_epoch + windows_per_step - 1) / windows_per_step;
}

/// Where training is in its data: the next window to hand out.
struct DataPosition {
  int64_t epoch = 0;
  int64_t index = 0;  // within the order of that epoch
  friend bool operator==(DataPosition, DataPosition) = default;
};

/// Endless micro-batches of training data. The order of an epoch is a permutation by Fisher and
/// Yates with random numbers at (seed, epoch), so it depends on nothing handed out before: a
/// restored position goes on with the very same windows.
class DataLoader {
 public:
  /// `windows` is not empty. Without `shuffle` every epoch is in the order of the files.
  DataLoader(WindowSet windows, int64_t micro_batch_size, uint64_t seed, bool shuffle);

  /// Fills both spans, micro_batch_size * sequence_len each. Where an epoch ends within the batch,
  /// the next one fills it up. Returns how many targets are not padding. Throws as WindowSet::read,
  /// and then stays where it was.
  int64_t next(std::span<int32_t> tokens, std::span<int32_t> targets);
  /// Goes on by so many micro-batches as next() would, without reading them, and returns what it
  /// would have.
  int64_t skip(int64_t micro_batches);

  [[nodiscard]] DataPosition state() const noexcept { return position_; }
  /// Throws a usage error for a position that this data does not have.
  void restore(DataPosition position);

  [[nodiscard]] int64_t windows_per_epoch() const noexcept { return windows_.window_count(); }
  [[nodiscard]] size_t memory_bytes() const noexcept;

 private:
  [[nodiscard]] int64_t window_at(DataPosition position);

  WindowSet windows_;
  int64_t micro_batch_size_;
  uint64_t seed_;
  DataPosition position_;
  std::vector<uint32_t> order_;  // of epoch order_epoch_; empty without shuffle
  int64_t order_epoch_ = -1;
};

/// All windows of a set in order, in micro-batches; the last one is filled up with windows whose
/// targets are all -1.
class EvalLoader {
 public:
  /// `max_batches`: no more than the first of them; 0: all.
  EvalLoader(WindowSet windows, int64_t micro_batch_size, int64_t max_batches = 0);

  [[nodiscard]] int64_t batch_count() const noexcept;
  /// Starts again with the first window.
  void rewind() noexcept { next_window_ = 0; }
  /// Returns how many targets are not padding: 0 after the last batch, the spans untouched.
  [[nodiscard]] int64_t next(std::span<int32_t> tokens, std::span<int32_t> targets);
  /// Goes on by one micro-batch as next() would, without reading it, and returns what it would
  /// have.
  int64_t skip();

  [[nodiscard]] size_t memory_bytes() const noexcept { return windows_.memory_bytes(); }

 private:
  WindowSet windows_;
  int64_t micro_batch_size_;
  int64_t end_window_;
  int64_t next_window_ = 0;
};

}  // namespace strata::train
