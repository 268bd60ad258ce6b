#!/usr/bin/env python3
"""Would the tests notice a missing barrier in the attention kernels?

Removes one barrier (__syncthreads, __syncwarp) or wait for asynchronous copies at a time from
src/gpu/cuda/attention_*.{cu,cuh} in a copy of the working tree, builds the tests of the emulated
CUDA device and runs those of attention, which must fail. Prints what was caught and what survived.

Exit: 0 all were caught, 1 some survived, 2 nothing can be said (the unchanged tree does not build
or does not pass, a changed one does not build, or bad usage).

Not part of CI: each of some fifteen rounds compiles one or two files and runs the tests.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "src/gpu/cuda"
TARGET = "gpu_cuda_emulated_test"
FILTER = "[cuda_attention]"
STATEMENT = re.compile(r"(?:__(syncthreads|syncwarp)|ptx::(cp_async_wait)<\w+>)\(\);")
NOTHING = "static_cast<void>(0);"

Barrier = namedtuple("Barrier", "kind file line begin end")


def fail(message):
    print(f"mutate_barriers.py: {message}", file=sys.stderr)
    sys.exit(2)


def find_barriers():
    found = []
    for path in sorted([*KERNELS.glob("attention_*.cu"), *KERNELS.glob("attention_*.cuh")]):
        offset = 0
        for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
            for match in STATEMENT.finditer(line.split("//")[0]):
                begin, end = offset + match.start(), offset + match.end()
                kind = match[1] or match[2]
                found.append(Barrier(kind, path.relative_to(ROOT), number, begin, end))
            offset += len(line)
    return found


def copy_tree(destination):
    """Leaves files alone that are the same already, so that they need not be compiled again."""
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        source, copy = ROOT / name, destination / name
        if not source.is_file() or copy.is_file() and copy.read_bytes() == source.read_bytes():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        shutil.copymode(source, copy)


class Tree:
    """The copy, its build directory and the test."""

    def __init__(self, directory, jobs):
        self.source = directory / "source"
        self.build_directory = directory / "build"
        self.jobs = jobs
        copy_tree(self.source)
        self.must_run("configure", [
            "cmake", "-S", self.source, "-B", self.build_directory, "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DSTRATA_WERROR=OFF", "-DSTRATA_CUDA=OFF",
            "-DSTRATA_CUDA_EMULATOR=ON"])

    def must_run(self, what, command):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, check=False)
        if result.returncode != 0:
            print("\n".join(result.stdout.splitlines()[-30:]), file=sys.stderr)
            fail(f"cannot {what}: {command[0]} exited with {result.returncode}")

    def build(self, what):
        self.must_run(f"build {what}",
                      ["ninja", "-C", self.build_directory, f"-j{self.jobs}", TARGET])
        self.test = next(path for path in self.build_directory.rglob(TARGET)
                         if path.is_file() and os.access(path, os.X_OK))

    def passes(self, limit_s=None):
        """A test that crashes or does not end has noticed, too."""
        try:
            result = subprocess.run([self.test, FILTER, "--abort"], stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the barriers and do nothing")
    parser.add_argument("--only", metavar="N", type=int, action="append",
                        help="only barrier N of the list; may be repeated")
    parser.add_argument("--directory", metavar="DIRECTORY", type=Path,
                        help="where the copy and its build go, and stay for the next run (default: "
                             "a temporary directory)")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count(),
                        help="compile so many files at once (default: %(default)s)")
    options = parser.parse_args()
    barriers = dict(enumerate(find_barriers(), 1))
    if not barriers:
        fail(f"no barriers in {KERNELS}/attention_*; has their spelling changed?")
    if options.only:
        unknown = [n for n in options.only if n not in barriers]
        if unknown:
            fail(f"there is no barrier {unknown[0]}; --list prints 1 to {len(barriers)}")
        barriers = {n: barriers[n] for n in sorted(set(options.only))}
    if options.list:
        for n, barrier in barriers.items():
            print(f"{n:3} {barrier.kind:14} {barrier.file}:{barrier.line}")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: fail("terminated"))  # as Ctrl-C: tidy up first
    with contextlib.ExitStack() as stack:
        directory = options.directory or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="mutate-barriers-")))
        tree = Tree(directory, options.jobs)
        tree.build("the unchanged tree")
        start = time.monotonic()
        if not tree.passes():
            fail("the tests of attention fail as they are, so that failing would say nothing")
        limit_s = 60 + 10 * (time.monotonic() - start)
        print(f"unchanged: passes in {time.monotonic() - start:.0f} s", flush=True)
        survived = {}
        for n, barrier in barriers.items():
            path = tree.source / barrier.file
            text = path.read_text()
            path.write_text(text[:barrier.begin] + NOTHING + text[barrier.end:])
            tree.build(f"without barrier {n}")
            survived[n] = tree.passes(limit_s)
            path.write_text(text)
            print(f"{n:3} {barrier.kind:14} {barrier.file}:{barrier.line}: "
                  f"{'SURVIVED' if survived[n] else 'caught'}", flush=True)

    print("\nkind           caught survived")
    for kind in sorted({barrier.kind for barrier in barriers.values()}):
        of_kind = [survived[n] for n, barrier in barriers.items() if barrier.kind == kind]
        print(f"{kind:14} {of_kind.count(False):6} {of_kind.count(True):8}")
    return 1 if any(survived.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
