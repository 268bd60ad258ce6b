#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"

namespace strata::train {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no NaN and no infinity: dump() writes null for them.
std::string dump(Json line) {
  for (const auto& value : line) {
    if (value.is_number_float() && !std::isfinite(value.get<double>())) {
      line["finite"] = false;
      break;
    }
  }
  return line.dump();
}

/// The step of a whole line, or -1 where the line is none of ours.
int64_t step_of(const std::string& line) {
  const Json parsed = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return -1;
  const auto step = parsed.find("step");
  return step != parsed.end() && step->is_number_integer() ? step->get<int64_t>() : -1;
}

struct Kept {
  int64_t bytes = 0;
  int64_t last_step = -1;  // of the last line, if that is a training step
};

/// Up to the end of the last good line before the first one of a step above `last_step`. Lines that
/// cannot be read count as torn only at the end: in between, somebody put them there.
Kept what_to_keep(const std::filesystem::path& path, int64_t last_step) {
  std::ifstream file(path, std::ios::binary);
  int64_t offset = 0;
  Kept keep;
  for (std::string line; std::getline(file, line) && !file.eof();) {  // eof: no line break ended it
    offset += static_cast<int64_t>(line.size()) + 1;
    const int64_t step = step_of(line);
    if (step > last_step) break;
    if (step < 0) continue;
    const bool is_training = Json::parse(line, nullptr, false).contains("loss");
    keep = {offset, is_training ? step : -1};
  }
  return keep;
}

}  // namespace

std::string to_json(const TrainMetrics& metrics) {
  return dump({{"step", metrics.step},
               {"loss", metrics.loss},
               {"grad_norm", metrics.grad_norm},
               {"clipped", metrics.clipped},
               {"lr", metrics.lr},
               {"tokens_per_second", metrics.tokens_per_second},
               {"tokens", metrics.tokens},
               {"seconds", metrics.seconds},
               {"device_bytes", metrics.device_bytes},
               {"host_bytes", metrics.host_bytes},
               {"nvme_bytes_written", metrics.nvme_bytes_written}});
}

std::string to_json(const EvalMetrics& metrics) {
  return dump({{"step", metrics.step}, {"eval_loss", metrics.eval_loss}});
}

MetricsWriter::MetricsWriter(std::filesystem::path path, int64_t resumed_step)
    : path_(std::move(path)) {
  const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
  fd_ = UniqueFd::adopt(::open(path_.c_str(), flags, 0644));
  if (!fd_) throw IoError("open", path_.string(), errno);
  const Kept keep = what_to_keep(path_, resumed_step);
  last_step_ = keep.last_step;
  if (::ftruncate(fd_.get(), keep.bytes) != 0) throw IoError("shorten", path_.string(), errno);
}

void MetricsWriter::append_line(std::string line) {
  line.push_back('\n');
  for (size_t done = 0; done < line.size();) {
    const ssize_t put = ::write(fd_.get(), line.data() + done, line.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      throw IoError("write", path_.string(), put < 0 ? errno : ENOSPC, -1,
                    static_cast<int64_t>(line.size()));
    }
    done += static_cast<size_t>(put);
  }
}

}  // namespace strata::train
