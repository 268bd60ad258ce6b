// One owner for anything that is opened and must be closed: file descriptors, streams, arenas.
#pragma once

#include <utility>

namespace strata {

/// Owns one value of Traits::Type and releases it with Traits::close(value) noexcept.
/// Traits::invalid() is the empty value. Not thread-safe; moving leaves the source empty.
template <class Traits>
class UniqueHandle {
 public:
  using Type = typename Traits::Type;

  UniqueHandle() noexcept = default;
  UniqueHandle(UniqueHandle&& other) noexcept : value_(other.release()) {}
  UniqueHandle& operator=(UniqueHandle&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  ~UniqueHandle() { reset(); }

  /// Takes over a value that somebody else opened.
  [[nodiscard]] static UniqueHandle adopt(Type value) noexcept {
    UniqueHandle handle;
    handle.value_ = value;
    return handle;
  }

  [[nodiscard]] Type get() const noexcept { return value_; }
  [[nodiscard]] explicit operator bool() const noexcept { return value_ != Traits::invalid(); }
  [[nodiscard]] Type release() noexcept { return std::exchange(value_, Traits::invalid()); }
  void reset(Type value = Traits::invalid()) noexcept {
    const Type old = std::exchange(value_, value);
    if (old != Traits::invalid()) Traits::close(old);
  }

 private:
  Type value_ = Traits::invalid();
};

}  // namespace strata
