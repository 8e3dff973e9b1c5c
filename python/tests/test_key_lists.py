"""Key lists of SciPy, torch and plain arrays, against the equal dense mask; their errors; the graph
transformer over 1, 2 and 3 processes."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import random
from test_mpi import launch, needs_mpi

import annulus_attention as annulus

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
