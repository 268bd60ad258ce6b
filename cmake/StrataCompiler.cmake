# How everything here is compiled: language level, warnings, sanitizers, ccache.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

find_program(STRATA_CCACHE ccache)
if(STRATA_CCACHE AND STRATA_PRECOMPILE) # else ccache leaves alone what uses a precompiled header
  set(STRATA_CXX_CCACHE ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros
    ${STRATA_CCACHE})
else()
  set(STRATA_CXX_CCACHE ${STRATA_CCACHE})
endif()
if(STRATA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${STRATA_CXX_CCACHE})
endif()
if(STRATA_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${STRATA_CCACHE})
endif()

# Warnings of our own code only: linked PRIVATE by strata_library and strata_executable.
add_library(strata_warnings INTERFACE)
target_compile_options(strata_warnings INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Woverloaded-virtual;-Wcast-align;-Wunused;-Wimplicit-fallthrough;-Wextra-semi>"
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${STRATA_WERROR}>>:-Werror>"
  # Without -Wpedantic, which nvcc's own output does not stand.
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wunused>"
  "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${STRATA_WERROR}>>:-Werror=all-warnings;-Xcompiler=-Werror>")

# A compiler that fuses a*b+c where it likes gives different bits on different targets. Where a
# fused operation is wanted the source says so.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffp-contract=off>")

if(STRATA_SANITIZE)
  add_compile_options(
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${STRATA_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  add_link_options(-fsanitize=${STRATA_SANITIZE})
endif()

# strata_library(NAME SOURCES file... [DEPENDS target...] [PRIVATE_DEPENDS target...])
# One folder of src/ as one static library, included as "folder/header.h".
function(strata_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name} PUBLIC ${ARG_DEPENDS} PRIVATE strata_warnings ${ARG_PRIVATE_DEPENDS})
endfunction()
