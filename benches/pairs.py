#!/usr/bin/env python3
"""Prints ratios of the times of two builds, which run in turns, so that other load on a shared
machine affects both alike.

usage: benches/pairs.py OLD NEW PAIRS CASE...
e.g.   benches/pairs.py /tmp/old /tmp/new 9 "threads=2 heads=1" "heads=8 bias=xxxx"
       benches/pairs.py "/tmp/old bench" "/tmp/new bench" 5 \\
           "--threads 1 --what fwd --ns 1024 --ds 64"

OLD and NEW are builds of `cpu-backward` (crates/bench), or of `annulus bench`. They may be
commands with arguments ("/tmp/new threads=1"), which come before those of CASE. Prints the median
over all pairs of new / old: of `cpu-backward` CPU time and elapsed time, forward and backward; of
each line of a bench CPU time. A ratio below 1 means that NEW is faster.
"""

import json
import shlex
import statistics
import subprocess
import sys

EXAMPLE = ["forward_cpu_ms", "forward_ms", "backward_cpu_ms", "backward_ms"]
EXAMPLE_HEADING = (
    "| case | forward, CPU time | forward, time | backward, CPU time | backward, time |\n"
    "|---|---|---|---|---|"
)
BENCH_HEADING = "| bench | CPU time |\n|---|---|"
BENCH_NAME = "{what} {dtype} {heads}:{kv_heads} heads, D = {head_dim}, {q_len} × {kv_len}"


def times(command, case):
    """Runs a command and returns times by name: in milliseconds for the example; for a bench the
    inverse of the rate of each line, which is a time because the work is the same."""
    arguments = shlex.split(command) + case.split()
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in map(json.loads, output.splitlines()):
        if "gflops_cpu" in line:
            marks = ["causal"] if line["causal"] else []
            marks += [f"{mark} {line[mark]}" for mark in ("window", "documents") if line[mark]]
            found[", ".join([BENCH_NAME.format(**line), *marks])] = 1 / line["gflops_cpu"]
        else:
            found.update(line)
    return found


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    old, new, pairs, *cases = sys.argv[1:]
    last_heading = ""
    for case in cases:
        ratios = {}
        for _ in range(int(pairs)):
            before = times(old, case)
            after = times(new, case)
            for name, value in after.items():
                ratios.setdefault(name, []).append(value / before[name])
        medians = {name: f"{statistics.median(values):.3f}" for name, values in ratios.items()}
        if all(name in medians for name in EXAMPLE):
            heading = EXAMPLE_HEADING
            rows = [f"| {case} | " + " | ".join(medians[name] for name in EXAMPLE) + " |"]
        else:
            heading = BENCH_HEADING
            rows = [f"| {name} | {ratio} |" for name, ratio in medians.items()]
        print("\n".join(([heading] if heading != last_heading else []) + rows), flush=True)
        last_heading = heading


if __name__ == "__main__":
    main()
