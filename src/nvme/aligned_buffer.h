// Memory that a drive can transfer from and to.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "base/bytes.h"

namespace strata::nvme {

/// Zeroed bytes at an address that is a multiple of `alignment_bytes` (a power of two).
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  AlignedBuffer(size_t size_bytes, size_t alignment_bytes) : size_bytes_(size_bytes) {
    if (size_bytes == 0) return;
    const size_t whole = align_up(size_bytes, alignment_bytes);
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment_bytes, whole)));
    if (!data_) throw std::bad_alloc();
    std::memset(data_.get(), 0, whole);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }
  [[nodiscard]] size_t size() const noexcept { return size_bytes_; }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {data_.get(), size_bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_bytes_ = 0;
};

}  // namespace strata::nvme
