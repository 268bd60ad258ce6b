# strata_check_headers(TARGET DEPENDS target...)
# A target, not part of `all`, that compiles each header of src/ by itself, twice in one source: it
# must include what it uses and guard itself. Left out: .cuh (needs nvcc) and -inl.h (included once
# per SIMD target by the source that owns it).
function(strata_check_headers target)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  # A glob, so that no header can be forgotten.
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src
    ${PROJECT_SOURCE_DIR}/src/*.h)
  list(FILTER headers EXCLUDE REGEX "-inl\\.h$")
  set(sources "")
  foreach(header IN LISTS headers)
    string(REPLACE "/" "__" name ${header})
    set(source ${CMAKE_CURRENT_BINARY_DIR}/${target}/${name}.cc)
    file(CONFIGURE OUTPUT ${source} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
    list(APPEND sources ${source})
  endforeach()
  add_library(${target} OBJECT EXCLUDE_FROM_ALL ${sources})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} PRIVATE strata_warnings ${ARG_DEPENDS})
endfunction()
