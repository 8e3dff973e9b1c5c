#!/usr/bin/env python3
"""Shows in one run whether the kernels for AMX meet their targets on this machine: bits, results,
rates beside torch on one core, and the ring.

usage: benches/amx.py OUT_FOLDER [--rounds N] [--ns N,N] [--pairs N] [--peer COMMAND]

  --rounds   rounds of annulus and torch in turns, of which the best CPU time counts (default: 3)
  --ns       sequence lengths (default: 1024,2048)
  --pairs    pairs of the ring and of one process (default: 7)
  --peer     prints the lines of torch, as benches/compare.sh reads them; --ns and --dtypes are
             appended (default: python3 ../shared/peers/bench_torch.py)

Each line ends with "pass", "MISS" or "not run". A machine without AMX runs everything but the
comparisons of tiles with their emulation and with multiply-adds, with the instructions that it has.
The exit status is 1 if a machine with AMX misses a target. Needs cargo, taskset and an MPI
(ANNULUS_BENCH_MPI, as benches/pairs.py).
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys

import pairs
import ratios

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = "512,512,512,512"
# least share of the rate without a mask, for windows and packed documents
NARROW = 0.6
# least share of the rate for scores 20 and 100 times as large
PEAKED = 0.6
# cases that must not be slower on tiles than with multiply-adds: f32, and decoding with the fewest
# queries of a KV head that are multiplied on tiles
DECODE = "--what fwd --causal false --kv-len 16384 --heads 32 --kv-heads 4 --ds 128"
ON_TILES = [
    "--ns 1024,2048 --ds 64,128 --dtype f32",
    f"{DECODE} --q-len 2 --dtype bf16",
    f"{DECODE} --q-len 4 --dtype f16",
    f"{DECODE} --q-len 8 --dtype f32",
]
# most time of a ring of two ranks, relative to one process with two threads
RING = 1.05
RING_ROWS = 16384

# least ratio to torch, of the head dims 64 and 128
TARGETS = {
    ("fwd", "bf16, rounded probabilities"): (2.2, 1.6),
    ("fwd+bwd", "bf16, rounded probabilities"): (2.5, 1.8),
    ("fwd", "bf16"): (1.8, 1.2),
    ("fwd", "f16"): (1.5, 1.5),
    ("fwd+bwd", "f16"): (1.5, 1.5),
    ("fwd", "f32"): (1.1, 1.1),
    ("fwd+bwd", "f32"): (1.1, 1.1),
}
F32_FORWARD_FULL = 1.4


def target(case):
    """The least ratio to torch; None if there is no target."""
    if (case.dtype, case.what, case.head_dim, case.mask) == ("f32", "fwd", 64, "full"):
        return F32_FORWARD_FULL
    of_dims = TARGETS.get((case.what, case.dtype_name()))
    return of_dims and of_dims[(64, 128).index(case.head_dim)]


class Table:
    """Prints lines and counts missed targets."""

    def __init__(self):
        self.missed = 0

    def line(self, name, figure, wanted, passed):
        self.missed += passed is False
        result = {True: "pass", False: "MISS", None: "not run"}[passed]
        print(f"| {name} | {figure} | {wanted} | {result} |", flush=True)


def output(*command, **options):
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options
    ).stdout


def tests(table):
    """The tests of the CPU backend: each instruction set of the machine against the oracle, and the
    bits of the tile instructions against the emulation."""
    bits = "simd::amx::tests::the_instructions_have_the_bits_of_the_emulation"
    for name, filters in [("bits of AMX and of its emulation", ["--lib", bits]), ("results", [])]:
        command = ["cargo", "test", "-q", "-p", "annulus-cpu", *filters, "--", "--nocapture"]
        run = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
        text = run.stdout + run.stderr
        passed = None if filters and "NOT RUN" in text else run.returncode == 0
        table.line(name, f"exit status {run.returncode}", "0", passed)


def rates(table, options):
    """Rates of one core beside torch, and those of narrow masks beside the full mask."""
    types = "f32,f16,bf16"
    lengths = f"--ns {options.ns} --ds 64,128"
    narrow = [
        f"{lengths} --causal true --window 255,0",
        f"--ds 64,128 --causal true --documents {DOCUMENTS}",
    ]
    benches = []
    for kind in [f"--dtype {types}", "--dtype bf16 --precision default"]:
        benches += [f"-- {flags} {kind}" for flags in [lengths, *narrow]]
    peer = f"{options.peer} --ns {options.ns} --dtypes {types}"
    flags = shlex.split(" ".join(benches))
    command = ["benches/compare.sh", options.out, str(options.rounds), peer, *flags]
    output(*command)
    found = ratios.Rates(ratios.lines([f"{options.out}/lines.jsonl"]))
    ours, torch = sorted({peer for peer, _ in found.best}, key=lambda peer: "annulus" not in peer)
    for case in sorted((case for peer, case in found.best if peer == ours), key=str):
        name = f"{case.what} {case.dtype_name()}, D = {case.head_dim}, N = {case.n}, {case.mask}"
        rate = found.best[ours, case]
        if case.mask in ("full", "causal"):
            least = target(case)
            of_torch = found.best.get((torch, case._replace(rounded=False)))
            if least and of_torch:
                ratio = rate / of_torch
                table.line(name, f"{ratio:.2f} × torch", f"≥ {least}", ratio >= least)
        elif (ours, case._replace(mask="full")) in found.best:
            share = rate / found.best[ours, case._replace(mask="full")]
            table.line(name, f"{share:.0%} of full", f"≥ {NARROW:.0%}", share >= NARROW)


def tiles(table, options):
    """Cases on tiles beside multiply-adds, and peaked scores beside those of the default scale."""
    annulus = f"{ROOT}/target/release/annulus"
    bench = f"{annulus} bench"
    if not options.has_amx:
        table.line("tiles / multiply-adds", "the same kernels", "≤ 1", None)
    for case in ON_TILES if options.has_amx else []:
        old = f"env ANNULUS_CPU_ISA=avx512 {bench}"
        for name, ratio in pairs.medians(old, bench, options.pairs, [case]):
            table.line(f"tiles / multiply-adds, {name}", f"{ratio:.2f}", "≤ 1", ratio <= 1)
    tensors = f"{options.out}/peaked.st"
    output(annulus, "make", "--output", tensors, "--q-len", "2048", "--dtype", "bf16")
    attend = f"attend --input {tensors} --output {options.out}/peaked-out.st --threads 1 --json"
    seconds = dict.fromkeys((1, 20, 100), float("inf"))
    for factor in list(seconds) * max(options.rounds, 3):
        summary = output(annulus, *attend.split(), "--scale", str(factor / 8))
        seconds[factor] = min(seconds[factor], json.loads(summary)["passes"][0]["seconds"])
    for factor in (20, 100):
        share = seconds[1] / seconds[factor]
        table.line(f"bf16, q × {factor}", f"{share:.0%} of q", f"≥ {PEAKED:.0%}", share >= PEAKED)


def ring(table, options):
    """Two ranks over MPI against one process with two threads, and the communication of the ring:
    exposed is what the ranks waited, hidden the rest of the time of the messages alone."""
    shape = f"--heads 8 --causal true --ds 64 --ns {RING_ROWS} --what fwd+bwd"
    for kind in ["bf16 --precision default", "bf16", "f32"]:
        old, new, _, cases = pairs.ring_tax(shlex.split(f"{shape} --dtype {kind}"))
        for name, ratio in pairs.medians(old, new, options.pairs, cases):
            table.line(f"ring tax, {name}", f"{ratio:.3f}", f"≤ {RING}", ratio <= RING)
    launched = pairs.launched().split()
    link = f"{options.out}/machine.json"
    output(*launched, "measure", "--ds", "64", "--dtype", "bf16", "--out", link)
    bandwidth = json.loads(pathlib.Path(link).read_text())["inside_node"]["bandwidth"]
    tensors = f"{options.out}/in.st"
    make = f"make --output {tensors} --q-len {RING_ROWS} --heads 8 --head-dim 64 --dtype bf16"
    output(launched[-1], *make.split(), "--backward")
    attend = f"attend --input {tensors} --output {options.out}/out.st --threads 1 --causal --backward"
    summary = json.loads(output(*launched, *attend.split(), "--json", "--precision", "default"))
    for of_pass in summary["passes"]:
        ranks = of_pass["per_rank"]
        exposed = max(rank["waiting_seconds"] for rank in ranks)
        alone = max(rank["bytes_sent"] for rank in ranks) / bandwidth
        share = exposed / of_pass["seconds"]
        figure = f"{exposed:.4f} s of {of_pass['seconds']:.3f} s, messages alone {alone:.4f} s"
        figure += f", hidden {max(0, 1 - exposed / alone):.0%}"
        table.line(f"exposed, {of_pass['pass']}", figure, "≤ 5 %", share <= RING - 1)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1].removeprefix("usage: "))
    parser.add_argument("out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ns", default="1024,2048")
    parser.add_argument("--peer", default="python3 ../shared/peers/bench_torch.py")
    options = parser.parse_args()
    options.out = str(pathlib.Path(options.out).resolve())
    pathlib.Path(options.out).mkdir(parents=True, exist_ok=True)
    output("cargo", "build", "-q", "--release", "-p", "annulus-cli")
    doctor = json.loads(output("target/release/annulus", "doctor", "--json"))
    amx = doctor.get("amx", ["this processor has none: the targets are for others"])[0]
    print(f"AMX: {amx}\ntiles for: {doctor['tiles for'][0]}")
    table = Table()
    print("\n| line | figure | target | |\n|---|---|---|---|")
    options.has_amx = "amx" in doctor
    tests(table)
    rates(table, options)
    tiles(table, options)
    ring(table, options)
    print(f"\n{table.missed} missed")
    sys.exit(options.has_amx and table.missed > 0)


if __name__ == "__main__":
    main()
