#!/usr/bin/env python3
"""Ranks in two network namespaces with a cable between them, which stand for two hosts.

two_hosts_test.py CONTROL_CHILD; ends with 77 where this system lets nobody make namespaces.
"""

import os
import shutil
import subprocess
import sys
import time
import unittest

CHILD = ""
TAG = f"strata{os.getpid()}"
HOSTS = {"a": "10.213.7.1", "b": "10.213.7.2"}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def namespace(host):
    return f"{TAG}{host}"


def in_host(host, *arguments):
    return ["ip", "netns", "exec", namespace(host), *arguments]


def make_hosts():
    """What went wrong, or an empty string."""
    if shutil.which("ip") is None:
        return "no ip (iproute2)"
    steps = [("netns", "add", namespace(host)) for host in HOSTS]
    steps.append(("link", "add", "v0", "netns", namespace("a"), "type", "veth",
                  "peer", "name", "v0", "netns", namespace("b")))
    for host, address in HOSTS.items():
        steps.append(("-n", namespace(host), "address", "add", f"{address}/24", "dev", "v0"))
        steps.append(("-n", namespace(host), "link", "set", "lo", "up"))
        steps.append(("-n", namespace(host), "link", "set", "v0", "up"))
    for step in steps:
        done = ip(*step)
        if done.returncode != 0:
            return f"ip {' '.join(step)}: {done.stderr.strip()}"
    return ""


def remove_hosts():
    for host in HOSTS:
        ip("netns", "delete", namespace(host))


class Ranks:
    """Rank 0 on host a, and the others where they are put."""

    def __init__(self, hosts, absent=(), address=HOSTS["a"], port="0", connect=20000, **options):
        self.processes = {}
        for rank, host in enumerate(hosts):
            if rank in absent:
                continue
            values = dict(rank=rank, ranks=len(hosts), address=address, port=port, host=host,
                          timeout=1500, connect=connect, **options)
            process = subprocess.Popen(
                in_host(host, CHILD, *(f"{key}={value}" for key, value in values.items())),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.processes[rank] = process
            if rank == 0 and port == "0":
                port = process.stdout.readline().strip()

    def let_train(self):
        """Waits until all have done a step, and some beats more."""
        for process in self.processes.values():
            assert process.stdout.readline() == "trains\n"
        time.sleep(0.5)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()

    def finish(self, besides=(), seconds=20):
        """Exit codes and what was printed, by rank."""
        codes, printed = {}, {}
        for rank, process in self.processes.items():
            if rank not in besides:
                printed[rank] = process.communicate(timeout=seconds)[1]
                codes[rank] = process.returncode
        return codes, {rank: text for rank, text in printed.items() if text}


class TwoHosts(unittest.TestCase):
    def tearDown(self):
        for host in HOSTS:
            ip("-n", namespace(host), "link", "set", "v0", "up")

    def test_all_ranks_finish(self):
        with Ranks("abab", steps=200) as ranks:
            codes, printed = ranks.finish()
        self.assertEqual(codes, dict.fromkeys(range(4), 0))
        self.assertEqual(printed, {})

    def test_a_death_on_the_other_host_is_named(self):
        with Ranks("aabb") as ranks:
            ranks.let_train()
            ranks.processes[3].kill()
            codes, printed = ranks.finish(besides=[3])
        self.assertEqual(codes, dict.fromkeys(range(3), 1))
        self.assertEqual(list(printed), [0])
        self.assertRegex(printed[0], r"^rank 3 \(host b, pid \d+\) died during 'step \d+'; all")

    def test_without_rank_0_each_host_tells(self):
        with Ranks("aaabb") as ranks:
            ranks.let_train()
            ranks.processes[0].kill()
            codes, printed = ranks.finish(besides=[0])
        self.assertEqual(codes, dict.fromkeys(range(1, 5), 1))
        self.assertEqual(list(printed), [1, 3])
        for text in printed.values():
            self.assertRegex(text, r"^rank 0 \(host a, pid \d+\) died during 'step \d+'; all")

    def test_a_host_that_is_gone_is_named(self):
        # No connection is closed: the packets just get nowhere.
        with Ranks("aab") as ranks:
            ranks.let_train()
            ip("-n", namespace("a"), "link", "set", "v0", "down")
            codes, printed = ranks.finish()
        self.assertEqual(codes, dict.fromkeys(range(3), 1))
        self.assertEqual(list(printed), [0, 2])
        silent = r" has not answered for \d+(\.\d)? s \(stuck\)"
        self.assertRegex(printed[0], r"^rank 2 \(host b, pid \d+\)" + silent)
        self.assertRegex(printed[2], r"^rank 0 \(host a, pid \d+\)" + silent)

    def test_a_wrong_address(self):
        begin = time.monotonic()
        with Ranks("ab", absent=[0], address="10.213.7.9", port="29500", connect=2000) as ranks:
            codes, printed = ranks.finish()
        self.assertLess(time.monotonic() - begin, 15)
        self.assertEqual(codes, {1: 1})
        self.assertRegex(printed[1], r"^rank 1 of 2 \(host b, pid \d+\) cannot reach rank 0 at "
                                     r"10\.213\.7\.9:29500 within 2\.0 s: .*; check MASTER_ADDR")

    def test_a_missing_rank(self):
        with Ranks("aabb", absent=[2], connect=3000) as ranks:
            codes, printed = ranks.finish()
        self.assertEqual(codes, {0: 1, 1: 1, 3: 1})
        self.assertEqual(list(printed), [0])
        self.assertRegex(printed[0], r"^rank 2 of 4 has not come to port \d+ of host a within 3\.0 s")

    def test_a_taken_port(self):
        with Ranks("ab", absent=[1], port="29511") as first:
            first.processes[0].stdout.readline()
            with Ranks("ab", absent=[1], port="29511") as second:
                codes, printed = second.finish()
        self.assertEqual(codes, {0: 1})
        self.assertRegex(printed[0], r"^port 29511 of host .* is taken by another process; choose ")


if __name__ == "__main__":
    CHILD = os.path.abspath(sys.argv.pop(1))
    problem = make_hosts()
    try:
        if problem:
            print(f"skipped: no network namespaces ({problem})")
            sys.exit(77)
        unittest.main()
    finally:
        remove_hosts()
