#include "model/tokenizer.h"

#include <fmt/format.h>

#include "base/error.h"

namespace strata::model {

std::vector<int32_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size());
  for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  return ids;
}

std::string ByteTokenizer::decode(std::span<const int32_t> ids) const {
  std::string bytes;
  bytes.reserve(ids.size());
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      throw usage_error(
          fmt::format("token id {} is not a byte; the byte tokenizer has ids 0 to 255", id));
    }
    bytes.push_back(static_cast<char>(static_cast<unsigned char>(id)));
  }
  return bytes;
}

}  // namespace strata::model
