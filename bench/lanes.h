// The benchmarks of `strata bench`, by lane.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "bench/report.h"
#include "gpu/device.h"

namespace strata::bench {

struct Options {
  int threads = 0;                   // of what the host computes beside the device; 0: all cores
  int repetitions = 5;               // of which the median is taken
  int64_t parameters = 256'000'000;  // of the optimizer's state
  std::filesystem::path path = ".";  // a directory on the drive to measure
  size_t size_bytes = 0;             // of the file there; 0: the lane's own choice
  std::filesystem::path traces;      // an existing directory for traces; empty: none are written
  std::function<void(const std::string&)> say = [](const std::string&) {};  // a line for people
};

/// "adam/...": one AdamW step by the CPU over `parameters` in each moment format, GB/s of the bytes
/// that the format must move and parameters/s; the sum of squares of a gradient; "adam/classic",
/// all in fp32. The ceiling is a copy by the same threads. Then the same from the cache ("8MB").
[[nodiscard]] std::vector<Row> run_adam(gpu::Device& device, const Options& options);

/// "matmul/...": the device's bf16 products at a training step's shapes, GFLOP/s. The ceiling
/// is the fastest of them.
[[nodiscard]] std::vector<Row> run_matmul(gpu::Device& device, const Options& options);

/// "step/...": whole optimizer steps of a fixed model (hidden 1024, 8 layers, 16 heads, vocabulary
/// 32000, sequence 512) on the device: tokens/s, and the arithmetic really done, recomputation
/// included, as a share of the bf16 product's peak, measured between the steps.
[[nodiscard]] std::vector<Row> run_step(gpu::Device& device, const Options& options);

/// "nvme/...": an nvme::Drive on a file in `path`, in turns with fio on the same file at the same
/// block size and depth: GB/s of reading, writing, both by halves and 4 KiB at random, fio's median
/// being the ceiling, and CPU seconds per GB. The file has no name and is gone however the run
/// ends.
[[nodiscard]] std::vector<Row> run_nvme(gpu::Device& device, const Options& options);

/// "pipeline/...": steps of a small Llama on a host device of its own with one thread, links and
/// a drive in `path` slowed down so that compute, a link, or the drive bounds the step: seconds a
/// step, and the bounding lane's busy part of it; steps whose loss is not that of a run with
/// everything on the device, made in turns, count as wrong. "... rate": what that link or drive
/// carried, of what it was slowed down to. "predict/...": the step that the simulator foretells,
/// over the one measured. Writes "pipeline-....json" into `traces`.
[[nodiscard]] std::vector<Row> run_pipeline(gpu::Device& device, const Options& options);
/// "ranks/...": steps of a small Llama in full_shard on two ranks, threads with a core each, and a
/// connection between them that is slowed down so that compute or the collective lane bounds the
/// step: seconds a step, and the busy part of that lane (of the collective one: the time that its
/// bytes take); steps whose loss is not that of the same ranks with a connection as fast as memory
/// count as wrong. Writes "ranks-....json" into `traces`.
[[nodiscard]] std::vector<Row> run_ranks(gpu::Device& device, const Options& options);

}  // namespace strata::bench
