#!/usr/bin/env python3
"""Joins bench lines of annulus and its peers, case by case, into a table of ratios (standard input or files of JSON lines).

Lines of annulus that allow weights to be rounded (`--precision default`) are cases of their own, set against the same lines of peers. The best
gflops_cpu of each (peer, case) counts; a ratio above 1 means that annulus is faster. Where the lines hold the rate of multiply-adds in
registers, a column says what share of the best of them annulus reaches.
"""
import json
import sys

CASE = ("what", "dtype", "threads", "batch", "heads", "head_dim", "n", "causal")


def lines(paths):
    for stream in [open(path) for path in paths] or [sys.stdin]:
        for line in stream:
            if line.startswith("{"):
                yield json.loads(line)


best = {}
limit = 0.0
for line in lines(sys.argv[1:]):
    if "limit" in line:
        limit = max(limit, line.get("gflops", 0.0))
        continue
    allows = line.get("precision", "highest") == "default" and line["dtype"] == "bf16"
    key = (line["peer"] + ("+rounded" if allows else ""), tuple(line[field] for field in CASE))
    best[key] = max(best.get(key, 0.0), line["gflops_cpu"])

names = sorted({peer for peer, _ in best if peer.startswith("annulus-")})
ours = names[0] if names else None
peers = sorted({peer for peer, _ in best if peer not in names})
cases = sorted({(case, name) for name, case in best if name in names}, key=str)
if ours is None or not peers:
    sys.exit("ratios.py: needs lines of annulus and of at least one peer")
share = " of %.1f |" % limit if limit else ""
print("| what | dtype | heads | head dim | n | causal | " + ours + " GFLOP/s |" + share + " " + " | ".join(f"{peer} GFLOP/s | ratio" for peer in peers) + " |")
print("|---" * (7 + bool(limit) + 2 * len(peers)) + "|")
for case, name in cases:
    what, dtype, _, _, heads, head_dim, n, causal = case
    mine = best[(name, case)]
    row = [what, dtype if name == ours else dtype + ", rounded weights", heads, head_dim, n, "yes" if causal else "no", f"{mine:.1f}"]
    if limit:
        row += [f"{100 * mine / limit:.0f} %"]
    for peer in peers:
        theirs = best.get((peer, case))
        row += [f"{theirs:.1f}", f"{mine / theirs:.2f}"] if theirs else ["–", "–"]
    print("| " + " | ".join(map(str, row)) + " |")
