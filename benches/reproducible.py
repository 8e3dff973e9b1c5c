#!/usr/bin/env python3
"""Prints what the reproducible order costs: CPU time of a forward and of a backward pass, relative
to the free order, which run in turns, so that other load on a shared machine affects both alike.

usage: benches/reproducible.py ANNULUS PAIRS CASE...
e.g.   benches/reproducible.py target/release/annulus 5 "--threads 1 --ns 4096 --ds 64,128" \\
           "--ranks 4 --threads 1 --ns 4096 --ds 64,128"

CASE are arguments of `annulus bench`. Prints the median, the least and the most of the ratios of
all pairs.
"""

import json
import statistics
import subprocess
import sys

# products of a pass over the same pairs: gflops_cpu counts them
PRODUCTS = {"fwd": 2, "fwd+bwd": 7}
NAME = "{heads} heads, D = {head_dim}, {q_len} × {kv_len}, {ranks} ranks, causal {causal}"


def times(annulus, case, *flags):
    """Returns the CPU times of both passes by case, in units that are the same for all runs."""
    arguments = [annulus, "bench", "--what", "fwd,fwd+bwd", *case.split(), *flags]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in map(json.loads, output.splitlines()):
        of_case = found.setdefault(NAME.format(**line), {})
        of_case[line["what"]] = PRODUCTS[line["what"]] / line["gflops_cpu"]
    return {
        name: {"forward": of["fwd"], "backward": of["fwd+bwd"] - of["fwd"]}
        for name, of in found.items()
    }


def main():
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    annulus, pairs, *cases = sys.argv[1:]
    print("| case | pass | median | least | most |\n|---|---|---|---|---|")
    for case in cases:
        ratios = {}
        for _ in range(int(pairs)):
            free = times(annulus, case)
            for name, of in times(annulus, case, "--reproducible").items():
                for kind, time in of.items():
                    ratios.setdefault((name, kind), []).append(time / free[name][kind])
        for (name, kind), values in ratios.items():
            figures = (statistics.median(values), min(values), max(values))
            print(f"| {name} | {kind} |" + "".join(f" {of:.3f} |" for of in figures), flush=True)


if __name__ == "__main__":
    main()
