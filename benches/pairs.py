#!/usr/bin/env python3
"""Ratios of two builds of `crates/backend-cpu/examples/backward`, or of `annulus bench`, run in turns, so that a shared machine's moods meet both.

usage: benches/pairs.py OLD NEW PAIRS CASE...        e.g. benches/pairs.py /tmp/old /tmp/new 9 "threads=2 heads=1" "heads=8 bias=xxxx"
                                                     benches/pairs.py "/tmp/old bench" "/tmp/new bench" 5 "--threads 1 --what fwd --ns 1024 --ds 64"

Prints the median over the pairs of new / old: of the example for CPU time and time, forward and backward; of a bench, which may be several lines, for CPU
time. Less than 1 is faster. OLD and NEW may be commands with arguments ("/tmp/new threads=1"): arguments that come first count.
"""
import json
import shlex
import statistics
import subprocess
import sys


EXAMPLE = ["forward_cpu_ms", "forward_ms", "backward_cpu_ms", "backward_ms"]


def times(command, case):
    """Times by name: of the example in milliseconds, of a bench for each of its lines, for the same work each time."""
    lines = subprocess.run(shlex.split(command) + case.split(), check=True, capture_output=True, text=True).stdout.splitlines()
    found = {}
    for line in map(json.loads, lines):
        if "gflops_cpu" in line:
            name = "{what} {dtype} {heads}:{kv_heads} heads, D = {head_dim}, {q_len} × {kv_len}".format(**line)
            marks = ["causal"] if line["causal"] else []
            marks += [f"{mark} {line[mark]}" for mark in ("window", "documents") if line[mark]]
            found[", ".join([name, *marks])] = 1 / line["gflops_cpu"]
        else:
            found.update(line)
    return found


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    old, new, pairs, cases = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]
    heading = ""
    for case in cases:
        ratios = {}
        for _ in range(pairs):
            before, after = times(old, case), times(new, case)
            for name, value in after.items():
                ratios.setdefault(name, []).append(value / before[name])
        medians = {name: f"{statistics.median(values):.3f}" for name, values in ratios.items()}
        if all(name in medians for name in EXAMPLE):
            columns = "| case | forward, CPU time | forward, time | backward, CPU time | backward, time |\n|---|---|---|---|---|"
            rows = [f"| {case} | " + " | ".join(medians[name] for name in EXAMPLE) + " |"]
        else:
            columns = "| bench | CPU time |\n|---|---|"
            rows = [f"| {name} | {ratio} |" for name, ratio in medians.items()]
        print("\n".join(([columns] if columns != heading else []) + rows), flush=True)
        heading = columns


if __name__ == "__main__":
    main()
