#!/usr/bin/env python3
"""Ratios of two builds of `crates/backend-cpu/examples/backward`, run in turns, so that a shared machine's moods meet both.

usage: benches/pairs.py OLD NEW PAIRS CASE...        e.g. benches/pairs.py /tmp/old /tmp/new 9 "threads=2 heads=1" "heads=8 bias=xxxx"

Prints the median over the pairs of new / old, for CPU time and time, forward and backward; less than 1 is faster. OLD and NEW may be commands with
arguments ("/tmp/new threads=1"): arguments that come first count.
"""
import json
import shlex
import statistics
import subprocess
import sys


def times(command, case):
    return json.loads(subprocess.run(shlex.split(command) + case.split(), check=True, capture_output=True, text=True).stdout)


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    old, new, pairs, cases = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    print("| case | forward, CPU time | forward, time | backward, CPU time | backward, time |\n|---|---|---|---|---|")
    for case in cases:
        ratios = {}
        for _ in range(pairs):
            before, after = times(old, case), times(new, case)
            for name, value in after.items():
                ratios.setdefault(name, []).append(value / before[name])
        order = ["forward_cpu_ms", "forward_ms", "backward_cpu_ms", "backward_ms"]
        print(f"| {case} | " + " | ".join(f"{statistics.median(ratios[name]):.3f}" for name in order) + " |", flush=True)


if __name__ == "__main__":
    main()
