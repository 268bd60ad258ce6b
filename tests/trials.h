// How large tests are. Full size is for the optimised build; under a sanitizer, where everything
// takes many times as long and every piece of code is to be run rather than every case to be
// tried, it is less. Test cases tagged [full] are not run under a sanitizer at all: what they add
// is cases, and others run the same code.
#pragma once

#ifndef STRATA_TEST_SANITIZED  // 1 for a look at the smaller sizes without the wait
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STRATA_TEST_SANITIZED 1
#else
#define STRATA_TEST_SANITIZED 0
#endif
#endif

namespace strata {

inline constexpr bool kSanitized = STRATA_TEST_SANITIZED != 0;

/// How often to try: `full` times, or as often as a sanitizer leaves time for.
constexpr int trials(int full, int sanitized) { return kSanitized ? sanitized : full; }

}  // namespace strata
