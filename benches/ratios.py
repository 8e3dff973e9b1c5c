#!/usr/bin/env python3
"""Joins bench lines of annulus and its peers, case by case, into tables (standard input or files of JSON lines).

The best gflops_cpu of each (peer, case) counts; a ratio above 1 means that annulus is faster. Lines of annulus that allow weights to be rounded
(`--precision default`) are cases of their own, set against the same lines of peers; windows, packed documents, grouped heads and other numbers of
queries than of keys have no peer. "of full" is the share of annulus' own rate without a mask, as many key heads as query heads, in the same run;
"read" is how fast few queries read keys and values, and its share of the best plain reading. With several threads the clock on the wall counts, and
a second table sets them against one thread. Rates of multiply-adds and of reading are those that the lines hold.
"""
import json
import sys

SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2}


def lines(paths):
    for stream in [open(path) for path in paths] or [sys.stdin]:
        for line in stream:
            if line.startswith("{"):
                yield json.loads(line)


def case(line):
    """What is timed, but for who does it: (what, dtype, rounded, threads, heads, kv_heads, head_dim, n, kv_len, mask)."""
    mask = "causal" if line["causal"] else "full"
    if line.get("window"):
        mask = "window " + ",".join("none" if side is None else str(side) for side in line["window"])
    if line.get("documents"):
        lengths = line["documents"]
        alike = len(set(lengths)) == 1
        mask = ("%d×%d " % (len(lengths), lengths[0]) if alike else "documents ") + mask
    rounded = line.get("precision", "highest") == "default" and line["dtype"] == "bf16"
    kv_heads, kv_len = line.get("kv_heads", line["heads"]), line.get("kv_len", line["n"])
    return (line["what"], line["dtype"], rounded, line["threads"], line["heads"], kv_heads, line["head_dim"], line["n"], kv_len, mask)


def few(case):
    return case[7] < case[8]


best, multiply_add, read = {}, 0.0, 0.0
for line in lines(sys.argv[1:]):
    if "limit" in line:
        multiply_add = max(multiply_add, line.get("gflops", 0.0))
        read = max(read, line.get("gigabytes_per_second", 0.0))
        continue
    rate = line["gflops_cpu" if line["threads"] == 1 else "gflops"]
    best[line["peer"], case(line)] = max(best.get((line["peer"], case(line)), 0.0), rate)
    # what several threads are set against
    best["wall " + line["peer"], case(line)] = max(best.get(("wall " + line["peer"], case(line)), 0.0), line["gflops"])

names = sorted({peer for peer, _ in best if peer.startswith("annulus-")})
if not names:
    sys.exit("ratios.py: needs lines of annulus")
ours = names[0]
peers = sorted({peer for peer, _ in best if not peer.startswith(("annulus-", "wall "))})
cases = sorted({of for name, of in best if name == ours}, key=str)

titles = ["what", "dtype", "heads", "head dim", "n", "mask", ours + " GFLOP/s"]
titles += ["of %.1f" % multiply_add] * bool(multiply_add) + ["of full"]
titles += [title for peer in peers for title in (peer + " GFLOP/s", "ratio")] + ["read GB/s (of %.1f)" % read] * bool(read)
print("| " + " | ".join(titles) + " |")
print("|---" * len(titles) + "|")
for of in cases:
    what, dtype, rounded, threads, heads, kv_heads, head_dim, n, kv_len, mask = of
    mine = best[ours, of]
    row = [what, dtype + ", rounded weights" * rounded, str(heads) if heads == kv_heads else "%d:%d" % (heads, kv_heads), head_dim]
    row += ["%d × %d" % (n, kv_len) if n != kv_len else n, mask + (", %d threads" % threads) * (threads > 1), "%.1f" % mine]
    if multiply_add:
        row.append("%.0f %%" % (100 * mine / multiply_add / threads))
    full = best.get((ours, (what, dtype, rounded, threads, heads, heads, head_dim, n, kv_len, "full")))
    row.append("–" if full is None else "%.0f %%" % (100 * mine / full))
    for peer in peers:
        theirs = best.get((peer, (what, dtype, False) + of[3:]))
        row += ["–", "–"] if theirs is None else ["%.1f" % theirs, "%.2f" % (mine / theirs)]
    if read:
        # 4 operations a pair and element, of each of which keys and values hold two elements a key head
        bandwidth = mine * 2 * SIZES[dtype] * kv_heads / (4 * n * heads)
        row.append("%.1f (%.0f %%)" % (bandwidth, 100 * bandwidth / read) if few(of) and what == "fwd" and mask == "full" else "–")
    print("| " + " | ".join(map(str, row)) + " |")

several = [of for of in cases if of[3] > 1 and ("wall " + ours, of[:3] + (1,) + of[4:]) in best]
if several:
    print("\n| what | dtype | head dim | n | mask | threads | GFLOP/s on the wall | one thread | ratio |")
    print("|---" * 9 + "|")
    for of in several:
        many, one = best[ours, of], best["wall " + ours, of[:3] + (1,) + of[4:]]
        print("| %s | %s | %d | %d | %s | %d | %.1f | %.1f | %.2f |" % (of[0], of[1] + ", rounded weights" * of[2], of[6], of[7], of[9], of[3], many, one, many / one))
