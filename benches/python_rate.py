#!/usr/bin/env python3
"""Prints the throughput of annulus.torch.flash_attention relative to `annulus bench`, on the same
threads. Both run in turns, so that other load on a shared machine affects them alike.

usage: benches/python_rate.py ANNULUS [PAIRS] [THREADS]
e.g.   benches/python_rate.py target/release/annulus 9 1

ANNULUS is the command, of the same commit as the package. The case: a forward pass in float32,
batch 1, 8 heads, 2048 × 2048, head dim 64, no mask. Both sides report the least CPU time of a call
in each turn, as a rate; the ratio is the median over all pairs, of which one is python / bench.
"""

import json
import statistics
import subprocess
import sys
import time

import torch

import annulus_attention as annulus
import annulus_attention.torch

LENGTH, HEADS, DIM, ROUNDS = 2048, 8, 64, 8
FLOPS = 4 * LENGTH * LENGTH * HEADS * DIM


def bench(command: str, threads: int) -> float:
    """Returns GFLOP/s of CPU time of `annulus bench`."""
    flags = ["--what", "fwd", "--dtype", "f32", "--batch", "1", "--causal", "false"]
    sizes = ["--ns", LENGTH, "--ds", DIM, "--heads", HEADS, "--threads", threads]
    arguments = [command, "bench", *flags, *map(str, sizes)]
    output = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["gflops_cpu"])


def python(inputs: list[torch.Tensor], threads: int) -> float:
    """Returns GFLOP/s of CPU time of the Python package, the calls' own time included."""
    seconds = []
    for _ in range(ROUNDS):
        began = time.process_time()
        annulus.torch.flash_attention(*inputs, threads=threads)
        seconds.append((time.process_time() - began) / threads)
    return FLOPS / min(seconds) / 1e9


def main() -> None:
    command = sys.argv[1]
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    threads = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = [torch.randn(1, LENGTH, HEADS, DIM) for _ in range(3)]
    annulus.torch.flash_attention(*inputs, threads=threads)
    rates = []
    for pair in range(pairs):
        order = [lambda: python(inputs, threads), lambda: bench(command, threads)]
        # each is first in every other pair
        first, second = (order if pair % 2 == 0 else order[::-1])
        one, other = first(), second()
        rates.append((one, other) if pair % 2 == 0 else (other, one))
    ours, theirs = (statistics.median(side) for side in zip(*rates, strict=True))
    ratio = statistics.median(one / other for one, other in rates)
    print(f"python {ours:.1f} GFLOP/s, bench {theirs:.1f} GFLOP/s, {threads} threads, f32, "
          f"N = {LENGTH}: ratio {ratio:.3f} (median of {pairs} pairs)")


if __name__ == "__main__":
    main()
