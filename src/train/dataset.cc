#include "train/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/random.h"

namespace strata::train {
namespace {

SourceType resolve_type(const SourceSpec& source) {
  if (source.type != SourceType::kAuto) return source.type;
  const std::string_view path = source.path;
  if (path.ends_with(".txt") || path.ends_with(".md")) return SourceType::kText;
  if (path.ends_with(".u32.bin")) return SourceType::kTokensU32;
  if (path.ends_with(".bin")) return SourceType::kTokensU16;
  throw usage_error(fmt::format(
      "the name of dataset '{}' does not say what it holds; give its type: text, tokens_u16 or "
      "tokens_u32",
      source.path));
}

int64_t token_bytes(SourceType type) {
  switch (type) {
    case SourceType::kTokensU16:
      return 2;
    case SourceType::kTokensU32:
      return 4;
    case SourceType::kAuto:
    case SourceType::kText:
      break;
  }
  return 1;
}

File open_source(const std::string& path) {
  try {
    return File::open_for_read(path);
  } catch (const IoError& error) {
    throw usage_error(
        fmt::format("cannot open dataset '{}': {}", path, std::strerror(error.errno_code())));
  }
}

}  // namespace

/// A source: `token_count` tokens of `width_bytes` each. Text is tokens of one byte, since that is
/// what the byte tokenizer makes of it.
class TokenFile {
 public:
  TokenFile(const SourceSpec& source, int64_t sequence_len, int64_t vocab_size)
      : width_bytes_(token_bytes(resolve_type(source))),
        sequence_len_(sequence_len),
        vocab_size_(vocab_size),
        file_(open_source(source.path)) {
    const int64_t size_bytes = file_.size_bytes();
    if (size_bytes == 0) throw usage_error(fmt::format("dataset '{}' is empty", source.path));
    if (size_bytes % width_bytes_ != 0) {
      throw usage_error(fmt::format(
          "dataset '{}' has {} bytes, which is not a whole number of {}-byte tokens; it is cut off "
          "or of another type",
          source.path, size_bytes, width_bytes_));
    }
    token_count_ = size_bytes / width_bytes_;
    if (token_count_ < sequence_len + 1) {
      throw usage_error(fmt::format(
          "dataset '{}' has {} tokens, but one sequence needs {} (sequence_len + 1); use more data "
          "or a smaller sequence_len",
          source.path, token_count_, sequence_len + 1));
    }
  }

  [[nodiscard]] int64_t window_count() const noexcept {
    return (token_count_ - 1 + sequence_len_ - 1) / sequence_len_;
  }
  [[nodiscard]] int64_t targets_before(int64_t window) const noexcept {
    return std::min(window * sequence_len_, token_count_ - 1);
  }

  /// `raw` has room for sequence_len + 1 tokens.
  void read(int64_t window, std::span<std::byte> raw, std::span<int32_t> tokens,
            std::span<int32_t> targets) const {
    const int64_t first = window * sequence_len_;
    const auto filled = static_cast<size_t>(targets_before(window + 1) - first);
    const std::span<std::byte> used = raw.first((filled + 1) * static_cast<size_t>(width_bytes_));
    file_.read_at(first * width_bytes_, used);

    for (size_t i = 0; i <= filled; ++i) {
      const int32_t id = checked_id(used, i, first);
      if (i < filled) tokens[i] = id;
      if (i > 0) targets[i - 1] = id;
    }
    std::ranges::fill(tokens.subspan(filled), 0);
    std::ranges::fill(targets.subspan(filled), -1);
  }

 private:
  /// Token `index` of `raw`, which begins with token `first` of the file; little-endian, as is
  /// every machine this runs on.
  [[nodiscard]] int32_t checked_id(std::span<const std::byte> raw, size_t index,
                                   int64_t first) const {
    const auto width = static_cast<size_t>(width_bytes_);
    uint32_t id = 0;
    std::memcpy(&id, raw.data() + index * width, width);
    if (id >= vocab_size_) {
      throw usage_error(fmt::format(
          "dataset '{}' has token id {} at byte {}, but the model's vocabulary has {} ids; use "
          "data made with the model's tokenizer, or check the type of the file",
          file_.path().string(), id, (first + static_cast<int64_t>(index)) * width_bytes_,
          vocab_size_));
    }
    return static_cast<int32_t>(id);
  }

  int64_t width_bytes_;
  int64_t sequence_len_;
  int64_t vocab_size_;
  int64_t token_count_ = 0;
  File file_;
};

WindowSet::WindowSet(int64_t sequence_len)
    : sequence_len_(sequence_len),
      raw_((static_cast<size_t>(sequence_len) + 1) * sizeof(uint32_t)) {}

void WindowSet::add(std::shared_ptr<const TokenFile> file, int64_t first_window,
                    int64_t window_count) {
  if (window_count == 0) return;
  target_count_ +=
      file->targets_before(first_window + window_count) - file->targets_before(first_window);
  parts_.push_back({std::move(file), first_window});
  starts_.push_back(starts_.back() + window_count);
}

size_t WindowSet::memory_bytes() const noexcept {
  return raw_.capacity() + parts_.capacity() * sizeof(Part) + starts_.capacity() * sizeof(int64_t) +
         parts_.size() * sizeof(TokenFile);
}

void WindowSet::read(int64_t window, std::span<int32_t> tokens, std::span<int32_t> targets) {
  STRATA_CHECK(window >= 0 && window < window_count(), "no such window");
  STRATA_CHECK(
      tokens.size() == static_cast<size_t>(sequence_len_) && targets.size() == tokens.size(),
      "a window fills sequence_len tokens and targets");
  const size_t index = part_with(window);
  const Part& part = parts_[index];
  part.file->read(part.first_window + window - starts_[index], raw_, tokens, targets);
}

int64_t WindowSet::targets_of(int64_t window) const {
  STRATA_CHECK(window >= 0 && window < window_count(), "no such window");
  const size_t index = part_with(window);
  const Part& part = parts_[index];
  const int64_t of_file = part.first_window + window - starts_[index];
  return part.file->targets_before(of_file + 1) - part.file->targets_before(of_file);
}

size_t WindowSet::part_with(int64_t window) const {
  const auto after = std::ranges::upper_bound(starts_, window);
  return static_cast<size_t>(after - starts_.begin()) - 1;
}

Datasets open_datasets(const DatasetOptions& options) {
  STRATA_CHECK(options.sequence_len > 0 && options.vocab_size > 0, "sizes are positive");
  const auto open = [&](const SourceSpec& source) {
    return std::make_shared<const TokenFile>(source, options.sequence_len, options.vocab_size);
  };
  Datasets datasets{WindowSet(options.sequence_len), WindowSet(options.sequence_len)};

  std::vector<std::shared_ptr<const TokenFile>> files;
  int64_t total = 0;
  for (const SourceSpec& source : options.train) {
    files.push_back(open(source));
    total += files.back()->window_count();
  }
  if (files.empty()) throw usage_error("there are no datasets to train on");
  if (total > std::numeric_limits<uint32_t>::max()) {
    throw usage_error(fmt::format(
        "the datasets make {} sequences, more than the {} that can be shuffled; raise sequence_len",
        total, std::numeric_limits<uint32_t>::max()));
  }

  int64_t held_out = 0;
  if (options.eval.empty() && options.val_set_size > 0 && total > 1) {
    held_out = std::clamp(std::llround(options.val_set_size * static_cast<double>(total)), 1LL,
                          static_cast<long long>(total - 1));
  }
  // Rounding what is held out up to each source, not of each source, spreads it evenly even where
  // every source is only a few windows long. Both factors are below 2^32.
  uint64_t seen = 0;
  uint64_t taken = 0;
  for (const auto& file : files) {
    const int64_t count = file->window_count();
    seen += static_cast<uint64_t>(count);
    const uint64_t due = static_cast<uint64_t>(held_out) * seen / static_cast<uint64_t>(total);
    const auto here = static_cast<int64_t>(due - std::exchange(taken, due));
    datasets.train.add(file, 0, count - here);
    datasets.eval.add(file, count - here, here);
  }
  for (const SourceSpec& source : options.eval) {
    auto file = open(source);
    const int64_t count = file->window_count();
    datasets.eval.add(std::move(file), 0, count);
  }
  return datasets;
}

DataLoader::DataLoader(WindowSet windows, int64_t micro_batch_size, uint64_t seed, bool shuffle)
    : windows_(std::move(windows)), micro_batch_size_(micro_batch_size), seed_(seed) {
  STRATA_CHECK(windows_.window_count() > 0 && micro_batch_size > 0, "there is nothing to load");
  if (shuffle) order_.resize(static_cast<size_t>(windows_.window_count()));
}

size_t DataLoader::memory_bytes() const noexcept {
  return windows_.memory_bytes() + order_.capacity() * sizeof(uint32_t);
}

int64_t DataLoader::window_at(DataPosition position) {
  if (order_.empty()) return position.index;
  if (order_epoch_ != position.epoch) {
    std::iota(order_.begin(), order_.end(), 0U);
    CounterRandom random(seed_, static_cast<uint64_t>(position.epoch));
    for (size_t last = order_.size() - 1; last > 0; --last) {
      std::swap(order_[last], order_[random.next_below(last + 1)]);
    }
    order_epoch_ = position.epoch;
  }
  return order_[static_cast<size_t>(position.index)];
}

int64_t DataLoader::next(std::span<int32_t> tokens, std::span<int32_t> targets) {
  const auto length = static_cast<size_t>(windows_.sequence_len());
  const auto batch = static_cast<size_t>(micro_batch_size_);
  STRATA_CHECK(tokens.size() == batch * length && targets.size() == tokens.size(),
               "a micro-batch fills micro_batch_size * sequence_len tokens and targets");
  DataPosition position = position_;
  int64_t unmasked = 0;
  for (size_t row = 0; row < batch; ++row) {
    const int64_t window = window_at(position);
    windows_.read(window, tokens.subspan(row * length, length),
                  targets.subspan(row * length, length));
    unmasked += windows_.targets_of(window);
    if (++position.index == windows_.window_count()) position = {position.epoch + 1, 0};
  }
  position_ = position;
  return unmasked;
}

int64_t DataLoader::skip(int64_t micro_batches) {
  int64_t unmasked = 0;
  for (int64_t window = 0; window < micro_batches * micro_batch_size_; ++window) {
    unmasked += windows_.targets_of(window_at(position_));
    if (++position_.index == windows_.window_count()) position_ = {position_.epoch + 1, 0};
  }
  return unmasked;
}

void DataLoader::restore(DataPosition position) {
  if (position.epoch < 0 || position.index < 0 || position.index >= windows_.window_count()) {
    throw usage_error(fmt::format(
        "cannot go on at sequence {} of epoch {}: the datasets have {} sequences, so they are not "
        "those that training began with",
        position.index, position.epoch, windows_.window_count()));
  }
  position_ = position;
}

EvalLoader::EvalLoader(WindowSet windows, int64_t micro_batch_size, int64_t max_batches)
    : windows_(std::move(windows)),
      micro_batch_size_(micro_batch_size),
      end_window_(max_batches > 0 && max_batches <= windows_.window_count() / micro_batch_size
                      ? max_batches * micro_batch_size
                      : windows_.window_count()) {
  STRATA_CHECK(micro_batch_size > 0, "a micro-batch has at least one sequence");
}

int64_t EvalLoader::batch_count() const noexcept {
  return (end_window_ + micro_batch_size_ - 1) / micro_batch_size_;
}

int64_t EvalLoader::next(std::span<int32_t> tokens, std::span<int32_t> targets) {
  const auto length = static_cast<size_t>(windows_.sequence_len());
  const auto batch = static_cast<size_t>(micro_batch_size_);
  STRATA_CHECK(tokens.size() == batch * length && targets.size() == tokens.size(),
               "a micro-batch fills micro_batch_size * sequence_len tokens and targets");
  if (next_window_ >= end_window_) return 0;
  int64_t unmasked = 0;
  for (size_t row = 0; row < batch; ++row) {
    const auto row_tokens = tokens.subspan(row * length, length);
    const auto row_targets = targets.subspan(row * length, length);
    if (next_window_ < end_window_) {
      unmasked += windows_.targets_of(next_window_);
      windows_.read(next_window_++, row_tokens, row_targets);
    } else {
      std::ranges::fill(row_tokens, 0);
      std::ranges::fill(row_targets, -1);
    }
  }
  return unmasked;
}

int64_t EvalLoader::skip() {
  int64_t unmasked = 0;
  const int64_t end = std::min(next_window_ + micro_batch_size_, end_window_);
  while (next_window_ < end) unmasked += windows_.targets_of(next_window_++);
  return unmasked;
}

}  // namespace strata::train
