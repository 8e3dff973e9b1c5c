"""Times key lists on one thread, as ratios of CPU times in one run: a JSON line.

    python benches/lists.py [--rows 16384] [--degree 64] [--repeats 5] [--dense]

Scattered lists of ``degree`` keys a query, 8 heads of 64, f32. ``ideal`` is the time of as many
pairs at the rate of the full mask (4,096 rows). ``torch`` gathers rows, takes the softmax of
each segment and scatters sums, head by head. ``--dense`` also times the equal dense mask, which
takes a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import annulus_attention as annulus

HEADS, DIM, FULL_ROWS = 8, 64, 4096


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


def plan_of(rows: int) -> annulus.Plan:
    """Plans on one thread."""
    lengths = {"q_len": rows, "kv_len": rows, "q_heads": HEADS, "head_dim": DIM}
    return annulus.Plan(annulus.Attention(), batch=1, threads=1, **lengths)


def passes(plan: annulus.Plan, given: list[Any], repeats: int) -> tuple[float, float]:
    """Times a forward and a backward pass."""
    q, k, v, dout = given
    forward = plan.forward(q, k, v)
    return (
        seconds(lambda: plan.forward(q, k, v), repeats),
        seconds(lambda: plan.backward(q, k, v, forward, dout), repeats),
    )


def torch_attention(q: Any, k: Any, v: Any, of_query: Any, keys: Any, rows: int) -> Any:
    """Computes one head: gathered rows, softmax of each segment, scattered sums."""
    scores = (q[of_query] * k[keys]).sum(-1) * DIM**-0.5
    top = torch.full((rows,), -torch.inf).scatter_reduce(0, of_query, scores, "amax")
    probs = torch.exp(scores - top[of_query])
    sums = torch.zeros(rows).index_add(0, of_query, probs)
    out = torch.zeros(rows, DIM).index_add(0, of_query, probs[:, None] * v[keys])
    return out / sums[:, None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--degree", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dense", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rows, degree, repeats = flags.rows, flags.degree, flags.repeats

    with plan_of(FULL_ROWS) as plan:
        full = passes(plan, tensors(FULL_ROWS), max(repeats // 2, 1))
    ideal = [time_of / FULL_ROWS**2 * rows * degree for time_of in full]

    draw = np.random.default_rng(0)
    lists = np.stack([draw.choice(rows, degree, replace=False) for _ in range(rows)])
    indices = np.sort(lists, axis=1).ravel()
    indptr = np.arange(rows + 1) * degree
    given = tensors(rows)
    result: dict[str, Any] = {"rows": rows, "degree": degree, "heads": HEADS, "dim": DIM}
    with plan_of(rows) as plan:
        plan.update(key_lists=(indptr, indices))
        forward, backward = passes(plan, given, repeats)
        update = seconds(lambda: plan.update(key_lists=(indptr, indices)), repeats)
        out = plan.forward(*given[:3]).out
        if flags.dense:
            mask = np.zeros((1, 1, rows, rows), dtype=bool)
            mask[0, 0, np.repeat(np.arange(rows), degree), indices] = True
            plan.update(attention_mask=mask)
            start = time.process_time()
            plan.forward(*given[:3])
            result["dense_over_lists"] = round((time.process_time() - start) / forward, 2)
    result["forward_s"], result["backward_s"] = round(forward, 4), round(backward, 4)
    result["forward_over_ideal"] = round(forward / ideal[0], 2)
    result["backward_over_ideal"] = round(backward / ideal[1], 2)
    result["update_over_forward"] = round(update / forward, 4)

    of_query = torch.from_numpy(np.repeat(np.arange(rows), degree))
    keys = torch.from_numpy(indices)
    q, k, v = (torch.from_numpy(array)[0].transpose(0, 1).contiguous() for array in given[:3])

    def by_torch() -> Any:
        of_heads = zip(q, k, v, strict=True)
        return torch.stack([torch_attention(*of, of_query, keys, rows) for of in of_heads], 1)

    assert np.abs(by_torch().numpy() - out[0]).max() < 1e-4
    result["torch_over_lists"] = round(seconds(by_torch, max(repeats // 2, 1)) / forward, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
