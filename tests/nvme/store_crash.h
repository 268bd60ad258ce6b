// Training on counters: what is in a store after each generation follows from the generation alone.
#pragma once

#include <vector>

#include "nvme/store.h"

namespace strata::nvme {

inline const std::vector<RecordSpec>& counter_records() {
  static const std::vector<RecordSpec> records{{0, Traffic::kWeight, 7 * 4096},
                                               {0, Traffic::kMoment1, 13 * 4096 + 5},
                                               {1, Traffic::kWeight, 1},
                                               {1, Traffic::kMoment1, 5 * 4096 - 1}};
  return records;
}

/// Generation 1 writes every record, and each later one all but every third.
inline bool is_written(int record, uint64_t generation) {
  return generation == 1 || (generation + static_cast<uint64_t>(record)) % 3 != 0;
}

/// The generation whose content a record has after `generation`.
inline uint64_t content_generation(int record, uint64_t generation) {
  while (!is_written(record, generation)) --generation;
  return generation;
}

}  // namespace strata::nvme
