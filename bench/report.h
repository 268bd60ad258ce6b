// The one shape of every benchmark's result: a small table for people, the same rows as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace strata::bench {

struct Row {
  std::string key;  // "lane/case"
  double median = 0;
  std::string unit;
  double spread = 0;                 // (largest - smallest) / median of the repetitions
  std::optional<double> of_ceiling;  // median / ceiling, both measured in this run
  std::optional<int64_t> wrong;      // elements or steps that were not as they must be
};

/// Median and spread of repetitions; `values` is not empty.
[[nodiscard]] Row summarize(std::string key, std::string unit, std::vector<double> values);

void print_table(const std::vector<Row>& rows, std::ostream& out);
/// {"schema": 1, "machine": ..., "device": ..., "commit": ..., "rows": [...]}, described in
/// docs/metrics.md.
void print_json(const std::vector<Row>& rows, const std::string& device, std::ostream& out);

}  // namespace strata::bench
