"""Neighbourhoods on grids against the rules of NATTEN, written here anew, and against NATTEN itself
where it is installed (its FlexAttention mask needs no GPU)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import annulus_attention as annulus
from annulus_attention import layouts, masks


def natten_keys(i: int, length: int, size: int, dilation: int, causal: bool) -> set[int]:
    """Keys of a query on one axis: the query's dilation group is a sequence of its own, in which
    the window is centred as near to the query as it fits, or ends at the query if it is causal."""
    group = range(i % dilation, length, dilation)
    place = i // dilation
    if causal:
        first, last = max(place - size + 1, 0), place
    else:
        left, right = size // 2, size // 2 + (size % 2 - 1)
        centre = min(max(place, left), len(group) - 1 - right)
        first, last = centre - left, centre + right
    return set(group[first : last + 1])


def natten_pairs(shape: Any, size: Any, dilation: Any, causal: Any) -> Any:
    """Visible pairs ``[points, points]``."""
    grid = list(itertools.product(*(range(length) for length in shape)))
    pairs = np.zeros((len(grid), len(grid)), bool)
    for i, query in enumerate(grid):
        axes = [
            natten_keys(*axis) for axis in zip(query, shape, size, dilation, causal, strict=True)
        ]
        pairs[i] = [all(j in keys for j, keys in zip(key, axes, strict=True)) for key in grid]
    return pairs


def attention(q: Any, k: Any, v: Any, visible: Any) -> Any:
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


CASES: list[tuple[Any, Any, Any, Any]] = [
    ((17,), (5,), (3,), (False,)),
    ((16,), (6,), (2,), (True,)),
    ((9, 11), (7, 7), (1, 1), (False, False)),
    ((9, 10), (6, 4), (1, 2), (False, False)),
    ((8, 9), (3, 4), (2, 2), (True, False)),
    ((6, 5, 7), (5, 3, 2), (1, 1, 3), (False, True, False)),
]


@pytest.mark.parametrize(("shape", "size", "dilation", "causal"), CASES)
def test_shifted_windows_are_those_of_natten(
    shape: Any, size: Any, dilation: Any, causal: Any
) -> None:
    visible = natten_pairs(shape, size, dilation, causal)
    mask = masks.neighborhood(shape, size, dilation=dilation, causal=causal)
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((1, len(visible), 2, 8)) for _ in range(3))
    want = attention(q, k, v, visible)
    np.testing.assert_allclose(
        annulus.flash_attention(q, k, v, mask_builder=mask), want, atol=1e-12
    )
    layout = layouts.boxes(shape, 3)
    out = annulus.ring_attention(q, k, v, mask_builder=mask, ranks=3, layout=layout)
    np.testing.assert_allclose(out, want, atol=1e-12)


@pytest.mark.parametrize(("shape", "size", "dilation", "causal"), CASES)
def test_the_rules_are_those_of_the_installed_natten(
    shape: Any, size: Any, dilation: Any, causal: Any
) -> None:
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("natten.backends.flex")

    heads = torch.from_numpy(np.random.default_rng(8).standard_normal((3, 1, *shape, 2, 16)))
    q, k, v = heads.to(torch.float32)
    want = flex.flex_fna_generic(
        q, k, v, kernel_size=size, dilation=dilation, is_causal=causal, torch_compile=False
    )
    flat = [x.reshape(1, -1, 2, 16).numpy() for x in (q, k, v)]
    mask = masks.neighborhood(shape, size, dilation=dilation, causal=causal)
    out = annulus.flash_attention(*flat, mask_builder=mask)
    np.testing.assert_allclose(out, want.reshape(out.shape).numpy(), atol=2e-6)


def test_clipped_and_periodic_windows() -> None:
    shape, points = (6, 7), 42
    at = np.array(list(np.ndindex(*shape)))
    away = at[None] - at[:, None]
    clipped = ((away >= -3) & (away <= [2, 1])).all(-1)
    circle = (away + [0, 3]) % [99, 7] - [0, 3]
    periodic = (abs(away[..., 0]) <= 1) & (abs(circle[..., 1]) <= 2)
    rng = np.random.default_rng(9)
    q, k, v = (rng.standard_normal((1, points, 1, 4)) for _ in range(3))
    for mask, visible in [
        (masks.neighborhood(shape, (6, (3, 1)), edge="clip"), clipped),
        (masks.neighborhood(shape, (3, 5), periodic=(False, True), edge="clip"), periodic),
    ]:
        out = annulus.flash_attention(q, k, v, mask_builder=mask)
        np.testing.assert_allclose(out, attention(q, k, v, visible), atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "options", "name"),
    [
        (((2, 2, 2, 2), 1), {}, "shape"),
        (((4, 0), 1), {}, "shape"),
        (((4, 4.5), 1), {}, "shape"),
        (((8, 8), 9), {}, "window"),
        (((8, 8), (3, 3, 3)), {}, "window"),
        (((8, 8), (3, (1, 2, 3))), {}, "window"),
        ((8, (2, 1)), {"causal": True}, "window"),
        ((8, 5), {"dilation": 2}, "window"),
        ((8, 3), {"dilation": 0}, "dilation"),
        ((8, 3), {"causal": 1}, "causal"),
        ((8, 3), {"causal": True, "periodic": True}, "periodic"),
        ((8, 3), {"edge": "wrap"}, "edge"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, options: Any, name: str) -> None:
    with pytest.raises(annulus.InvalidArgument, match=rf"^{name}: got"):
        masks.neighborhood(*arguments, **options)


def test_layouts() -> None:
    rows, _ = layouts.boxes((4, 6), 6)
    assert [list(range(s, s + n)) for s, _, n in rows[1]] == [[2, 3], [8, 9]]
    # a path 4 − 0 − 3 − 1 − 2
    indptr, indices = np.array([0, 2, 4, 5, 7, 8]), np.array([3, 4, 2, 3, 1, 0, 1, 0])
    order = [
        s + step * i for s, step, n in layouts.graph(indptr, indices, 1)[0][0] for i in range(n)
    ]
    assert order in ([4, 0, 3, 1, 2], [2, 1, 3, 0, 4])
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: layouts.boxes((0, 4), 2), "shape"),
        (lambda: layouts.boxes((4, 4), 0), "ranks"),
        (lambda: layouts.graph([0, 2], [0], 1), "indptr"),
        (lambda: layouts.graph([0, 1], [1], 1), "indices"),
        (lambda: layouts.graph([0, 1], [0.5], 1), "indices"),
    ]
    for wrong, name in calls:
        with pytest.raises(annulus.InvalidArgument, match=name):
            wrong()
