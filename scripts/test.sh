#!/usr/bin/env bash
# Builds and tests everything; the last line reads "N passed, N failed, N skipped".
#
#   scripts/test.sh           format, headers, all tests; then again under AddressSanitizer and
#                             UndefinedBehaviorSanitizer (unit tests) and ThreadSanitizer (tests of
#                             what runs threads)
#   scripts/test.sh --quick   without the sanitizers
#
# A step beside the tests (setup, format, a build) counts only where it fails: as one failure. What
# a step prints is shown if it fails, and kept in build/logs.
set -euo pipefail

usage() {
  sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

quick=false
while (($#)); do
  case "$1" in
    --quick) quick=true ;;
    -h | --help) usage; exit 0 ;;
    *) echo "test.sh: unknown argument '$1'; --help shows what there is" >&2; exit 2 ;;
  esac
  shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=build/logs
mkdir -p "$logs"
passed=0 failed=0 skipped=0

# step NAME COMMAND...: runs a command with its output in a log, which is shown if it fails.
step() {
  local name=$1 log="$logs/${1//[^a-z0-9]/-}.log" begin=$SECONDS
  shift
  if "$@" >"$log" 2>&1; then
    echo "$name: done ($((SECONDS - begin)) s)"
  else
    cat "$log"
    echo "$name: FAILED"
    failed=$((failed + 1))
    return 1
  fi
}

count() {
  grep -cE "$1" "$2" || true
}

# run_tests PRESET CTEST_ARGUMENT...: runs tests that are built and adds them to the totals.
run_tests() {
  local preset=$1 log="$logs/$1-tests.log" report="$PWD/$logs/$1-tests.xml" begin=$SECONDS
  local status=0 ran bad left_out
  shift
  rm -f "$report"
  ctest --preset "$preset" --parallel "$(nproc)" --no-tests=error --output-junit "$report" "$@" >"$log" 2>&1 || status=$?
  touch "$report"
  ran=$(count '^\s*<testcase .*status="run"' "$report")
  bad=$(count '^\s*<testcase .*status="fail"|^\s*<skipped message="Unable to find' "$report")
  left_out=$(count '^\s*<skipped message="SKIP_|^\s*<testcase .*status="disabled"' "$report")
  if ((status != 0)); then
    grep -vE '^ *Start +[0-9]+:|^ *[0-9]+/[0-9]+ .* Passed ' "$log" || true
    ((bad > 0)) || bad=1
  fi
  passed=$((passed + ran)) failed=$((failed + bad)) skipped=$((skipped + left_out))
  echo "$preset tests: $ran passed, $bad failed, $left_out skipped ($((SECONDS - begin)) s)"
}

# build PRESET [TARGET...]
build() {
  local preset=$1
  shift
  step "$preset configure" cmake --preset "$preset" &&
    step "$preset build" cmake --build --preset "$preset" ${1+--target "$@"}
}

check_format() {
  find apps bench src tests -type f \
    \( -name '*.h' -o -name '*.cc' -o -name '*.cuh' -o -name '*.cu' \) -print0 |
    xargs -0 -r clang-format --dry-run -Werror
}

section() {
  printf '\n== %s\n' "$1"
}

section "setup"
step "packages" scripts/setup.sh || true

section "format"
step "clang-format" check_format || true

section "dev: warnings are errors"
if build dev; then
  step "headers compile alone" cmake --build --preset dev --target headers_compile_alone || true
  run_tests dev
fi

if ! $quick; then
  section "asan: AddressSanitizer, UndefinedBehaviorSanitizer"
  export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
  export LSAN_OPTIONS="print_suppressions=0:suppressions=$PWD/tests/lsan_suppressions.txt${LSAN_OPTIONS:+:$LSAN_OPTIONS}"
  if build asan unit_tests; then
    # Open MPI is not instrumented, and keeps what it has until its process ends.
    run_tests asan --label-regex '^unit$' --label-exclude '^mpi$'
  fi

  section "tsan: ThreadSanitizer"
  export TSAN_OPTIONS="second_deadlock_stack=1:suppressions=$PWD/tests/tsan_suppressions.txt${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
  if build tsan threaded_tests; then
    run_tests tsan --tests-regex '^(cuda_emulator|comm|gpu|nvme|pipeline|model|train)_test:'
  fi
fi

section "all"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
