// Ranks of a test as threads, each with a host device and a stream of its own.
#pragma once

#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "gpu/host/host_device.h"

namespace strata::comm {

/// Calls body(rank, device, stream) on a thread for each rank; what each returned, or the words of
/// what it threw.
template <class Body>
std::vector<std::string> on_ranks(int ranks, const Body& body) {
  std::vector<std::string> results(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::string& result = results[static_cast<size_t>(rank)];
      try {
        const auto device =
            gpu::create_host_device({.threads = 1, .memory_bytes = size_t{256} * kMiB});
        const auto stream = device->create_stream("collectives");
        result = body(rank, *device, *stream);
      } catch (const std::exception& error) {
        result = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

}  // namespace strata::comm
