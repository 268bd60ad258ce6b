#include "train/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace strata::train {
namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr std::string_view kClearLine = "\r\x1b[K";

/// Columns of the terminal, or a usual number of them.
size_t columns_of(std::FILE* out) noexcept {
  winsize size{};
  const bool known = ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

std::string bar(double part) {
  constexpr size_t kWidth = 20;
  const auto full = static_cast<size_t>(std::clamp(part, 0.0, 1.0) * kWidth);
  return fmt::format("[{:#<{}}{:.<{}}]", "", full, "", kWidth - full);
}

std::string describe(const ProgressSample& sample, const ProgressOptions& options) {
  const auto done = static_cast<double>(sample.step - options.first_step);
  const auto left = static_cast<double>(options.max_steps - sample.step);
  return fmt::format("step {}/{}  loss {:.4f}  {:.0f} tokens/s  ETA {}", sample.step,
                     options.max_steps, sample.loss, sample.tokens_per_second,
                     format_duration(left * sample.seconds / done));
}

/// fmt::print would throw where the output is closed; this does not.
void write(std::FILE* out, const std::string& text) {
  std::fputs(text.c_str(), out);
  std::fflush(out);
}

}  // namespace

bool is_terminal(std::FILE* out) noexcept { return ::isatty(::fileno(out)) == 1; }

std::string format_seconds(double seconds) {
  return seconds < 1 ? fmt::format("{:.3g} ms", seconds * 1e3) : fmt::format("{:.3g} s", seconds);
}

std::string format_duration(double seconds) {
  if (!(seconds >= 0 && seconds < 1e12)) return "?";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  const int64_t minutes = total / 60;
  const int64_t hours = minutes / 60;
  if (minutes == 0) return fmt::format("{}s", total);
  if (hours == 0) return fmt::format("{}m{:02}s", minutes, total % 60);
  if (hours < 24) return fmt::format("{}h{:02}m", hours, minutes % 60);
  return fmt::format("{}d{:02}h", hours / 24, hours % 24);
}

void ProgressReporter::update(const ProgressSample& sample) {
  if (options_.out == nullptr) return;
  const bool last = sample.step >= options_.max_steps;
  if (options_.terminal) {
    if (!last && !line_.empty() && sample.seconds - drawn_seconds_ < kRedrawSeconds) return;
    drawn_seconds_ = sample.seconds;
    const double part = static_cast<double>(sample.step) /
                        static_cast<double>(std::max<int64_t>(options_.max_steps, 1));
    line_ = bar(part) + " " + describe(sample, options_);
    draw();
  } else if (last || sample.step % options_.logging_steps == 0) {
    write(options_.out, describe(sample, options_) + "\n");
  }
}

void ProgressReporter::message(std::string_view text) {
  if (options_.out == nullptr) return;
  write(options_.out, fmt::format("{}{}\n", line_.empty() ? "" : kClearLine, text));
  if (!line_.empty()) draw();
}

void ProgressReporter::finish() {
  if (options_.out == nullptr || line_.empty()) return;
  line_.clear();
  write(options_.out, "\n");
}

void ProgressReporter::draw() {
  // A line as wide as the terminal would wrap, and a wrapped line cannot be redrawn.
  const std::string_view visible = std::string_view(line_).substr(0, columns_of(options_.out) - 1);
  write(options_.out, fmt::format("{}{}", kClearLine, visible));
}

}  // namespace strata::train
