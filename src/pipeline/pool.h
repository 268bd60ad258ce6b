// Buffers that take turns, while a graph is being built.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/error.h"
#include "pipeline/step_graph.h"

namespace strata::pipeline {

/// What is put into a slot stays there until the slot is taken for something else; the least
/// recently used one that nobody holds is taken first. The order of tasks that follows from this is
/// the builder's affair.
class Pool {
 public:
  static constexpr int64_t kNothing = -1;

  void add(BufferId buffer) { slots_.push_back({.buffer = buffer}); }
  [[nodiscard]] size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] BufferId buffer(size_t slot) const { return slots_[slot].buffer; }
  [[nodiscard]] bool has_free() const {
    for (const Slot& slot : slots_) {
      if (slot.holders == 0) return true;
    }
    return false;
  }

  [[nodiscard]] std::optional<size_t> find(int64_t content) const {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (content != kNothing && slots_[i].content == content) return i;
    }
    return std::nullopt;
  }
  /// A slot that nobody holds, now held, with new content.
  size_t take(int64_t content) {
    std::optional<size_t> oldest;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].holders > 0) continue;
      if (!oldest || slots_[i].used_at < slots_[*oldest].used_at) oldest = i;
    }
    STRATA_CHECK(oldest.has_value(), "a slot is free");
    slots_[*oldest].content = content;
    hold(*oldest);
    return *oldest;
  }
  void hold(size_t slot) {
    ++slots_[slot].holders;
    slots_[slot].used_at = ++clock_;
  }
  void release(size_t slot) {
    STRATA_CHECK(slots_[slot].holders > 0, "a slot is held before it is released");
    --slots_[slot].holders;
  }
  /// For the next graph: nothing is known of what the slots hold.
  void forget() {
    for (Slot& slot : slots_) slot = {.buffer = slot.buffer};
    clock_ = 0;
  }

 private:
  struct Slot {
    BufferId buffer = kNoBuffer;
    int64_t content = kNothing;
    int64_t used_at = 0;
    int holders = 0;
  };
  std::vector<Slot> slots_;
  int64_t clock_ = 0;
};

}  // namespace strata::pipeline
