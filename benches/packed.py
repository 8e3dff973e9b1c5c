#!/usr/bin/env python3
"""Prints the rate of packed documents on the balanced layout, relative to the same useful work
unpacked: CPU time of a forward and a backward pass, in turns, so that other load on a shared
machine affects both alike.

usage: benches/packed.py ANNULUS PAIRS ROWS HEADS [RANKS...]
e.g.   benches/packed.py target/release/annulus 5 16384 4 2 4

For each distribution of document lengths and each number of ranks, of one thread each:
  documents      rate of the packed passes / rate of the same documents, each in passes of its own
                 on one rank: unpacked, without communication
  sharded        the same, with each document in passes of its own on as many ranks
  one sequence   rate of the packed passes / rate of one causal sequence with as many visible pairs,
                 on as many ranks: as many useful operations, but 2.3 to 3.5 times fewer rows
  one rank       rate of the packed passes / rate of the same documents packed on one rank
The time of documents is the sum of the least time of each. Small ones therefore run in a cache that
their last round has filled, and plans are made before the time starts.
Prints the median, the least and the most over all pairs. The draws are equal in every run.
"""

import json
import math
import statistics
import subprocess
import sys


def uniforms(state=7):
    """Returns a function that draws from 0..1, as crates/bench/src/distributions.rs does."""

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


def lines(annulus, heads, ranks, *flags):
    """Runs the bench and returns its lines."""
    command = [annulus, "bench", "--what", "fwd+bwd", "--causal", "true", "--heads", heads]
    command += ["--ds", "64", "--ranks", str(ranks), *flags]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def rate(annulus, heads, ranks, *flags):
    """Returns the useful operations per CPU second of a rank."""
    [line] = lines(annulus, heads, ranks, *flags)
    return line["gflops_cpu"] / ranks


def rate_of_each(annulus, heads, ranks, lens):
    """Returns the useful operations per CPU second of a rank over passes of one document each."""
    seconds = {}
    for line in lines(annulus, heads, ranks, "--ns", ",".join(map(str, sorted(set(lens))))):
        # 5 + 2 products of 2 operations per pair, head and element; the rate is rounded to 0.1,
        # which is too coarse for a few rows
        operations = 3.5 * 4 * line["pairs"] * line["head_dim"]
        of_rank = line["gflops_cpu"] / ranks
        is_exact = of_rank >= 2
        seconds[line["n"]] = operations / of_rank / 1e9 if is_exact else line["ms"] * ranks / 1e3
    pairs = sum(n * (n + 1) // 2 for n in lens)
    operations = 3.5 * 4 * pairs * int(heads) * 64
    return operations / sum(seconds[n] for n in lens) / 1e9


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    annulus, pairs, rows, heads, *ranks = sys.argv[1:]
    print("| documents | ranks | against | median | least | most |\n|---|---|---|---|---|---|")
    for name, lens in distributions(int(rows)).items():
        packed = ["--documents", ",".join(map(str, lens))]
        visible = sum(n * (n + 1) // 2 for n in lens)
        for count in map(int, ranks or ["2", "4"]):
            ratios = {"documents": [], "sharded": [], "one sequence": [], "one rank": []}
            for _ in range(int(pairs)):
                got = rate(annulus, heads, count, *packed, "--layout", "balanced")
                whole = ["--ns", str(round(math.sqrt(2 * visible)))]
                ratios["one sequence"].append(got / rate(annulus, heads, count, *whole))
                ratios["documents"].append(got / rate_of_each(annulus, heads, 1, lens))
                if count > 1:
                    ratios["sharded"].append(got / rate_of_each(annulus, heads, count, lens))
                    ratios["one rank"].append(got / rate(annulus, heads, 1, *packed))
            for against, of in ratios.items():
                if not of:
                    continue
                figures = (statistics.median(of), min(of), max(of))
                row = "".join(f" {figure:.3f} |" for figure in figures)
                print(f"| {name}, {len(lens)} | {count} | {against} |{row}", flush=True)


if __name__ == "__main__":
    main()
