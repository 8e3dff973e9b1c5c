"""Statistics of the scores against their definition, and QK-clip over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

torch = pytest.importorskip("torch")
import annulus_attention.torch  # noqa: E402

SHAPES = {"query": (2, 37, 4, 8), "key": (2, 41, 2, 8), "value": (2, 41, 2, 5)}


def tensors() -> dict[str, Any]:
    shapes = {**SHAPES, "bias": (1, 4, 37, 41), "softmax_aux": (4, 2)}
    named = enumerate(shapes.items())
    return {name: random(*shape, seed=seed, dtype="f8") for seed, (name, shape) in named}


def defined(given: dict[str, Any], *, cap: float, before: bool) -> tuple[Any, Any]:
    """The statistics by row and by head, from the definition in float64."""
    key = np.repeat(given["key"], 2, axis=2)
    product = np.einsum("bihd,bjhd->bhij", given["query"], key) / np.sqrt(8)
    bias = given["bias"]
    score = cap * np.tanh((product + bias * before) / cap) + bias * (not before)
    i, j = np.arange(37)[:, None], np.arange(41)[None]
    visible = (j <= i) & (i % 5 != 0)  # some queries attend to no key
    largest = [np.where(visible, x, -np.inf).max(-1) for x in (product, score)]
    sinks = np.broadcast_to(given["softmax_aux"][None, :, None], (2, 4, 37, 2))
    weights = np.exp(np.concatenate([np.where(visible, score, -np.inf), sinks], -1))
    p = weights / weights.sum(-1, keepdims=True)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    rows = np.stack([*largest, entropy], -1)
    counted = rows[:, :, np.arange(37) % 5 != 0]
    heads = np.stack([counted.max((0, 2)), counted.mean((0, 2))], -1)
    return rows, heads


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_statistics_equal_their_definition(ranks: int, before: bool) -> None:
    given = tensors()
    mask = annulus.masks.function("no fifth", lambda i, j: i % 5 != 0)
    options = {"causal": True, "mask_builder": mask, "logits_soft_cap": 2.5}
    order = "before_soft_cap" if before else "after_soft_cap"
    out, statistics = annulus.ring_attention(
        **given, **options, bias_order=order, ranks=ranks, return_statistics=True
    )
    plain = annulus.ring_attention(**given, **options, bias_order=order, ranks=ranks)
    assert (out == plain).all()
    rows, heads = defined(given, cap=2.5, before=before)
    assert np.allclose(statistics.rows, rows, atol=1e-12, rtol=0)
    assert np.allclose(statistics.heads, heads, atol=1e-12, rtol=0)
    assert (statistics.max_score == statistics.rows[..., 1]).all()
    assert (statistics.entropy[:, :, 0] > 0).all()  # of the sinks


def attended(x: Any, weights: Any, ranks: int) -> Any:
    """Causal attention of four heads, and its statistics."""
    q, k, v = (torch.einsum("bnc,chd->bnhd", x, weight) for weight in weights)
    return annulus.ring_attention(
        q, k, v, causal=True, ranks=ranks, reproducible=True, return_statistics=True
    )


def test_qk_clip_bounds_the_next_scores_on_any_number_of_ranks() -> None:
    tau = 4.0
    results = []
    for ranks in (1, 2, 3):
        torch.manual_seed(0)
        x = torch.randn(2, 600, 16)
        weights = [(torch.randn(16, 4, 8) * (0.2 + 0.2 * h)).requires_grad_() for h in (2, 2, 0)]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        out, _ = attended(x, weights, ranks)
        out.square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            _, before = attended(x, weights, ranks)
            largest = before.head_max_product
            clip = (tau / largest.clamp(min=tau)).sqrt()
            assert (clip < 1).any()
            for weight in weights[:2]:
                weight *= clip[:, None]
            _, after = attended(x, weights, ranks)
        assert (after.head_max_product <= tau * (1 + 1e-5)).all()
        kept = clip == 1
        assert (after.head_max_product[kept] == largest[kept]).all()
        results.append([*(weight.detach() for weight in weights), after.rows, after.heads])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_compiled_calls_return_statistics_and_gradients() -> None:
    q, k, v = (torch.randn(1, 70, 2, 8, requires_grad=True) for _ in range(3))

    def call(q: Any, k: Any, v: Any) -> Any:
        out, lse, statistics = annulus.torch.flash_attention(
            q, k, v, causal=True, return_lse=True, return_statistics=True
        )
        return out, statistics.rows, statistics.heads, lse

    want = call(q, k, v)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert all(map(torch.equal, want, got))
    assert not want[1].requires_grad and not want[2].requires_grad
    plain = annulus.torch.flash_attention(q, k, v, causal=True)
    gradients = [torch.autograd.grad(out.sum(), (q, k, v)) for out in (want[0], got[0], plain)]
    assert all(map(torch.equal, gradients[0], gradients[1]))
    assert all(map(torch.equal, gradients[0], gradients[2]))


def test_jax_returns_statistics_and_gradients() -> None:
    jax = pytest.importorskip("jax")
    pytest.importorskip("annulus_attention.jax")
    q, k, v = (random(1, 70, 2, 8, seed=seed) for seed in range(3))
    want = annulus.flash_attention(q, k, v, causal=True, return_statistics=True)

    @jax.jit
    def call(q: Any, k: Any, v: Any) -> Any:
        out, statistics = annulus.flash_attention(q, k, v, causal=True, return_statistics=True)
        return out, statistics.rows, statistics.heads

    out, rows, heads = call(q, k, v)
    assert (np.asarray(out) == want[0]).all()
    assert (np.asarray(rows) == want[1].rows).all() and (np.asarray(heads) == want[1].heads).all()
    gradient = jax.grad(lambda q: call(q, k, v)[0].sum())(q)
    plain = jax.grad(lambda q: annulus.flash_attention(q, k, v, causal=True).sum())(q)
    assert (gradient == plain).all()


@needs_mpi
def test_the_example_clips_alike_on_every_number_of_ranks() -> None:
    said = [launch(ranks, "../examples/qk_clip.py").splitlines() for ranks in (1, 2, 3)]
    steps = [[line.split() for line in lines] for lines in said]
    numbers = [[[float(x) for x in line[3::2]] for line in lines] for lines in steps]
    assert len(numbers[0]) == 5
    for other in numbers[1:]:
        assert np.allclose(numbers[0], other, atol=5e-3, rtol=0), said
    assert any(largest > 3.0 for _, largest, _ in numbers[0]), said
    assert all(clipped <= 3.001 for *_, clipped in numbers[0]), said
