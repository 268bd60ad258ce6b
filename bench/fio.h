// fio (https://github.com/axboe/fio), the disk benchmark to be measured against, as a child
// process.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace strata::bench {

struct FioJob {
  std::string path;    // an existing file
  std::string mode;    // fio's --rw: "read", "write", "rw", "randread"
  size_t file_bytes;   // the part of the file that it works on
  size_t total_bytes;  // to transfer
  size_t block_bytes;
  unsigned depth;
  bool direct;
};

struct FioResult {
  double bytes_per_second = 0;
  double cpu_seconds_per_byte = 0;
};

/// Runs the job with io_uring, registered file and registered buffers in huge pages. Blocks.
/// Nothing where there is no fio; throws where it fails.
[[nodiscard]] std::optional<FioResult> run_fio(const FioJob& job);

}  // namespace strata::bench
