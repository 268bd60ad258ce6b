#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "gpu/host/chunks.h"
#include "gpu/host/kernels.h"
#include "gpu/host/serial_gemm.h"

namespace strata::gpu::host {
namespace {

/// C is cut into tiles of this size, each the work of one thread; k is never cut.
struct Tile {
  int64_t rows = 0, columns = 0;
};

/// The size of equal pieces of at most `most`, as multiples of `multiple`.
int64_t even_piece(int64_t length, int64_t most, int64_t multiple) {
  const int64_t pieces = ceil_div(length, most);
  return std::min(length, ceil_div(ceil_div(length, pieces), multiple) * multiple);
}

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();

/// Sizes to cut to, and how many tiles make one good enough to stop at it: enough for a few cores
/// to get about the same share. More would be smaller, and slower on fewer cores.
struct TileChoice {
  int64_t most_rows, most_columns, least_tiles;
};

// Rates beside each are those measured with oneDNN 2.6 on one Zen 4 core in bf16, against one
// product of the whole.

/// Whole rows of C, where A is not transposed, leave all tiles dense (serial_gemm.h). Each tile
/// copies all of B, hence no fewer rows.
constexpr TileChoice kDenseChoices[] = {
    {256, kAnyNumber, 8},  // 0.98 to 1.01
    {128, kAnyNumber, 8},  // 0.93 to 0.96
};

/// The tile's area bounds oneDNN's temporaries.
constexpr TileChoice kStridedChoices[] = {
    {352, 1024, 8},  // 0.99 to 1.08
    {256, 512, 8},   // 0.97 to 1.04
    {256, 256, 8},   // 0.92 to 1.02
    {128, 256, 4},   // 0.93 to 0.99
    {128, 128, 0},   // 0.85 to 0.93
};

int64_t tiles_of(const MatmulArgs& args, const Tile& tile) {
  return ceil_div(args.m, tile.rows) * ceil_div(args.n, tile.columns);
}

bool is_dense(const MatmulArgs& args) {
  return args.a_stride == (args.transpose_a ? args.m : args.k) &&
         args.b_stride == (args.transpose_b ? args.k : args.n) && args.c_stride == args.n;
}

Tile tile_of(const MatmulArgs& args) {
  if (!args.transpose_a && is_dense(args)) {
    for (const TileChoice& choice : kDenseChoices) {
      const Tile tile{even_piece(args.m, choice.most_rows, 16), args.n};
      if (tiles_of(args, tile) >= choice.least_tiles) return tile;
    }
  }
  Tile tile;
  for (const TileChoice& choice : kStridedChoices) {
    tile = {even_piece(args.m, choice.most_rows, 32), even_piece(args.n, choice.most_columns, 64)};
    if (tiles_of(args, tile) >= choice.least_tiles) break;
  }
  return tile;
}

SerialGemm find_gemm(const MatmulArgs& args, int64_t rows, int64_t columns) {
  return SerialGemm::find({.m = rows,
                           .n = columns,
                           .k = args.k,
                           .dtype = args.dtype,
                           .c_dtype = args.c_dtype,
                           .transpose_a = args.transpose_a,
                           .transpose_b = args.transpose_b,
                           .accumulate = args.accumulate,
                           .a_stride = args.a_stride,
                           .b_stride = args.b_stride,
                           .c_stride = args.c_stride});
}

void zero(const MatmulArgs& args) {
  const size_t size = size_of(args.c_dtype);
  for (int64_t row = 0; row < args.m; ++row) {
    std::memset(static_cast<std::byte*>(args.c) + static_cast<size_t>(row * args.c_stride) * size,
                0, static_cast<size_t>(args.n) * size);
  }
}

}  // namespace

size_t matmul_scratch_bytes(const MatmulArgs& /*args*/) { return 0; }

void matmul(const MatmulArgs& args, tbb::task_arena& arena) {
  if (args.m == 0 || args.n == 0) return;
  if (args.k == 0) {
    if (!args.accumulate) zero(args);
    return;
  }

  const Tile tile = tile_of(args);
  const int64_t tile_rows = ceil_div(args.m, tile.rows);
  const int64_t tile_columns = ceil_div(args.n, tile.columns);
  const int64_t last_rows = args.m - (tile_rows - 1) * tile.rows;
  const int64_t last_columns = args.n - (tile_columns - 1) * tile.columns;
  const auto height = [&](int64_t i) { return i + 1 < tile_rows ? tile.rows : last_rows; };
  const auto width = [&](int64_t j) { return j + 1 < tile_columns ? tile.columns : last_columns; };
  // The kinds of tile there are: inside, at the right, at the bottom, in the corner.
  SerialGemm gemms[2][2];
  for (const int64_t bottom : {0, 1}) {
    for (const int64_t right : {0, 1}) {
      gemms[bottom][right] = find_gemm(args, bottom != 0 ? last_rows : tile.rows,
                                       right != 0 ? last_columns : tile.columns);
    }
  }

  const auto size = static_cast<int64_t>(size_of(args.dtype));
  const auto c_size = static_cast<int64_t>(size_of(args.c_dtype));
  const int64_t a_row_bytes = (args.transpose_a ? 1 : args.a_stride) * size;
  const int64_t b_column_bytes = (args.transpose_b ? args.b_stride : 1) * size;
  for_each_chunk(arena, tile_rows * tile_columns, 1, [&](int64_t begin, int64_t /*end*/) {
    const int64_t i = begin / tile_columns;
    const int64_t j = begin % tile_columns;
    const int64_t row = i * tile.rows;
    const int64_t column = j * tile.columns;
    gemms[height(i) == last_rows ? 1 : 0][width(j) == last_columns ? 1 : 0].run(
        static_cast<const std::byte*>(args.a) + row * a_row_bytes,
        static_cast<const std::byte*>(args.b) + column * b_column_bytes,
        static_cast<std::byte*>(args.c) + (row * args.c_stride + column) * c_size);
  });
}

}  // namespace strata::gpu::host
