#!/usr/bin/env bash
# Fetches what scripts/gpu_check.sh needs on a machine that has the CUDA toolkit, CMake and a compiler
# but not Strata's libraries and no network: the Debian packages of scripts/setup.sh's build list
# with what they depend on, about 10 MB of .deb files, into a folder to be copied along.
#
#   scripts/gpu_bundle.sh [FOLDER]   (build/gpu_bundle; on Debian or Ubuntu of the same processor)
set -euo pipefail

fail() {
  echo "gpu_bundle.sh: $*" >&2
  exit 1
}

case "${1-}" in
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  -*) fail "unknown argument '$1'; --help shows what there is" ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/build/gpu_bundle}
for tool in apt-get apt-cache; do
  command -v "$tool" >/dev/null || fail "this system has no $tool; run it on Debian or Ubuntu"
done

# The one list of packages, and the test framework.
build_packages=()
eval "$(sed -n '/^build_packages=(/,/^)/p' "$root/scripts/setup.sh")"
wanted=(catch2 pkgconf)
for package in "${build_packages[@]}"; do
  case "$package" in
    build-essential | cmake | ninja-build | ccache | pkg-config | git) ;; # there already
    *) wanted+=("$package") ;;
  esac
done

# What every system has that compiles C++, or that nothing here calls.
there='^(gcc-|cpp-|g\+\+-|libc6|libc-|libgcc|libstdc\+\+|libgomp|linux-libc-dev|libcrypt|libssl|libkrb|libk5|libkey|libgss|libnsl|libtirpc|libcom-err|rpcsvc|libudev|debconf|dpkg|tar$|libboost)'
mapfile -t packages < <(
  apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances "${wanted[@]}" | grep '^[a-z0-9]' | sort -u | grep -Ev "$there"
)
((${#packages[@]} > 0)) || fail "apt-cache knows none of: ${wanted[*]}"

mkdir -p "$folder"
rm -f "$folder"/*.deb
(cd "$folder" && apt-get -q download "${packages[@]}") ||
  fail "apt-get could not download all of: ${packages[*]}"
echo "gpu_bundle.sh: ${#packages[@]} packages, $(du -sh --apparent-size "$folder" | cut -f1), in $folder"
