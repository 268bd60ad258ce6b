// How the kernels cut their work: into chunks of about one size, by shape alone, so that no result
// depends on which thread runs a chunk.
#pragma once

#include <oneapi/tbb/task_arena.h>

#include <algorithm>
#include <cstdint>

#include "base/parallel.h"

namespace strata::gpu::host {

/// Enough to be worth a task (some microseconds), and few enough for a chunk's arrays to stay in a
/// second-level cache.
inline constexpr int64_t kChunkElements = 32768;

[[nodiscard]] constexpr int64_t ceil_div(int64_t a, int64_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// Rows of `width` elements that make up one chunk.
[[nodiscard]] constexpr int64_t rows_of_chunk(int64_t width) noexcept {
  return std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, width));
}

/// Calls body(begin, end) for each chunk of [0, count), `chunk` long but for the last, in any order
/// on the threads of `arena`; a single chunk runs on the calling thread. Blocks until done.
template <class Body>
void for_each_chunk(tbb::task_arena& arena, int64_t count, int64_t chunk, const Body& body) {
  if (count <= 0) return;
  if (count <= chunk) return body(int64_t{0}, count);
  for_each_index(arena, ceil_div(count, chunk),
                 [&](int64_t i) { body(i * chunk, std::min((i + 1) * chunk, count)); });
}

}  // namespace strata::gpu::host
