// What a test can ask of the stand-in for NCCL (nccl_stand_in.cc): ranks are threads, data is the
// emulated CUDA device's. It refuses what the library would not stand, and says so among the
// emulator's diagnoses. All functions are safe from any thread.
#pragma once

#include <nccl.h>

namespace strata::comm::nccl_stand_in {

/// How many questions for its state each communicator answers with ncclInProgress after it is
/// created, split, called or finalized, from now on. 0 at first.
void stay_in_progress(int questions);

/// The communicators of this rank, as long as they live, have an asynchronous error from now on.
void fail_asynchronously(int rank, ncclResult_t result);

/// The next call of a collective fails at once.
void fail_next_call(ncclResult_t result);

/// Communicators that are neither destroyed nor aborted.
[[nodiscard]] int alive();
/// Aborted since the program began.
[[nodiscard]] int aborted();

}  // namespace strata::comm::nccl_stand_in
