"""KV caches in this process, and plans by the time that a machine predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random

import annulus_attention as annulus
from annulus_attention import _options
from annulus_attention._calls import Call

N = 37
Q, K, V = random(2, N, 4, 16), random(2, N, 2, 16, seed=1), random(2, N, 2, 8, seed=2)
LENGTHS: dict[str, Any] = {
    "batch": 2,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "value_dim": 8,
    "page_rows": 4,
}
CAUSAL = annulus.Attention(causal=True)


def decode(cache: annulus.Cache, q: Any, k: Any, v: Any, **sinks: Any) -> tuple[Any, Any]:
    """A prefill in two chunks, then tokens one by one."""
    results = []
    for first, end in [(0, 20), (20, 24), *((row, row + 1) for row in range(24, N))]:
        rows = slice(first, end)
        assert len(cache) == first
        if first == 20:
            own = first + cache.own_rows(end - first)
            cache.append_own(end - first, k[:, own], v[:, own])
        else:
            cache.append(k[:, rows], v[:, rows])
        results.append(cache.attend(q[:, rows], **sinks))
    return tuple(
        np.concatenate([np.asarray(getattr(result, name)) for result in results], axis)
        for name, axis in (("out", 1), ("lse", 2))
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_decoding_is_attention_over_all_rows(ranks: int, dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in (Q, K, V))
    sinks = np.array([0.5, -1.0], dtype)
    options = {**LENGTHS, "ranks": ranks, "dtype": dtype, "softmax_aux_shape": sinks.shape}
    with annulus.Cache(CAUSAL, **options) as cache:
        assert (cache.rank, cache.ranks, cache.page_rows, cache.dtype) == (0, ranks, 4, dtype)
        out, lse = decode(cache, q, k, v, softmax_aux=sinks)
        assert len(cache) == cache.local_len == N and cache.own_rows(3).tolist() == [0, 1, 2]
        assert cache.buffer_bytes >= k.nbytes + v.nbytes
        # the same tokens again
        cache.truncate(26)
        report = None
        for row in range(26, N):
            cache.append(k[:, row : row + 1], v[:, row : row + 1])
            token = cache.attend(q[:, row : row + 1], softmax_aux=sinks)
            assert (token.out == out[:, row : row + 1]).all()
            report = token.reports
        assert report is not None and len(report) == ranks
        assert sum(of.bytes_sent for of in report) == cache.predicted_bytes(1)
        assert (cache.predicted_bytes(1) > 0) == (ranks > 1)
        # outputs of the caller's, of any strides
        wide = np.full((2, N, 8, 8), 7, dtype)
        again = cache.attend(q, softmax_aux=sinks, out=wide[:, :, ::2], lse=np.empty_like(lse))
        assert (wide[:, :, 1::2] == 7).all() and abs(again.out - out).max() < 1e-6
    want, want_lse = annulus.flash_attention(
        q, k, v, causal=True, softmax_aux=sinks, return_lse=True
    )
    limit = 1e-6 if dtype == "float32" else 1e-14
    assert abs(out - want).max() < limit and abs(lse - want_lse).max() < 10 * limit


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_reproducible_order_has_the_bits_of_one_attention(ranks: int) -> None:
    attention = annulus.Attention(causal=True, reproducible=True)
    lengths = {name: value for name, value in LENGTHS.items() if name != "page_rows"}
    q, k, v = (np.tile(x, (1, 15, 1, 1)) for x in (Q, K, V))
    with annulus.Cache(attention, **lengths, ranks=ranks) as cache:
        assert cache.page_rows == 256
        cache.append(k, v)
        out = cache.attend(q).out
    want = annulus.flash_attention(q, k, v, causal=True, reproducible=True)
    assert (out == want).all()
    with pytest.raises(ValueError, match="page_rows"):
        annulus.Cache(attention, **LENGTHS)


def test_arrays_of_bfloat16_and_torch() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (Q, K, V))
    with annulus.Cache(CAUSAL, **LENGTHS, dtype="bfloat16", ranks=2) as cache:
        cache.append(k, v)
        out = cache.attend(q).out
    assert out.dtype == ml_dtypes.bfloat16
    want = annulus.flash_attention(q, k, v, causal=True).astype("f4")
    assert abs(out.astype("f4") - want).max() < 0.02
    torch = pytest.importorskip("torch")
    with annulus.Cache(CAUSAL, **LENGTHS, ranks=2) as cache:
        cache.append(torch.from_numpy(K), torch.from_numpy(V))
        of_torch = cache.attend(torch.from_numpy(Q)).out
    assert isinstance(of_torch, torch.Tensor)


def test_a_token_of_the_example_costs_the_same_at_any_length() -> None:
    example = Path(__file__).parent / "../examples/decoding.py"
    command = [sys.executable, str(example)]
    lines = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    sent = [int(line.split()[-2]) for line in lines]
    assert len(lines) == 6 and lines[5].startswith("4002 rows: last out ")
    assert sent[1] == sent[2] == sent[4] == sent[5] > 0 and sent[0] > 100 * sent[1]


BAD_CACHES: list[tuple[dict[str, Any], str]] = [
    ({"page_rows": 0}, "page_rows"),
    ({"page_rows": 2**32 + 1}, "page_rows"),
    ({"page_rows": 2**64}, "page_rows"),
    ({"kv_heads": 3}, "kv_heads"),
    ({"batch": -1}, "batch"),
    ({"head_dim": 0}, "head_dim"),
    ({"ranks": 0}, "ranks"),
    ({"threads": 0}, "threads"),
    ({"comm": "world"}, "comm"),
    ({"dtype": "int8"}, "dtype"),
    ({"deadline": 0.1}, "deadline"),
    ({"arrival_deadline": float("nan")}, "arrival_deadline"),
    ({"softmax_aux_shape": (3, 2)}, "softmax_aux"),
]


@pytest.mark.parametrize(("changed", "name"), BAD_CACHES)
def test_caches_without_meaning_are_named(changed: dict[str, Any], name: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=rf"{name}\b"):
        annulus.Cache(CAUSAL, **{**LENGTHS, **changed})


def test_what_a_cache_does_not_have_is_named() -> None:
    with pytest.raises(annulus.Unsupported, match="^normalize_output is not supported") as caught:
        annulus.Cache(annulus.Attention(normalize_output=False), **LENGTHS)
    assert caught.value.argument == "normalize_output"
    with pytest.raises(ValueError, match="attention: got"):
        annulus.Cache("causal", **LENGTHS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout"):
        annulus.Cache(CAUSAL, **LENGTHS, layout="zigzag")


def test_refused_calls_change_nothing() -> None:
    with annulus.Cache(CAUSAL, **LENGTHS, ranks=2) as cache:
        cache.append(K, V)
        want = cache.attend(Q)
        calls: list[tuple[Any, str]] = [
            (lambda: cache.append(K[:1], V), "key"),
            (lambda: cache.append(K[0], V), "key"),
            (lambda: cache.append(K, V[:, 1:]), "value"),
            (lambda: cache.append(K.astype("f8"), V), "key"),
            (lambda: cache.append(K, "value"), "value"),
            (lambda: cache.append_own(3, K[:, :2], V[:, :2]), "key"),
            (lambda: cache.append_own(-1, K, V), "count"),
            (lambda: cache.own_rows(2**63), "count"),
            (lambda: cache.own_rows(2**64), "count"),
            (lambda: cache.truncate(N + 1), "length"),
            (lambda: cache.truncate(-1), "length"),
            (lambda: cache.truncate(True), "length"),
            (lambda: cache.predicted_bytes(-1), "queries"),
            (lambda: cache.attend(K), "query"),
            (lambda: cache.attend(np.concatenate([Q, Q], 1)), "query"),
            (lambda: cache.attend(Q, out=np.empty((2, N, 4, 7), "f4")), "out"),
            (lambda: cache.attend(Q, lse=np.empty((2, 4, N), "f8")), "lse"),
            (lambda: cache.attend(Q, softmax_aux=np.ones(2, "f4")), "softmax_aux"),
        ]
        for call, name in calls:
            with pytest.raises(annulus.InvalidArgument, match=rf"^{name}\b"):
                call()
        assert len(cache) == N and (cache.attend(Q).out == want.out).all()
    with pytest.raises(RuntimeError, match="the cache is closed"):
        cache.append(K, V)


MACHINE: dict[str, Any] = {
    "version": 1,
    "ranks_per_node": 2,
    "inside_node": {"latency": 1e-6, "bandwidth": 1e11},
    "between_nodes": {"latency": 1e-6, "bandwidth": 1e7},
    "node_bandwidth": 2e7,
    "rates": [{"dtype": "f32", "head_dim": 8, "forward": 1e13, "backward": 1e13}],
    "memory": 2**30,
}


def test_a_machine_chooses_the_strategy(tmp_path: Path) -> None:
    lengths: dict[str, Any] = {"batch": 1, "q_len": 64, "q_heads": 4, "head_dim": 8, "ranks": 4}
    lengths["kv_heads"] = 1
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE))
    # the ranks of a node divide the keys, because the network between nodes is slow
    for machine in (MACHINE, file, str(file)):
        with annulus.Attention().plan(**lengths, strategy="auto", machine=machine) as plan:
            assert plan.strategy == "grid:2x2"
    with annulus.Attention().plan(**lengths, strategy="auto") as plan:
        assert plan.strategy != "grid:2x2"
    q = random(1, 64, 4, 8)
    got = annulus.ring_attention(q, q, q, ranks=4, strategy="auto", machine=MACHINE)
    assert abs(got - annulus.flash_attention(q, q, q)).max() < 1e-5

    # as text, for operators of torch and JAX
    text = _options.spelled(Call(annulus.Attention(), strategy="auto", machine=MACHINE))
    assert _options.read(text, None).machine == MACHINE

    def refused(machine: Any, kind: type[Exception], text: str, **changed: Any) -> None:
        with pytest.raises(kind, match=text):
            annulus.Attention().plan(**{**lengths, "strategy": "auto", **changed}, machine=machine)

    missing = {name: value for name, value in MACHINE.items() if name != "memory"}
    refused(missing, ValueError, "^machine: got is not a machine: .*missing field `memory`")
    refused({**MACHINE, "memory": 0}, ValueError, "^machine: memory: got 0, want at least 1")
    refused({**MACHINE, "version": 2}, ValueError, "^machine: version: got 2, want 1")
    refused({**MACHINE, "name": "x"}, ValueError, "unknown field `name`")
    refused({**MACHINE, "memory": np.int64(3)}, ValueError, "^machine: got .*int64")
    refused(tmp_path / "none.json", annulus.Error, "none.json: ")
    refused(MACHINE, ValueError, "^machine: got ", strategy="ring")
    refused(MACHINE, ValueError, "^machine: got no rate of f64", dtype="float64")
