"""Backends by name: the numbers of the CPU, and refusals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import annulus

DIMS: dict[str, int] = dict(batch=1, q_len=96, q_heads=4, kv_heads=2, head_dim=16)


def plan(**options: Any) -> annulus.Plan:
    attention = annulus.Attention(causal=True, sliding_window=(40, 0))
    return annulus.Plan(attention, **DIMS, **options)


@pytest.fixture
def on_gpu() -> Iterator[annulus.Plan]:
    """A ring of three ranks on wgpu."""
    try:
        made = plan(ranks=3, backend="wgpu")
    except annulus.Unsupported as why:
        if "wgpu" in os.environ.get("ANNULUS_REQUIRE", "").split(","):
            raise
        pytest.skip(str(why))
    with made:
        yield made


def tensors() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    shapes = [(1, 96, heads, 16) for heads in (4, 2, 2, 4)]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def test_wgpu_gives_the_numbers_of_the_cpu(on_gpu: annulus.Plan) -> None:
    query, key, value, dout = tensors()
    with plan(ranks=1, threads=1) as cpu:
        want = cpu.forward(query, key, value)
        want_gradients = cpu.backward(query, key, value, want, dout)
    got = on_gpu.forward(query, key, value)
    gradients = on_gpu.backward(query, key, value, got, dout)
    assert on_gpu.numerics != cpu_numerics()
    for name in ("out", "lse"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5)
    for name in ("dq", "dk", "dv"):
        expected = getattr(want_gradients, name)
        np.testing.assert_allclose(getattr(gradients, name), expected, rtol=1e-3, atol=1e-4)


def cpu_numerics() -> str:
    with plan(threads=1) as cpu:
        return cpu.numerics


def test_one_call_takes_the_backend(on_gpu: annulus.Plan) -> None:
    query, key, value, _ = tensors()
    options = dict(causal=True, sliding_window=(40, 0))
    want = on_gpu.forward(query, key, value).out
    got = annulus.ring_attention(query, key, value, ranks=3, backend="wgpu", **options)
    np.testing.assert_array_equal(got, want)


def test_a_cache_takes_the_backend(on_gpu: annulus.Plan) -> None:
    query, key, value, _ = tensors()
    want = on_gpu.forward(query, key, value).out
    attention = annulus.Attention(causal=True, sliding_window=(40, 0))
    lengths = dict(batch=1, q_heads=4, kv_heads=2, head_dim=16)
    cache = annulus.Cache(attention, **lengths, page_rows=7, ranks=2, backend="wgpu")
    for rows in (slice(0, 90), slice(90, 91), slice(91, 96)):
        cache.append(key[:, rows], value[:, rows])
        got = cache.attend(query[:, rows]).out
        np.testing.assert_allclose(got, want[:, rows], rtol=1e-4, atol=1e-5)
    cache.close()
    reproducible = annulus.Attention(causal=True, reproducible=True)
    with pytest.raises(annulus.Unsupported, match="reproducible"):
        annulus.Cache(reproducible, **lengths, backend="wgpu")


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    assert annulus.BACKENDS[0] == "cpu"
    for name in ("wgpu", "cuda"):
        # a number that no machine has, or a build without it, or a machine without a driver
        with pytest.raises(annulus.Error, match=f"{name}|device"):
            plan(backend=name, device=99)
        with pytest.raises(annulus.Error, match=f"{name}|device"):
            annulus.Cache(
                annulus.Attention(), batch=1, q_heads=1, head_dim=8, backend=name, device=99
            )
