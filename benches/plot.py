#!/usr/bin/env python3
"""Draws bench lines (JSON lines) as an SVG: GFLOP/s of annulus and its peers, one group per case.

usage: plot.py [LINES.jsonl]... > rates.svg     default: standard input

A dashed line is the rate of multiply-adds in registers from the same lines. Cases of several
threads, windows, packed documents and grouped heads are left out. Needs only Python's own library.
"""

import html
import json
import sys

CASE = ("what", "dtype", "head_dim", "n", "causal")
COLOURS = ("#1f6f8b", "#c06014", "#7a8450", "#6a4c93")

# Sizes in pixels: height of a bar, space between groups, width left of the bars, height above them,
# and the width that the highest rate takes, with 5 % to spare.
BAR = 16
GAP = 14
LEFT = 250
TOP = 48
PANEL = 520


def lines(paths):
    for stream in [open(path) for path in paths] or [sys.stdin]:
        for line in stream:
            if line.startswith("{"):
                yield json.loads(line)


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
            key = (tuple(line[field] for field in CASE), peer)
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
    best, limit = best_rates(sys.argv[1:])
    if not best:
        sys.exit("plot.py: no bench lines")
    print(draw(best, limit))


main()
