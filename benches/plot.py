#!/usr/bin/env python3
"""Draws bench lines (files of JSON lines, or standard input) as an SVG: GFLOP/s of annulus and its peers, case by case, under the rate of
multiply-adds in registers that was measured in the same run: cases of one thread, without windows, documents and grouped heads. Needs nothing but
Python.

usage: plot.py lines.jsonl > rates.svg
"""
import html
import json
import sys

CASE = ("what", "dtype", "head_dim", "n", "causal")
COLOURS = ("#1f6f8b", "#c06014", "#7a8450", "#6a4c93")
BAR, GAP, LEFT, TOP, PANEL = 16, 14, 250, 48, 520


def lines(paths):
    for stream in [open(path) for path in paths] or [sys.stdin]:
        for line in stream:
            if line.startswith("{"):
                yield json.loads(line)


best, limit = {}, 0.0
for line in lines(sys.argv[1:]):
    plain = line.get("kv_heads") in (None, line.get("heads")) and line.get("kv_len") in (None, line.get("n"))
    if "limit" in line:
        limit = max(limit, line.get("gflops", 0.0))
    elif plain and line["threads"] == 1 and not line.get("window") and not line.get("documents"):
        allows = line.get("precision", "highest") == "default" and line["dtype"] == "bf16"
        key = (tuple(line[field] for field in CASE), line["peer"] + ("+rounded" if allows else ""))
        best[key] = max(best.get(key, 0.0), line["gflops_cpu"])
if not best:
    sys.exit("plot.py: no bench lines")

peers = sorted({peer for _, peer in best}, key=lambda peer: (not peer.startswith("annulus"), peer))
cases = sorted({case for case, _ in best}, key=str)
most = max([limit, *best.values()]) * 1.05
height = TOP + len(cases) * (BAR * len(peers) + GAP) + 40
at = lambda rate: LEFT + PANEL * rate / most
out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + PANEL + 60}" height="{height}" font-family="sans-serif" font-size="12">',
    '<rect width="100%" height="100%" fill="white"/>',
]
for place, peer in enumerate(peers):
    x = LEFT + 170 * place
    out.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{COLOURS[place % len(COLOURS)]}"/>')
    out.append(f'<text x="{x + 18}" y="24">{html.escape(peer)}</text>')
y = TOP
for case in cases:
    what, dtype, head_dim, n, causal = case
    name = f'{what} {dtype} D={head_dim} N={n}{" causal" if causal else ""}'
    out.append(f'<text x="{LEFT - 8}" y="{y + BAR * len(peers) / 2 + 4}" text-anchor="end">{html.escape(name)}</text>')
    for place, peer in enumerate(peers):
        rate = best.get((case, peer))
        if rate is not None:
            out.append(f'<rect x="{LEFT}" y="{y}" width="{at(rate) - LEFT:.1f}" height="{BAR - 2}" fill="{COLOURS[place % len(COLOURS)]}"/>')
            out.append(f'<text x="{at(rate) + 4:.1f}" y="{y + 11}" font-size="10">{rate:.0f}</text>')
        y += BAR
    y += GAP
if limit:
    out.append(f'<line x1="{at(limit):.1f}" x2="{at(limit):.1f}" y1="{TOP - 10}" y2="{y}" stroke="#444" stroke-dasharray="4 3"/>')
    out.append(f'<text x="{at(limit):.1f}" y="{y + 16}" text-anchor="middle">multiply-adds: {limit:.0f} GFLOP/s</text>')
out.append("</svg>")
print("\n".join(out))
