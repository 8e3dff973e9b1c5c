#!/usr/bin/env python3
"""Prints ratios of the times of two builds, which run in turns, so that other load on a shared
machine affects both alike.

usage: benches/pairs.py OLD NEW PAIRS CASE...
       benches/pairs.py ring-tax [FLAG]...
e.g.   benches/pairs.py "/tmp/old bench" "/tmp/new bench" 5 \\
           "--threads 1 --what fwd --ns 1024 --ds 64"

OLD and NEW are builds of `annulus bench`, with arguments that come before those of CASE. Prints the
median over all pairs of new / old of the CPU time of each line. A ratio below 1 means that NEW is
faster.

ring-tax compares a ring of MPI, of ranks with one thread each, to one process of this tree with as
many threads, in 7 pairs. FLAGS are of `annulus bench`; default: --what fwd+bwd --ns 16384 --ds 64
--heads 8 --causal true.

    ANNULUS_BENCH_MPI    openmpi (default) or mpich
    ANNULUS_BENCH_RANKS  ranks of the ring, and threads of the one process (default: 2)
"""

import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys

HEADING = "| bench | CPU time |\n|---|---|"
RING = "--what fwd+bwd --ns 16384 --ds 64 --heads 8 --causal true"
# unbound, because the one process has as many threads as there are ranks
LAUNCHERS = {
    "openmpi": "mpirun.openmpi --oversubscribe --bind-to none -n",
    "mpich": "mpirun.mpich -bind-to none -n",
}
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


def launched():
    """Builds the command with MPI, and returns its path after the launcher's of the ranks."""
    root = pathlib.Path(__file__).resolve().parent.parent
    mpi = os.environ.get("ANNULUS_BENCH_MPI", "openmpi")
    ranks = os.environ.get("ANNULUS_BENCH_RANKS", "2")
    if mpi not in LAUNCHERS:
        sys.exit(f"benches/pairs.py: ANNULUS_BENCH_MPI: got {mpi}, want openmpi or mpich")
    target = root / "target" / mpi
    os.environ.update(
        OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", UCX_LOG_LEVEL="error"
    )
    build = ["cargo", "build", "-q", "--release", "-p", "annulus-cli", "--features", "mpi"]
    environment = {**os.environ, "MPICC": f"mpicc.{mpi}", "CARGO_TARGET_DIR": str(target)}
    subprocess.run(build, check=True, cwd=root, env=environment)
    return f"{LAUNCHERS[mpi]} {ranks} {target}/release/annulus"


def ring_tax(flags):
    """Returns the arguments of `compare`."""
    ring = launched()
    alone, ranks = ring.split()[-1], os.environ.get("ANNULUS_BENCH_RANKS", "2")
    ring = f"{ring} bench --threads 1"
    return f"{alone} bench --threads {ranks}", ring, 7, [" ".join(flags) or RING]


def medians(old, new, pairs, cases):
    """Yields the name and the ratio of each line of each case."""
    for case in cases:
        ratios = {}
        for _ in range(pairs):
            before = times(old, case)
            after = times(new, case)
            for name, value in after.items():
                ratios.setdefault(name, []).append(value / before[name])
        for name, values in ratios.items():
            yield name, statistics.median(values)


def compare(old, new, pairs, cases):
    """Prints the ratios of each case."""
    print(HEADING)
    for name, ratio in medians(old, new, pairs, cases):
        print(f"| {name} | {ratio:.3f} |", flush=True)


def main():
    if sys.argv[1:2] == ["ring-tax"]:
        compare(*ring_tax(sys.argv[2:]))
    elif len(sys.argv) < 5:
        sys.exit(__doc__)
    else:
        old, new, pairs, *cases = sys.argv[1:]
        compare(old, new, int(pairs), cases)


if __name__ == "__main__":
    main()
