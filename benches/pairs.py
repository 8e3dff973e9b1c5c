#!/usr/bin/env python3
"""Prints ratios of the times of two builds, which run in turns, so that other load on a shared
machine affects both alike.

usage: benches/pairs.py OLD NEW PAIRS CASE...
e.g.   benches/pairs.py "/tmp/old bench" "/tmp/new bench" 5 \\
           "--threads 1 --what fwd --ns 1024 --ds 64"

OLD and NEW are builds of `annulus bench`, with arguments that come before those of CASE. Prints the
median over all pairs of new / old of the CPU time of each line. A ratio below 1 means that NEW is
faster.
"""

import json
import shlex
import statistics
import subprocess
import sys

HEADING = "| bench | CPU time |\n|---|---|"
NAME = "{what} {dtype} {heads}:{kv_heads} heads, D = {head_dim}, {q_len} × {kv_len}"


def times(command, case):
    """Runs a command and returns the inverse of the rate of each line by name, which is a time
    because the work is the same."""
    arguments = shlex.split(command) + case.split()
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in map(json.loads, output.splitlines()):
        marks = ["causal"] if line["causal"] else []
        marks += [f"{mark} {line[mark]}" for mark in ("window", "documents") if line[mark]]
        found[", ".join([NAME.format(**line), *marks])] = 1 / line["gflops_cpu"]
    return found


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    old, new, pairs, *cases = sys.argv[1:]
    print(HEADING)
    for case in cases:
        ratios = {}
        for _ in range(int(pairs)):
            before = times(old, case)
            after = times(new, case)
            for name, value in after.items():
                ratios.setdefault(name, []).append(value / before[name])
        for name, values in ratios.items():
            print(f"| {name} | {statistics.median(values):.3f} |", flush=True)


if __name__ == "__main__":
    main()
