#!/usr/bin/env python3
"""Joins bench lines (JSON lines) of annulus and its peers into Markdown tables, case by case.

usage: ratios.py [LINES.jsonl]...     default: standard input

The best rate of each (peer, case) counts: per second of CPU time with one thread, of elapsed time
with several. A ratio above 1 means that annulus is faster. Columns:

    of LIMIT   share of the rate of multiply-adds in registers, from the same lines
    of full    share of annulus' own rate without a mask and with as many KV heads as query heads
    read GB/s  rate at which few queries read keys and values, and its share of the read rate of
               the same lines

Lines of annulus that may round probabilities (`--precision default`) are cases of their own, beside
the same lines of the peers. Windows, packed documents, grouped heads, and lengths of queries and
keys that differ have no peer. A second table compares several threads with one.
"""

import json
import sys
from typing import NamedTuple

# bytes of an element
SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
NONE = "–"


class Case(NamedTuple):
    """One computation, without the program that performs it."""

    what: str
    dtype: str
    rounded: bool
    threads: int
    heads: int
    kv_heads: int
    head_dim: int
    n: int
    kv_len: int
    mask: str

    @staticmethod
    def of(line):
        mask = "causal" if line["causal"] else "full"
        if line.get("window"):
            sides = ("none" if side is None else str(side) for side in line["window"])
            mask = "window " + ",".join(sides)
        if line.get("documents"):
            lengths = line["documents"]
            equal = len(set(lengths)) == 1
            mask = (f"{len(lengths)}×{lengths[0]} " if equal else "documents ") + mask
        return Case(
            what=line["what"],
            dtype=line["dtype"],
            rounded=line.get("precision", "highest") == "default" and line["dtype"] == "bf16",
            threads=line["threads"],
            heads=line["heads"],
            kv_heads=line.get("kv_heads", line["heads"]),
            head_dim=line["head_dim"],
            n=line["n"],
            kv_len=line.get("kv_len", line["n"]),
            mask=mask,
        )

    def dtype_name(self):
        return self.dtype + (", rounded probabilities" if self.rounded else "")

    def reads_only(self):
        """True if the rate of reading keys and values is meaningful: a few queries, no mask."""
        return self.n < self.kv_len and self.what == "fwd" and self.mask == "full"

    def read_rate(self, gflops):
        """GB/s of keys and values at a rate of GFLOP/s.

        A pair of query and key costs 4 FLOPs per query head and element of the head dim. A key and
        its value are read once, 2 elements per KV head and element of the head dim.
        """
        return gflops * 2 * SIZES[self.dtype] * self.kv_heads / (4 * self.n * self.heads)


def lines(paths):
    for stream in [open(path) for path in paths] or [sys.stdin]:
        for line in stream:
            if line.startswith("{"):
                yield json.loads(line)


class Rates:
    """The best rates of all lines, in GFLOP/s and GB/s."""

    def __init__(self, all_lines):
        # by (peer, case): of CPU time with one thread, of elapsed time with several
        self.best = {}
        # by (peer, case): always of elapsed time, to compare several threads with one
        self.elapsed = {}
        self.multiply_add = 0.0
        self.read = 0.0
        for line in all_lines:
            if "limit" in line:
                self.multiply_add = max(self.multiply_add, line.get("gflops", 0.0))
                self.read = max(self.read, line.get("gigabytes_per_second", 0.0))
                continue
            key = (line["peer"], Case.of(line))
            rate = line["gflops_cpu" if line["threads"] == 1 else "gflops"]
            self.best[key] = max(self.best.get(key, 0.0), rate)
            self.elapsed[key] = max(self.elapsed.get(key, 0.0), line["gflops"])


def print_cases(rates, ours, peers, cases):
    titles = ["what", "dtype", "heads", "head dim", "n", "mask", ours + " GFLOP/s"]
    if rates.multiply_add:
        titles.append(f"of {rates.multiply_add:.1f}")
    titles.append("of full")
    for peer in peers:
        titles += [peer + " GFLOP/s", "ratio"]
    if rates.read:
        titles.append(f"read GB/s (of {rates.read:.1f})")
    print("| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for case in cases:
        own_rate = rates.best[ours, case]
        row = [
            case.what,
            case.dtype_name(),
            case.heads if case.heads == case.kv_heads else f"{case.heads}:{case.kv_heads}",
            case.head_dim,
            case.n if case.n == case.kv_len else f"{case.n} × {case.kv_len}",
            case.mask + (f", {case.threads} threads" if case.threads > 1 else ""),
            f"{own_rate:.1f}",
        ]
        if rates.multiply_add:
            row.append(f"{100 * own_rate / rates.multiply_add / case.threads:.0f} %")
        full = rates.best.get((ours, case._replace(kv_heads=case.heads, mask="full")))
        row.append(NONE if full is None else f"{100 * own_rate / full:.0f} %")
        for peer in peers:
            peer_rate = rates.best.get((peer, case._replace(rounded=False)))
            if peer_rate is None:
                row += [NONE, NONE]
            else:
                row += [f"{peer_rate:.1f}", f"{own_rate / peer_rate:.2f}"]
        if rates.read:
            read = case.read_rate(own_rate)
            share = 100 * read / rates.read
            row.append(f"{read:.1f} ({share:.0f} %)" if case.reads_only() else NONE)
        print("| " + " | ".join(map(str, row)) + " |")


def print_threads(rates, ours, cases):
    several = [
        case
        for case in cases
        if case.threads > 1 and (ours, case._replace(threads=1)) in rates.elapsed
    ]
    if not several:
        return
    titles = ["what", "dtype", "head dim", "n", "mask", "threads"]
    titles += ["GFLOP/s, elapsed time", "one thread", "ratio"]
    print("\n| " + " | ".join(titles) + " |")
    print("|---" * len(titles) + "|")
    for case in several:
        many = rates.best[ours, case]
        one = rates.elapsed[ours, case._replace(threads=1)]
        row = [case.what, case.dtype_name(), case.head_dim, case.n, case.mask, case.threads]
        row += [f"{many:.1f}", f"{one:.1f}", f"{many / one:.2f}"]
        print("| " + " | ".join(map(str, row)) + " |")


def main():
    rates = Rates(lines(sys.argv[1:]))
    names = sorted({peer for peer, _ in rates.best})
    own_names = [peer for peer in names if peer.startswith("annulus-")]
    if not own_names:
        sys.exit("ratios.py: needs lines of annulus")
    ours = own_names[0]
    peers = [peer for peer in names if not peer.startswith("annulus-")]
    cases = sorted({case for peer, case in rates.best if peer == ours}, key=str)
    print_cases(rates, ours, peers, cases)
    print_threads(rates, ours, cases)


main()
