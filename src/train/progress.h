// What a person sees of a run while it goes on: one line that is redrawn on a terminal, plain lines
// elsewhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace strata::train {

struct ProgressOptions {
  std::FILE* out = nullptr;  // not owned; null: no output at all
  bool terminal = false;     // see is_terminal()
  int64_t max_steps = 0;
  int64_t first_step = 0;     // finished before this run, by the run that it resumes
  int64_t logging_steps = 1;  // between plain lines; the last step always gets one
};

struct ProgressSample {
  int64_t step = 0;  // finished now
  double loss = 0;
  double tokens_per_second = 0;
  double seconds = 0;  // since this run began
};

/// Whether `out` is a terminal, whose lines can be redrawn.
[[nodiscard]] bool is_terminal(std::FILE* out) noexcept;

/// "42s", "3m07s", "2h05m", "4d03h"; "?" for what is not a time.
[[nodiscard]] std::string format_duration(double seconds);
/// Of what is short: "1.23 s", "45.6 ms".
[[nodiscard]] std::string format_seconds(double seconds);

/// Keeps no clock: all times come with the samples. Failing output is not an error of training, so
/// it is ignored. For one thread.
class ProgressReporter {
 public:
  explicit ProgressReporter(const ProgressOptions& options) : options_(options) {}

  /// Redraws at most ten times a second (the last step always), or prints a line where due.
  void update(const ProgressSample& sample);
  /// Prints a line of its own, with the progress below it on a terminal.
  void message(std::string_view text);
  /// Ends the line on a terminal, so that other output begins on a new one.
  void finish();

 private:
  void draw();

  ProgressOptions options_;
  std::string line_;  // what the terminal shows; empty: nothing
  double drawn_seconds_ = 0;
};

}  // namespace strata::train
