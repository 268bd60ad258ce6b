// Trains on counters until it is killed: store_crash_child DIRECTORY... Each number that it writes
// to standard output (8 bytes, native order) is a generation that was committed before.
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "nvme/store_crash.h"
#include "nvme/store_fixture.h"

int main(int argc, char** argv) {
  using namespace strata::nvme;
  try {
    std::vector<StoreDirectory> directories;
    for (int i = 1; i < argc; ++i) directories.push_back({.directory = argv[i]});
    Store store = Store::open(directories, small_options());
    Content content(store);
    for (uint64_t generation = metadata_of(store) + 1;; ++generation) {
      for (int r = 0; r < static_cast<int>(counter_records().size()); ++r) {
        if (is_written(r, generation)) content.write(r, generation);
      }
      store.commit(as_metadata(generation));
      if (::write(STDOUT_FILENO, &generation, sizeof generation) != sizeof generation) return 2;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
