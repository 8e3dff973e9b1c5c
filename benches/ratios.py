#!/usr/bin/env python3
"""Joins bench lines (JSON lines) of annulus and its peers into Markdown tables, case by case.

usage: ratios.py [--svg] [LINES.jsonl]...     default: standard input

The best rate of each (peer, case) counts: per second of CPU time with one thread, of elapsed time
with several. A ratio above 1 means that annulus is faster. Columns:

    of LIMIT   share of the rate of multiply-adds in registers, from the same lines
    of full    share of annulus' own rate without a mask and with as many KV heads as query heads
    read GB/s  rate at which few queries read keys and values, and its share of the read rate of
               the same lines

Lines of annulus that may round probabilities (`--precision default`) are cases of their own, beside
the same lines of the peers. Windows, packed documents, grouped heads, and lengths of queries and
keys that differ have no peer. A second table compares several threads with one.

--svg draws GFLOP/s of annulus and its peers instead, one group per case. A dashed line is the rate
of multiply-adds in registers. Cases of several threads, windows, packed documents and grouped heads
are left out. Needs only Python's own library.
"""

import html
import json
import sys
from typing import NamedTuple

# bytes of an element
SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}
NONE = "–"

DRAWN_CASE = ("what", "dtype", "head_dim", "n", "causal")
COLOURS = ("#1f6f8b", "#c06014", "#7a8450", "#6a4c93")

# Sizes in pixels: height of a bar, space between groups, width left of the bars, height above them,
# and the width that the highest rate takes, with 5 % to spare.
BAR = 16
GAP = 14
LEFT = 250
TOP = 48
PANEL = 520


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


def is_drawn(line):
    grouped = line.get("kv_heads") not in (None, line.get("heads"))
    few_queries = line.get("kv_len") not in (None, line.get("n"))
    masked = line.get("window") or line.get("documents")
    return line["threads"] == 1 and not (grouped or few_queries or masked)


def best_rates(paths):
    """The best rate of each (case, peer), and the rate of multiply-adds, or 0."""
    best = {}
    limit = 0.0
    for line in lines(paths):
        if "limit" in line:
            limit = max(limit, line.get("gflops", 0.0))
        elif is_drawn(line):
            rounded = line.get("precision", "highest") == "default" and line["dtype"] == "bf16"
            peer = line["peer"] + ("+rounded" if rounded else "")
            key = (tuple(line[field] for field in DRAWN_CASE), peer)
            best[key] = max(best.get(key, 0.0), line["gflops_cpu"])
    return best, limit


def text(x, y, content, attributes=""):
    return f'<text x="{x}" y="{y}"{attributes}>{content}</text>'


def bar(x, y, width, height, colour):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def draw(best, limit):
    peers = sorted(
        {peer for _, peer in best}, key=lambda peer: (not peer.startswith("annulus"), peer)
    )
    cases = sorted({case for case, _ in best}, key=str)
    scale = PANEL / (max([limit, *best.values()]) * 1.05)
    width = LEFT + PANEL + 60
    height = TOP + len(cases) * (BAR * len(peers) + GAP) + 40
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    # the legend
    for index, peer in enumerate(peers):
        x = LEFT + 170 * index
        out.append(bar(x, 14, 12, 12, COLOURS[index % len(COLOURS)]))
        out.append(text(x + 18, 24, html.escape(peer)))
    y = TOP
    for case in cases:
        what, dtype, head_dim, n, causal = case
        name = f"{what} {dtype} D={head_dim} N={n}{' causal' if causal else ''}"
        middle = y + BAR * len(peers) / 2 + 4
        out.append(text(LEFT - 8, middle, html.escape(name), ' text-anchor="end"'))
        for index, peer in enumerate(peers):
            rate = best.get((case, peer))
            if rate is not None:
                colour = COLOURS[index % len(COLOURS)]
                out.append(bar(LEFT, y, f"{scale * rate:.1f}", BAR - 2, colour))
                x = f"{LEFT + scale * rate + 4:.1f}"
                out.append(text(x, y + 11, f"{rate:.0f}", ' font-size="10"'))
            y += BAR
        y += GAP
    if limit:
        x = f"{LEFT + scale * limit:.1f}"
        out.append(
            f'<line x1="{x}" x2="{x}" y1="{TOP - 10}" y2="{y}"'
            ' stroke="#444" stroke-dasharray="4 3"/>'
        )
        label = f"multiply-adds: {limit:.0f} GFLOP/s"
        out.append(text(x, y + 16, label, ' text-anchor="middle"'))
    out.append("</svg>")
    return "\n".join(out)


def main():
    paths = sys.argv[1:]
    if "--svg" in paths:
        best, limit = best_rates([path for path in paths if path != "--svg"])
        if not best:
            sys.exit("ratios.py: no bench lines")
        print(draw(best, limit))
        return
    rates = Rates(lines(paths))
    names = sorted({peer for peer, _ in rates.best})
    own_names = [peer for peer in names if peer.startswith("annulus-")]
    if not own_names:
        sys.exit("ratios.py: needs lines of annulus")
    ours = own_names[0]
    peers = [peer for peer in names if not peer.startswith("annulus-")]
    cases = sorted({case for peer, case in rates.best if peer == ours}, key=str)
    print_cases(rates, ours, peers, cases)
    print_threads(rates, ours, cases)


if __name__ == "__main__":
    main()
