// Catch2 in either of its header layouts (version 2 in Debian 12, version 3 in newer systems).
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif
