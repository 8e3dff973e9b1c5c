"""Times sparse masks on one thread, as ratios of CPU times in one run: a JSON line for each case.

    python benches/lists.py [--case NAME ...] [--repeats 5] [--torch] [--dense]

8 heads of 64, f32. Windows of 16,384 points of a grid in row-major order and in boxes, the 5-hop
neighbours of an icosahedral mesh of 16,002 points in reverse Cuthill-McKee order, and scattered
lists of 64 keys. ``ideal`` is the time of as many pairs at the rate of the full mask (4,096 rows).
``--torch`` gathers rows, takes the softmax of each segment and scatters sums, head by head.
``--dense`` times the equal dense mask, which takes minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import annulus_attention as annulus
import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
import torch
from annulus_attention import layouts, masks

HEADS, DIM, FULL_ROWS = 8, 64, 4096

Lists = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def seconds(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median CPU time of a call after a first one."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def tensors(rows: int) -> list[np.ndarray[Any, Any]]:
    """Returns query, key, value and the gradient of out."""
    draw = np.random.default_rng(1)
    return [draw.standard_normal((1, rows, HEADS, DIM), dtype=np.float32) for _ in range(4)]


def plan_of(rows: int, mask: Any = None, layout: Any = None) -> annulus.Plan:
    """Plans on one thread."""
    attention = annulus.Attention(mask=mask) if mask else annulus.Attention()
    lengths: dict[str, Any] = {"q_len": rows, "kv_len": rows, "q_heads": HEADS, "head_dim": DIM}
    if layout:
        lengths |= {"layout": layout, "ranks": 1}
    return attention.plan(batch=1, threads=1, **lengths)


def passes(plan: annulus.Plan, given: list[Any], repeats: int) -> tuple[float, float]:
    """Times a forward and a backward pass."""
    q, k, v, dout = given
    forward = plan.forward(q, k, v)
    return (
        seconds(lambda: plan.forward(q, k, v), repeats),
        seconds(lambda: plan.backward(q, k, v, forward, dout), repeats),
    )


def window(shape: tuple[int, ...], size: int, boxes: bool) -> tuple[Any, Any, int]:
    """Returns the mask, the layout and the number of pairs of a window on a grid."""
    layout = layouts.boxes(shape, 1) if boxes else None
    pairs = int(np.prod(shape)) * size ** len(shape)
    return masks.neighborhood(shape, size), layout, pairs


def scattered(rows: int, degree: int) -> Lists:
    """Returns lists of keys drawn at random."""
    draw = np.random.default_rng(0)
    lists = np.stack([draw.choice(rows, degree, replace=False) for _ in range(rows)])
    return np.arange(rows + 1) * degree, np.sort(lists, axis=1).ravel()


def mesh(frequency: int, hops: int) -> Lists:
    """Returns the neighbours of an icosahedral mesh of 10·frequency² + 2 points."""
    golden = (1 + 5**0.5) / 2
    signs = [(a, b) for a in (-1.0, 1.0) for b in (-golden, golden)]
    corners = [np.roll((0.0, a, b), axis) for axis in range(3) for a, b in signs]
    near = [(i, j) for i in range(12) for j in range(i) if np.dot(corners[i], corners[j]) > 0.9]
    near = [(i, j) for i, j in near if np.linalg.norm(corners[i] - corners[j]) < 2.1]
    faces = [(i, j, k) for i, j in near for k in range(j) if (i, k) in near and (j, k) in near]
    numbers: dict[tuple[float, ...], int] = {}
    edges = []
    for face in faces:
        a, b, c = (corners[corner] for corner in face)
        points = {}
        for i in range(frequency + 1):
            for j in range(frequency + 1 - i):
                point = a + (b - a) * (i / frequency) + (c - a) * (j / frequency)
                place = tuple(np.round(point, 6) + 0.0)
                points[i, j] = numbers.setdefault(place, len(numbers))
        steps = ((1, 0), (0, 1), (1, -1))
        for (i, j), point in points.items():
            ends = (points.get((i + di, j + dj)) for di, dj in steps)
            edges += [(point, end) for end in ends if end is not None]
    start, end = np.array(edges).T
    count = len(numbers)
    graph = scipy.sparse.csr_array((np.ones(len(edges)), (start, end)), (count, count))
    graph = ((graph + graph.T + scipy.sparse.eye_array(count)) > 0).astype(np.float32)
    order = scipy.sparse.csgraph.reverse_cuthill_mckee(scipy.sparse.csr_matrix(graph), True)
    graph = scipy.sparse.csr_array(graph[order][:, order])
    reach = graph
    for _ in range(hops - 1):
        reach = ((reach @ graph) > 0).astype(np.float32)
    reach = scipy.sparse.csr_array(reach)
    reach.sort_indices()
    return reach.indptr.astype(np.int64), reach.indices.astype(np.int64)


CASES: dict[str, Callable[[], Any]] = {
    "1-D, 49": lambda: window((16384,), 49, False),
    "7x7": lambda: window((128, 128), 7, False),
    "7x7, boxes": lambda: window((128, 128), 7, True),
    "15x15": lambda: window((128, 128), 15, False),
    "15x15, boxes": lambda: window((128, 128), 15, True),
    "5x5x5": lambda: window((32, 32, 16), 5, False),
    "5x5x5, boxes": lambda: window((32, 32, 16), 5, True),
    "mesh": lambda: mesh(40, 5),
    "scattered": lambda: scattered(16384, 64),
}


def torch_attention(q: Any, k: Any, v: Any, of_query: Any, keys: Any) -> Any:
    """Computes one head: gathered rows, softmax of each segment, scattered sums."""
    rows = len(q)
    scores = (q[of_query] * k[keys]).sum(-1) * DIM**-0.5
    top = torch.full((rows,), -torch.inf).scatter_reduce(0, of_query, scores, "amax")
    probs = torch.exp(scores - top[of_query])
    sums = torch.zeros(rows).index_add(0, of_query, probs)
    out = torch.zeros(rows, DIM).index_add(0, of_query, probs[:, None] * v[keys])
    return out / sums[:, None]


def by_torch(given: list[Any], lists: Lists) -> Any:
    """Computes all heads."""
    indptr, indices = lists
    of_query = torch.from_numpy(np.repeat(np.arange(len(indptr) - 1), np.diff(indptr)))
    q, k, v = (torch.from_numpy(array)[0].transpose(0, 1).contiguous() for array in given[:3])
    heads = zip(q, k, v, strict=True)
    keys = torch.from_numpy(indices)
    return torch.stack([torch_attention(*head, of_query, keys) for head in heads], 1)


def run(name: str, full: tuple[float, float], flags: argparse.Namespace) -> dict[str, Any]:
    """Times one case."""
    case = CASES[name]()
    lists = case if len(case) == 2 else None
    mask, layout, pairs = (None, None, len(case[1])) if lists else case
    rows = len(lists[0]) - 1 if lists else 16384
    given = tensors(rows)
    result: dict[str, Any] = {"case": name, "rows": rows, "pairs": pairs}
    with plan_of(rows, mask, layout) as plan:
        if lists:
            plan.update(key_lists=lists)
        start = time.process_time()
        plan.forward(*given[:3])
        first = time.process_time() - start
        times = passes(plan, given, flags.repeats)
        for what, of, of_full in zip(("forward", "backward"), times, full, strict=True):
            ideal = of_full / FULL_ROWS**2 * pairs
            result |= {f"{what}_ms": round(of * 1e3, 1), f"{what}_over_ideal": round(of / ideal, 2)}
        result["first_over_forward"] = round(first / times[0], 2)
        if lists:
            update = seconds(lambda: plan.update(key_lists=lists), flags.repeats)
            result["update_over_forward"] = round(update / times[0], 3)
        out = plan.forward(*given[:3]).out
    if lists and flags.dense:
        dense = np.zeros((1, 1, rows, rows), dtype=bool)
        dense[0, 0, np.repeat(np.arange(rows), np.diff(lists[0])), lists[1]] = True
        with plan_of(rows) as plan:
            plan.update(attention_mask=dense)
            start = time.process_time()
            plan.forward(*given[:3])
            result["dense_over_lists"] = round((time.process_time() - start) / times[0], 1)
    if lists and flags.torch:
        assert np.abs(by_torch(given, lists).numpy() - out[0]).max() < 1e-4
        of_torch = seconds(lambda: by_torch(given, lists), 1)
        result["torch_over_lists"] = round(of_torch / times[0], 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--dense", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    for name in flags.case or CASES:
        # in turns with the case, so that other load on the machine affects both alike
        with plan_of(FULL_ROWS) as plan:
            full = passes(plan, tensors(FULL_ROWS), 1)
        print(json.dumps(run(name, full, flags)), flush=True)


if __name__ == "__main__":
    main()
