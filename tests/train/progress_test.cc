#include "train/progress.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "catch.h"

namespace strata::train {
namespace {

/// A stream whose content can be read back.
class Captured {
 public:
  Captured() : file_(::open_memstream(&data_, &size_)) {}
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  ~Captured() {
    std::fclose(file_);
    std::free(data_);
  }
  [[nodiscard]] std::FILE* file() const { return file_; }
  [[nodiscard]] std::string text() const {
    std::fflush(file_);
    return {data_, size_};
  }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  std::FILE* file_;
};

size_t count_of(const std::string& text, char wanted) {
  return static_cast<size_t>(std::count(text.begin(), text.end(), wanted));
}

TEST_CASE("without a terminal there are plain lines", "[progress]") {
  const Captured out;
  ProgressReporter progress({.out = out.file(), .max_steps = 25, .logging_steps = 10});
  for (int64_t step = 1; step <= 25; ++step) {
    progress.update({step, 2.0, 1234.4, static_cast<double>(step)});
  }
  progress.message("saved");
  progress.finish();
  CHECK(out.text() ==
        "step 10/25  loss 2.0000  1234 tokens/s  ETA 15s\n"
        "step 20/25  loss 2.0000  1234 tokens/s  ETA 5s\n"
        "step 25/25  loss 2.0000  1234 tokens/s  ETA 0s\n"
        "saved\n");
}

TEST_CASE("on a terminal one line is redrawn, not too often", "[progress]") {
  const Captured out;
  ProgressReporter progress({.out = out.file(), .terminal = true, .max_steps = 1000});
  for (int64_t step = 1; step <= 1000; ++step) {
    progress.update({step, 2.0, 10, 0.001 * static_cast<double>(step)});
  }
  CHECK(count_of(out.text(), '\n') == 0);
  CHECK(count_of(out.text(), '\r') >= 10);
  CHECK(count_of(out.text(), '\r') <= 12);
  CHECK_THAT(out.text(), Catch::Contains("[####################] step 1000/1000"));
  progress.message("saved");
  CHECK_THAT(out.text(), Catch::Contains("\r\x1b[Ksaved\n\r\x1b[K[####"));
  progress.finish();
  progress.finish();
  CHECK(count_of(out.text(), '\n') == 2);
}

TEST_CASE("the time left counts the steps of this run only", "[progress]") {
  const Captured out;
  ProgressReporter progress(
      {.out = out.file(), .max_steps = 100, .first_step = 80, .logging_steps = 1});
  progress.update({90, std::numeric_limits<double>::quiet_NaN(), 1, 600});
  CHECK(out.text() == "step 90/100  loss nan  1 tokens/s  ETA 10m00s\n");
}

TEST_CASE("no output asked for, none given", "[progress]") {
  ProgressReporter progress({.out = nullptr, .max_steps = 1});
  progress.update({1, 1, 1, 1});
  progress.message("saved");
  progress.finish();
}

TEST_CASE("durations are short", "[progress]") {
  CHECK(format_duration(0) == "0s");
  CHECK(format_duration(59.4) == "59s");
  CHECK(format_duration(59.6) == "1m00s");
  CHECK(format_duration(3599) == "59m59s");
  CHECK(format_duration(3600) == "1h00m");
  CHECK(format_duration(86400 * 4.125) == "4d03h");
  CHECK(format_duration(std::numeric_limits<double>::infinity()) == "?");
  CHECK(format_duration(std::numeric_limits<double>::quiet_NaN()) == "?");
  CHECK(format_duration(-1) == "?");
}

}  // namespace
}  // namespace strata::train
