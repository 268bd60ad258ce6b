#!/usr/bin/env bash
# Installs the Debian packages that building and testing need. Quick where all of them are there.
#
#   scripts/setup.sh               everything
#   scripts/setup.sh --build-only  what a build without tests needs (cmake -DSTRATA_TESTS=OFF)
#   scripts/setup.sh --demo        that, and the text that scripts/demo.sh trains on
set -euo pipefail

build_packages=(
  build-essential cmake ninja-build ccache pkg-config git
  # oneDNN's CMake package asks for OpenCL, which libdnnl-dev only recommends.
  libdnnl-dev ocl-icd-opencl-dev
  libtbb-dev libhwy-dev libcli11-dev libyaml-cpp-dev libspdlog-dev libfmt-dev libxxhash-dev
  liburing-dev libnuma-dev nlohmann-json3-dev
  libopenmpi-dev openmpi-bin
)
test_packages=(
  clang-format clang-tidy catch2
  libboost-context-dev # fibers of the CUDA emulator
  fio                  # the disk's referee
  iproute2             # network namespaces that stand for hosts
  # The PyTorch oracle. With the reference BLAS instead of OpenBLAS it is 150 times slower.
  python3-numpy python3-torch libopenblas0-pthread
)
demo_packages=(bible-kjv bible-kjv-text)

fail() {
  echo "setup.sh: $*" >&2
  exit 1
}

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

packages=("${build_packages[@]}" "${test_packages[@]}" "${demo_packages[@]}")
while (($#)); do
  case "$1" in
    --build-only) packages=("${build_packages[@]}") ;;
    --demo) packages=("${build_packages[@]}" "${demo_packages[@]}") ;;
    -h | --help) usage; exit 0 ;;
    *) fail "unknown argument '$1'; --help shows what there is" ;;
  esac
  shift
done

is_installed() {
  [[ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

for tool in apt-get dpkg-query; do
  command -v "$tool" >/dev/null ||
    fail "this system has no $tool. Install by hand what these Debian packages hold: ${packages[*]}"
done

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "setup.sh: all ${#packages[@]} packages are installed"
  exit 0
fi
echo "setup.sh: missing: ${missing[*]}"

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || fail "installing needs root, and there is no sudo"
  as_root=(sudo)
fi

"${as_root[@]}" apt-get update -q ||
  echo "setup.sh: apt-get update failed; trying the package lists that are there" >&2
unknown=()
for package in "${missing[@]}"; do
  apt-cache show "$package" >/dev/null 2>&1 || unknown+=("$package")
done
((${#unknown[@]} == 0)) || fail "apt-get knows no package: ${unknown[*]}"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -q -y --no-install-recommends "${missing[@]}" ||
  fail "apt-get install failed; missing are: ${missing[*]}"

still_missing=()
for package in "${missing[@]}"; do
  is_installed "$package" || still_missing+=("$package")
done
((${#still_missing[@]} == 0)) || fail "not installed after all: ${still_missing[*]}"
echo "setup.sh: installed ${#missing[@]} packages"
