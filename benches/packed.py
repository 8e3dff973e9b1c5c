#!/usr/bin/env python3
"""Prints the rate of packed documents on the balanced layout, relative to as many visible pairs
unpacked: CPU time of a forward and a backward pass, in turns, so that other load on a shared machine
affects both alike.

usage: benches/packed.py ANNULUS PAIRS ROWS HEADS [RANKS...]
e.g.   benches/packed.py target/release/annulus 5 16384 4 2 4

For each distribution of document lengths and each number of ranks, of one thread each:
  one sequence   rate of the packed passes / rate of one causal sequence with as many visible pairs,
                 on as many ranks
  one rank       rate of the packed passes / rate of the same documents on one rank
Prints the median, the least and the most over all pairs. The draws are equal in every run.
"""

import json
import math
import statistics
import subprocess
import sys


def uniforms(state=7):
    """Returns a function that draws from 0..1, as crates/bench/src/balanced.rs does."""

    def draw():
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (state >> 11) / 2**53

    return draw


def documents(rows, length):
    draw, lens = uniforms(), []
    while rows > 0:
        lens.append(max(1, min(rows, int(length(draw)))))
        rows -= lens[-1]
    return lens


def normal(draw):
    return math.sqrt(-2 * math.log(1 - draw())) * math.cos(math.tau * draw())


def distributions(rows):
    return {
        "log-normal": documents(rows, lambda draw: math.exp(6.5 + 1.2 * normal(draw))),
        "Zipf": documents(rows, lambda draw: 64 / (1 - draw()) ** (1 / 1.2)),
        "bimodal": documents(
            rows, lambda draw: 100 + 300 * draw() if draw() < 0.8 else 4096
        ),
        "one long": [rows // 3, *documents(rows - rows // 3, lambda draw: 50 + 400 * draw())],
    }


def rate(annulus, heads, ranks, *flags):
    """Returns the useful operations per CPU second of a rank."""
    command = [annulus, "bench", "--what", "fwd+bwd", "--causal", "true", "--heads", heads]
    command += ["--ranks", str(ranks), *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output)["gflops_cpu"] / ranks


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    annulus, pairs, rows, heads, *ranks = sys.argv[1:]
    print("| documents | ranks | against | median | least | most |\n|---|---|---|---|---|---|")
    for name, lens in distributions(int(rows)).items():
        packed = ["--documents", ",".join(map(str, lens))]
        visible = sum(n * (n + 1) // 2 for n in lens)
        for count in ranks or ["2", "4"]:
            ratios = {"one sequence": [], "one rank": []}
            for _ in range(int(pairs)):
                got = rate(annulus, heads, int(count), *packed, "--layout", "balanced")
                whole = ["--ns", str(round(math.sqrt(2 * visible)))]
                ratios["one sequence"].append(got / rate(annulus, heads, int(count), *whole))
                ratios["one rank"].append(got / rate(annulus, heads, 1, *packed))
            for against, of in ratios.items():
                figures = (statistics.median(of), min(of), max(of))
                row = "".join(f" {figure:.3f} |" for figure in figures)
                print(f"| {name}, {len(lens)} | {count} | {against} |{row}", flush=True)


if __name__ == "__main__":
    main()
