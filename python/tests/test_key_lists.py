"""Key lists of SciPy, torch and plain arrays, against the equal dense mask; their errors; the graph
transformer over 1, 2 and 3 processes. Neighbourhoods on grids against the rules of NATTEN, written
here anew, and against NATTEN itself where it is installed (its FlexAttention mask needs no GPU)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus
from annulus_attention import layouts, masks

scipy_sparse = pytest.importorskip("scipy.sparse")
torch = pytest.importorskip("torch")
pytest.importorskip("annulus_attention.torch")

ROWS, HEADS, DIM = 70, 4, 8


def graph(seed: int = 0, rows: int = ROWS, share: float = 0.1) -> object:
    return scipy_sparse.random_array(
        (rows, ROWS), density=share, format="csr", rng=np.random.default_rng(seed)
    ).sorted_indices()


def tensors() -> list[np.ndarray]:
    return [random(1, ROWS, HEADS, DIM, seed=seed) for seed in (1, 2, 3)]


def dense(csr: object) -> np.ndarray:
    return (csr.astype(bool).toarray() | False)[None, None]


@pytest.mark.parametrize("ranks", [1, 3])
def test_lists_of_every_library_are_the_equal_dense_mask(ranks: int) -> None:
    csr, (q, k, v) = graph(), tensors()
    want = annulus.flash_attention(q, k, v, attention_mask=dense(csr))
    as_torch = torch.sparse_csr_tensor(
        torch.from_numpy(csr.indptr),
        torch.from_numpy(csr.indices),
        torch.from_numpy(csr.data),
        csr.shape,
    )
    for key_lists in (csr, as_torch, (csr.indptr, csr.indices)):
        got = annulus.ring_attention(q, k, v, key_lists=key_lists, ranks=ranks)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    # stored zeros are visible, and by group of heads
    csr.data[:] = 0
    np.testing.assert_allclose(
        annulus.flash_attention(q, k, v, key_lists=csr), want, rtol=2e-5, atol=2e-6
    )
    other = graph(5)
    got = annulus.flash_attention(
        q, k, v, key_lists=scipy_sparse.vstack([csr, other], format="csr")
    )
    mask = np.repeat(np.concatenate([dense(graph()), dense(other)], axis=1), 2, axis=1)
    want = annulus.flash_attention(q, k, v, attention_mask=mask)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_values_are_added_and_have_a_gradient() -> None:
    csr, arrays = graph(7), tensors()
    q, k, v = (torch.from_numpy(array).double().requires_grad_() for array in arrays)
    values = torch.from_numpy(csr.data).double().requires_grad_()
    indptr, indices = torch.from_numpy(csr.indptr), torch.from_numpy(csr.indices)
    lists = torch.sparse_csr_tensor(indptr, indices, values, csr.shape)
    out = annulus.torch.flash_attention(q, k, v, key_lists=lists, list_bias=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v, values))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    bias = torch.full((ROWS, ROWS), -torch.inf, dtype=torch.float64)
    at = torch.repeat_interleave(torch.arange(ROWS), indptr.diff()), indices.long()
    bias = bias.index_put(at, values)
    some = torch.from_numpy(np.diff(csr.indptr) > 0)
    probs = torch.softmax((scores + bias)[:, :, some], -1)
    want_out = torch.zeros_like(out)
    want_out[:, some] = torch.einsum("bhqk,bkhd->bqhd", probs, v)
    want = torch.autograd.grad((want_out * weight).sum(), (q, k, v, values))
    torch.testing.assert_close(out, want_out)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


def test_ranges_and_blocks_are_their_keys() -> None:
    q, k, v = tensors()
    rng = np.random.default_rng(3)
    selected = rng.random((2, 7, 7)) < 0.4
    indptr = np.concatenate([[0], np.cumsum(selected.sum(-1).ravel())])
    indptr = np.stack([indptr[:8], indptr[7:]])[None]
    indices = np.nonzero(selected.reshape(14, 7))[1]
    mask = np.repeat(selected.repeat(10, 1).repeat(10, 2)[None], 2, axis=1)
    want = annulus.flash_attention(q, k, v, attention_mask=mask)
    ranges = annulus.masks.key_blocks(indptr, indices, 10, (ROWS, ROWS))
    for ranks in (1, 3):
        got = annulus.ring_attention(q, k, v, key_lists=ranges, ranks=ranks)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    # a BSR array of both groups; the last blocks of key_blocks may be short
    bsr = scipy_sparse.bsr_array(
        (np.zeros((len(indices), 10, 10)), indices, np.append(indptr[0, 0], indptr[0, 1, 1:])),
        shape=(2 * ROWS, ROWS),
    )
    as_torch = torch.sparse_bsr_tensor(
        torch.from_numpy(bsr.indptr), torch.from_numpy(bsr.indices), torch.ones(bsr.data.shape)
    )
    for blocks in (bsr, as_torch):
        got = annulus.flash_attention(q, k, v, key_lists=blocks)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    short = annulus.masks.key_blocks([0, 2, 3], [0, 1, 1], (40, 64), (ROWS, ROWS))
    visible = np.arange(ROWS)[:, None] < 40
    visible = visible | (np.arange(ROWS) >= 64)
    want = annulus.flash_attention(q, k, v, attention_mask=visible[None, None])
    np.testing.assert_allclose(
        annulus.flash_attention(q, k, v, key_lists=short), want, rtol=2e-5, atol=2e-6
    )
    for lists, text in [
        (([0, 1, *[1] * (ROWS - 1)], [5], [5]), "row 0, entry 0: keys 5..5"),
        (([0, 2, *[2] * (ROWS - 1)], [5, 6], [8, 9]), "row 0, entry 1: keys 6..9 after 5..8"),
        (annulus.masks.key_blocks([0, 1], [3], 70, (ROWS, ROWS)), "row 0, entry 0: key 210"),
        (annulus.masks.key_blocks([0, 2], [1, 0], (70, 10), (ROWS, ROWS)), "row 0, entry 1"),
    ]:
        with pytest.raises(ValueError, match=text) as error:
            annulus.flash_attention(q, k, v, key_lists=lists)
        assert error.value.argument == "key_lists"
    for arguments in [([0, 2, 1], [0, 1]), ([0, 1, 5], [0, 1]), ([0, 1], [0])]:
        with pytest.raises(ValueError, match="key_lists"):
            annulus.masks.key_blocks(*arguments, 40, (ROWS, ROWS))
    with pytest.raises(ValueError, match="list_bias"):
        annulus.flash_attention(q, k, v, key_lists=bsr, list_bias=True)


def test_the_reproducible_order_has_the_same_bits_on_every_number_of_ranks() -> None:
    rows = 700
    arrays = [random(1, rows, HEADS, DIM, seed=seed) for seed in (1, 2, 3)]
    csr = scipy_sparse.random_array(
        (rows, rows), density=0.02, format="csr", rng=np.random.default_rng(4)
    ).sorted_indices()
    attention = annulus.Attention(reproducible=True)
    lengths = {"q_len": rows, "kv_len": rows, "q_heads": HEADS, "kv_heads": HEADS, "head_dim": DIM}
    answers = []
    for ranks in (1, 2, 3):
        with annulus.Plan(attention, batch=1, dtype="float32", ranks=ranks, **lengths) as plan:
            plan.update(key_lists=csr)
            forward = plan.forward(*arrays)
            gradients = plan.backward(*arrays, forward, arrays[0])
            answers.append((forward.out, gradients.dq, gradients.dk, gradients.dv))
    for other in answers[1:]:
        for one, two in zip(answers[0], other, strict=True):
            assert np.array_equal(one, two)


def test_torch_harmonics_has_the_same_neighbourhoods_on_the_sphere() -> None:
    """The judge is another library: its lists, its quadrature weights, its CPU kernels."""
    harmonics = pytest.importorskip(
        "torch_harmonics", reason="NOT RUN: the package torch-harmonics is not installed"
    )
    shape, heads, dim = (12, 24), 2, 4
    module = harmonics.NeighborhoodAttentionS2(
        in_channels=heads * dim, in_shape=shape, out_shape=shape, num_heads=heads, bias=False
    ).float()
    points = shape[0] * shape[1]
    x = torch.from_numpy(random(1, heads * dim, *shape, seed=9)).requires_grad_()
    want = module(x)
    weight = torch.linspace(-1, 1, want.numel()).view_as(want)
    (want_gradient,) = torch.autograd.grad((want * weight).sum(), x)

    # column c of row h is at the longitude 0; others are rotations of it
    at, columns = module.psi_roff_idx.long(), module.psi_col_idx.long()
    lists = []
    for lat in range(shape[0]):
        near = columns[at[lat] : at[lat + 1]]
        for lon in range(shape[1]):
            keys = near // shape[1] * shape[1] + (near % shape[1] + lon) % shape[1]
            lists.append(keys.sort().values)
    indptr = torch.tensor([0, *(len(keys) for keys in lists)]).cumsum(0)
    indices = torch.cat(lists)
    log_weights = module.quad_weights.reshape(shape[0], -1)[:, :1].log().expand(shape).reshape(-1)

    def rows(channels: torch.Tensor) -> torch.Tensor:
        return channels.reshape(1, heads, dim, points).permute(0, 3, 1, 2).contiguous()

    def project(weights: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(tensor, weights)

    q, k, v = (
        rows(project(of, x)) for of in (module.q_weights, module.k_weights, module.v_weights)
    )
    graph = torch.sparse_csr_tensor(indptr, indices, log_weights[indices].float(), (points, points))
    out = annulus.torch.ring_attention(
        q, k, v, key_lists=graph, list_bias=True, ranks=3, softmax_scale=module.scale
    )
    got = out.permute(0, 2, 3, 1).reshape(1, heads * dim, *shape)
    got = project(module.proj_weights, got)
    (gradient,) = torch.autograd.grad((got * weight).sum(), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-4, atol=1e-5)


def test_bad_lists_are_refused_by_name() -> None:
    (q, k, v), csr = tensors(), graph()
    for lists, text in [
        (csr.tocoo(), "CSR"),
        (graph(rows=ROWS - 1), "69 rows"),
        (csr[:, :-1], "69 columns"),
        ((csr.indptr, csr.indices[::-1].copy()), "row 0, entry"),
        ((csr.indptr, np.where(csr.indices == csr.indices[3], ROWS, csr.indices)), "row"),
        ((csr.indptr, csr.indices - 99), "key -"),
        ((csr.indptr[:-1], csr.indices), "rows"),
    ]:
        with pytest.raises(ValueError, match=text) as error:
            annulus.flash_attention(q, k, v, key_lists=lists)
        assert error.value.argument == "key_lists"
    with pytest.raises(ValueError, match="list_bias"):
        annulus.flash_attention(q, k, v, key_lists=(csr.indptr, csr.indices), list_bias=True)
    with pytest.raises(NotImplementedError, match="key_lists"):
        annulus.ring_attention(q, k, v, key_lists=csr, ranks=2, strategy="heads:2")
    csr.data[5] = np.nan
    with pytest.raises(ValueError, match="entry") as error:
        annulus.flash_attention(q, k, v, key_lists=csr, list_bias=True)
    assert error.value.argument == "list_bias"


@needs_mpi
def test_a_graph_transformer_has_the_same_loss_on_every_number_of_ranks() -> None:
    losses = [
        np.array(
            [float(line) for line in launch(ranks, "../examples/graph_transformer.py").split()]
        )
        for ranks in (1, 2, 3)
    ]
    assert losses[0][-1] < losses[0][0]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=2e-6)


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
