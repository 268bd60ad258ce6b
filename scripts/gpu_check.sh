#!/usr/bin/env bash
# Builds the CUDA device for the GPU of this machine, runs all tests labelled gpu and the benchmarks
# on it, and writes one JSON file. Takes under 8 minutes on 16 cores.
#
#   scripts/gpu_check.sh [--out FILE] [--build FOLDER] [--bundle FOLDER] [--build-only]
#
#   --out         the results (build/gpu/results.json)
#   --build       where to build (build/gpu)
#   --bundle      packages that scripts/gpu_bundle.sh fetched, for a machine without Strata's libraries
#                 and network (build/gpu_bundle); used if it is there
#   --build-only  build, also where there is no GPU
#
# Needs the CUDA toolkit 13, CMake 3.25, a C++20 compiler, and the libraries or the bundle. The last
# line reads "passed", "failed" or "skipped"; exit 0, 1 or 77. Logs lie beside the results.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
source=$PWD
build=build/gpu out='' bundle=build/gpu_bundle build_only=false
while (($#)); do
  case "$1" in
    --out | --build | --bundle)
      (($# > 1)) || { echo "gpu_check.sh: $1 needs a path" >&2; exit 2; }
      printf -v "${1#--}" '%s' "$2"
      shift
      ;;
    --build-only) build_only=true ;;
    -h | --help) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "gpu_check.sh: unknown argument '$1'; --help shows what there is" >&2; exit 2 ;;
  esac
  shift
done
out=${out:-$build/results.json}
mkdir -p "$build" "$(dirname "$out")" || exit 1
build=$(cd "$build" && pwd)
logs=$(cd "$(dirname "$out")" && pwd)

begin=$SECONDS build_seconds=0 test_seconds=0
passed=0 failed=0 skipped=0
reason='' gpu='' driver='' capability=''
bench_matmul=null bench_step=null failures=''

# A JSON string of any text.
quoted() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  printf '"%s"' "$(tr -d '\000-\011\013-\037' <<<"$text" | sed ':a;N;$!ba;s/\n/\\n/g')"
}

# finish STATUS EXIT_CODE: writes the results and ends.
finish() {
  {
    printf '{\n "schema": 1,\n "status": %s,\n "reason": %s,\n' "$(quoted "$1")" "$(quoted "$reason")"
    printf ' "commit": %s,\n' "$(quoted "$(git rev-parse --short HEAD 2>/dev/null)")"
    printf ' "gpu": %s,\n "driver": %s,\n' "$(quoted "$gpu")" "$(quoted "$driver")"
    printf ' "seconds": {"build": %d, "tests": %d, "all": %d},\n' \
      "$build_seconds" "$test_seconds" $((SECONDS - begin))
    printf ' "tests": {"passed": %d, "failed": %d, "skipped": %d, "failures": [%s]},\n' \
      "$passed" "$failed" "$skipped" "$failures"
    printf ' "bench": {"matmul": %s, "step": %s}\n}\n' "$bench_matmul" "$bench_step"
  } >"$out"
  [[ -z "$reason" ]] || echo "gpu_check.sh: $reason"
  echo "gpu_check.sh: results are in $out"
  echo "$1"
  exit "$2"
}

# step NAME SECONDS COMMAND...: runs a command with its output in a log, shown at its end on failure.
step() {
  local name=$1 limit=$2 log="$logs/$1.log" start=$SECONDS status=0
  shift 2
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || status=$?
  if ((status == 0)); then
    echo "$name: done ($((SECONDS - start)) s)"
  else
    tail -n 40 "$log"
    echo "$name: FAILED with $status after $((SECONDS - start)) s"
  fi
  return "$status"
}

find_gpu() {
  local line
  line=$(timeout 30 nvidia-smi --query-gpu=name,driver_version,compute_cap \
    --format=csv,noheader 2>/dev/null | head -n 1)
  [[ "$line" == *,*,* ]] || return 1
  IFS=, read -r gpu driver capability <<<"$line"
  driver=${driver// /} capability=${capability//[ .]/}
}

if find_gpu; then
  echo "gpu: $gpu, driver $driver, compute capability $capability"
else
  reason="no NVIDIA GPU that nvidia-smi lists"
  $build_only || finish skipped 77
  capability=80
fi

unpack_bundle() {
  local deb
  mkdir -p "$build/bundle"
  for deb in "$bundle"/*.deb; do
    if command -v dpkg-deb >/dev/null; then
      dpkg-deb -x "$deb" "$build/bundle" || return 1
    else
      (cd "$build/bundle" && ar p "$deb" data.tar.xz | tar -xJ) || return 1
    fi
  done
}
bundle=$(cd "$bundle" 2>/dev/null && pwd)
if [[ -n "$bundle" ]] && compgen -G "$bundle/*.deb" >/dev/null; then
  unpack_bundle || { reason="the packages in $bundle cannot be unpacked"; finish failed 1; }
  prefix=$build/bundle/usr
  libraries=$prefix/lib/$(uname -m)-linux-gnu
  export CMAKE_PREFIX_PATH=$prefix${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
  export PKG_CONFIG_SYSROOT_DIR=$build/bundle
  export PKG_CONFIG_PATH=$libraries/pkgconfig:$prefix/lib/pkgconfig:$prefix/share/pkgconfig
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LIBRARY_PATH=$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}
  export CPATH=$prefix/include${CPATH:+:$CPATH}
  export PATH=$PATH:$prefix/bin
fi

# Hopper's own instructions need the name with an a.
[[ "$capability" != 90 ]] || capability=90a
generator=()
! command -v ninja >/dev/null || generator=(-G Ninja)
targets=(strata gpu_cuda_test model_cuda_test)
# Who only builds may do so on few cores that others use too.
configure_limit=120 build_limit=300
! $build_only || configure_limit=1200 build_limit=7200
start=$SECONDS
step configure "$configure_limit" cmake -S "$source" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DSTRATA_CUDA=ON -DSTRATA_CUDA_EMULATOR=OFF -DCMAKE_CUDA_ARCHITECTURES="$capability-real" ||
  { reason="cannot configure, see $logs/configure.log"; finish failed 1; }
step build "$build_limit" cmake --build "$build" --parallel "${GPU_CHECK_JOBS:-$(nproc)}" \
  --target "${targets[@]}" || { reason="cannot build, see $logs/build.log"; finish failed 1; }
build_seconds=$((SECONDS - start))
[[ -n "$gpu" ]] || finish skipped 77

start=$SECONDS
report=$logs/tests.xml
rm -f "$report"
(cd "$build" && timeout -k 10 150 ctest -L '^gpu$' --no-tests=error --output-on-failure --timeout 100 \
  --output-junit "$report") >"$logs/tests.log" 2>&1
tests_status=$?
test_seconds=$((SECONDS - start))
touch "$report"
count() { grep -cE "$1" "$report"; }
passed=$(count '<testcase .*status="run"')
failed=$(count '<testcase .*status="fail"')
skipped=$(count '<skipped message="SKIP_|<testcase .*status="disabled"')
failures=$(sed -nE 's/.*<testcase name="([^"]*)".*status="fail".*/"\1"/p' "$report" | paste -sd, -)
((failed == 0 && tests_status == 0)) || tail -n 60 "$logs/tests.log"
echo "tests: $passed passed, $failed failed, $skipped skipped ($test_seconds s)"

# bench LANE: its JSON, or null.
bench() {
  step "bench-$1" 90 "$build/strata" bench "$1" --device cuda --json || return 1
  sed -n '/^{/,$p' "$logs/bench-$1.log"
}
bench_status=0
for lane in matmul step; do
  if text=$(bench "$lane") && json=$(sed -n '/^{/,$p' <<<"$text") && [[ -n "$json" ]]; then
    printf -v "bench_$lane" '%s' "$json"
    grep -q '"wrong": [1-9]' <<<"$json" && bench_status=1 && reason="${reason:+$reason; }bench $lane has wrong results"
  else
    bench_status=1 reason="${reason:+$reason; }bench $lane failed, see $logs/bench-$lane.log"
  fi
done

if ((tests_status != 0 && failed == 0)); then
  reason="ctest ended with $tests_status, see $logs/tests.log"
  finish failed 1
elif ((failed > 0 || bench_status != 0)); then
  finish failed 1
elif ((passed == 0)); then
  reason="all tests skipped themselves"
  finish skipped 77
fi
finish passed 0
