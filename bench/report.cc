#include "bench/report.h"

#include <fmt/format.h>
#include <fmt/ostream.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/bytes.h"

#ifndef STRATA_COMMIT
#define STRATA_COMMIT "unknown"
#endif

namespace strata::bench {
namespace {

std::string first_value_of(const std::string& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    return line.substr(line.find_first_not_of(' ', colon + 1));
  }
  return "unknown";
}

nlohmann::ordered_json machine() {
  return {{"cpu", first_value_of("/proc/cpuinfo", "model name")},
          {"threads", std::thread::hardware_concurrency()},
          {"memory", first_value_of("/proc/meminfo", "MemTotal")},
          {"compiler", "g++ " __VERSION__}};
}

template <class T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

Row summarize(std::string key, std::string unit, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  const double median = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
  return {.key = std::move(key),
          .median = median,
          .unit = std::move(unit),
          .spread = (values.back() - values.front()) / median,
          .of_ceiling = {},
          .wrong = {}};
}

void print_table(const std::vector<Row>& rows, std::ostream& out) {
  fmt::print(out, "{:<28} {:>12} {:<10} {:>8} {:>11} {:>7}\n", "case", "median", "unit", "spread",
             "of ceiling", "wrong");
  for (const Row& row : rows) {
    fmt::print(out, "{:<28} {:>12.4g} {:<10} {:>7.1f}% {:>11} {:>7}\n", row.key, row.median,
               row.unit, 100 * row.spread,
               row.of_ceiling ? fmt::format("{:.3f}", *row.of_ceiling) : "-",
               row.wrong ? fmt::format("{}", *row.wrong) : "-");
  }
}

void print_json(const std::vector<Row>& rows, const std::string& device, std::ostream& out) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& row : rows) {
    list.push_back({{"key", row.key},
                    {"median", row.median},
                    {"unit", row.unit},
                    {"spread", row.spread},
                    {"of_ceiling", or_null(row.of_ceiling)},
                    {"wrong", or_null(row.wrong)}});
  }
  const nlohmann::ordered_json report{{"schema", 1},
                                      {"machine", machine()},
                                      {"device", device},
                                      {"commit", STRATA_COMMIT},
                                      {"rows", list}};
  out << report.dump(1) << '\n';
}

}  // namespace strata::bench
