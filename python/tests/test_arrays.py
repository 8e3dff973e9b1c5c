"""Element types, strides, outputs of the caller's, and arrays of other kinds."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import naive, random

import annulus_attention as annulus
from annulus_attention import _arrays

Q, K, V = (1, 33, 4, 16), (1, 40, 2, 16), (1, 40, 2, 8)
VISIBLE = np.tri(33, 40, dtype=bool)


def tensors(dtype: Any = np.float32) -> tuple[Any, Any, Any]:
    return tuple(random(*shape, seed=seed).astype(dtype) for seed, shape in enumerate((Q, K, V)))


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("float64", 1e-12), ("float32", 2e-6), (ml_dtypes.bfloat16, 2e-2), ("float16", 2e-3)],
)
def test_element_types(dtype: Any, bound: float) -> None:
    q, k, v = tensors(dtype)
    out, lse = annulus.ring_attention(q, k, v, causal=True, ranks=2, return_lse=True)
    want, want_lse = naive(q, k, v, VISIBLE)
    assert out.dtype == np.dtype(dtype) and out.shape == (1, 33, 4, 8)
    assert lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert abs(out.astype("f8") - want).max() < bound
    assert abs(lse - want_lse).max() < min(bound, 1e-5)


def strided(kind: str, x: Any) -> Any:
    """The same numbers with other strides."""
    if kind == "heads first":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if kind == "every second":
        return np.repeat(x, 2, axis=1)[:, ::2]
    if kind == "reversed":
        return np.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    if kind == "slice of a projection":
        wide = np.zeros((*x.shape[:3], 3 * x.shape[3]), x.dtype)
        wide[..., x.shape[3] : 2 * x.shape[3]] = x
        return wide[..., x.shape[3] : 2 * x.shape[3]]
    if kind == "fortran":
        return np.asfortranarray(x)
    if kind == "big endian":
        return x.astype(x.dtype.newbyteorder(">"))
    if kind == "unaligned":
        packed = np.zeros(x.size, np.dtype([("pad", "u1"), ("x", x.dtype)]))
        packed["x"] = x.ravel()
        return packed["x"].reshape(x.shape)
    raise ValueError(kind)


STRIDES = ["heads first", "every second", "reversed", "slice of a projection", "fortran"]


@pytest.mark.parametrize("kind", [*STRIDES, "big endian", "unaligned"])
def test_strides_do_not_change_the_bits(kind: str) -> None:
    q, k, v = tensors()
    want = annulus.flash_attention(q, k, v, causal=True)
    got = annulus.flash_attention(*(strided(kind, x) for x in (q, k, v)), causal=True)
    assert (got == want).all()


@pytest.mark.parametrize("kind", STRIDES)
def test_strides_are_read_in_place(kind: str) -> None:
    x = strided(kind, tensors()[0])
    assert np.shares_memory(_arrays.tensor("query", x).array, x)


def test_a_broadcast_head_is_read_in_place() -> None:
    q, k, v = tensors()
    k, v = k[:, :, :1], v[:, :, :1]
    want = annulus.flash_attention(q, k, v)
    many = [np.broadcast_to(x, (1, 40, 4, x.shape[3])) for x in (k, v)]
    assert abs(annulus.flash_attention(q, *many) - want).max() < 1e-6


class DLPack:
    """An array that has DLPack and nothing else."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.x.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_dlpack_and_the_buffer_protocol() -> None:
    q, k, v = tensors()
    want = annulus.flash_attention(q, k, v)
    assert (annulus.flash_attention(DLPack(q), DLPack(k), DLPack(v)) == want).all()
    assert (annulus.flash_attention(memoryview(q), memoryview(k), v) == want).all()
    with pytest.raises(annulus.InvalidArgument, match="query: got 1 axes"):
        annulus.flash_attention(array.array("f", [1.0]), k, v)
    with pytest.raises(annulus.InvalidArgument, match="query: got a list"):
        annulus.flash_attention([1.0], k, v)


def test_memory_of_a_device_is_refused_by_name() -> None:
    class OnDevice(DLPack):
        def __dlpack_device__(self) -> Any:
            return (2, 0)

    q, k, v = tensors()
    with pytest.raises(annulus.Unsupported, match="^key is not supported: .* device"):
        annulus.flash_attention(q, OnDevice(k), v)


def test_more_elements_than_bytes_of_memory_are_refused() -> None:
    # NumPy makes no such array, but the extension module does not rely on it
    class Vast:
        one = np.ones(1, np.uint8)
        __array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (2**31, 2**31, 2, 1),
            "strides": (0, 0, 0, 0),
            "data": (one.ctypes.data, True),
        }

    with pytest.raises(annulus.InvalidArgument, match="mask: got shape .* fewer than 2.63 bytes"):
        annulus._annulus.Mask.dense(Vast())


def planned(**options: Any) -> annulus.Plan:
    return annulus.Attention(causal=True).plan(
        batch=1, q_len=33, kv_len=40, q_heads=4, kv_heads=2, head_dim=16, value_dim=8, **options
    )


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_outputs_of_the_caller(layout: str) -> None:
    q, k, v = tensors()
    with planned(ranks=2, layout=layout) as plan:
        want = plan.forward(q, k, v)
        out = np.full((1, 4, 33, 8), np.nan, np.float32).transpose(0, 2, 1, 3)
        lse = np.full((1, 4, 66), np.nan, np.float32)[:, :, ::-2]
        got = plan.forward(q, k, v, out=out, lse=lse)
        assert got.out is out and got.lse is lse
        assert (out == want.out).all() and (lse == want.lse).all()


def test_outputs_that_cannot_be_written_are_refused() -> None:
    q, k, v = tensors()
    good = np.zeros((1, 33, 4, 8), np.float32)
    read_only = good.copy()
    read_only.flags.writeable = False
    memory = np.empty(2 * good.size, np.float32)
    halves = memory[: good.size].reshape(good.shape), memory[8 : 8 + 132].reshape(1, 4, 33)
    with planned() as plan:
        for out, lse, message in [
            (read_only, None, "out: got an array that cannot be written"),
            (good[:, :, :, :4], None, "out: got float32"),
            (good.astype("f8"), None, "out: got float64"),
            (np.broadcast_to(np.float32(0), good.shape), None, "out: got an array that cannot"),
            (q[:, :, :, :8], None, "out: got memory that overlaps query"),
            (q[:, :, :, 8:], None, "out: got memory that overlaps query"),
            (*halves, "lse: got memory that overlaps out"),
        ]:
            with pytest.raises(annulus.InvalidArgument, match=message):
                plan.forward(q, k, v, out=out, lse=lse)
        shared = np.lib.stride_tricks.as_strided(good, good.shape, (0, 4, 4, 4))
        with pytest.raises(annulus.InvalidArgument, match="out: got elements that share memory"):
            plan.forward(q, k, v, out=shared)
        # the plan is still good
        assert plan.forward(q, k, v, out=good).out is good


def test_bias_and_sinks_of_other_types_have_gradients_of_theirs() -> None:
    q, k, v = tensors(ml_dtypes.bfloat16)
    bias = random(1, 1, 33, 40, dtype=np.float16)
    sinks = random(3, dtype=ml_dtypes.bfloat16)
    with planned(dtype="bfloat16", bias_shape=bias.shape, softmax_aux_shape=(3,)) as plan:
        forward = plan.forward(q, k, v, bias=bias, softmax_aux=sinks)
        gradients = plan.backward(
            q, k, v, forward, np.ones_like(forward.out), bias=bias, softmax_aux=sinks
        )
        wide = {"bias": bias.astype("f4"), "softmax_aux": sinks.astype("f4")}
        exact = plan.backward(q, k, v, forward, np.ones_like(forward.out), **wide)
    assert gradients.dbias.dtype == np.float16
    assert (gradients.dbias == exact.dbias.astype("f2")).all()
    assert gradients.dsoftmax_aux.dtype == sinks.dtype and gradients.dsoftmax_aux.shape == (3,)
    assert (gradients.dsoftmax_aux == exact.dsoftmax_aux.astype(sinks.dtype)).all()


def test_bfloat16_is_rounded_as_by_ml_dtypes() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = np.arange(2**16, dtype=np.uint32) << 16 | 0x8000
    with np.errstate(invalid="ignore"):
        x = np.concatenate([bits, ties, ties - 1, ties + 1]).view(np.float32)
        want = x.astype(ml_dtypes.bfloat16)
    given = _arrays.Tensor(x, "float32", "numpy")
    got = _arrays.converted(given, "bfloat16").view(ml_dtypes.bfloat16)
    assert (np.isnan(got) == np.isnan(want)).all()
    assert (got.view("u2") == want.view("u2"))[~np.isnan(want)].all()
    back = _arrays.converted(_arrays.Tensor(got.view("u2"), "bfloat16", "numpy"), "float32")
    assert (back == got.astype("f4"))[~np.isnan(want)].all()


def test_a_masked_array_is_refused() -> None:
    q, k, v = tensors()
    for name in ("query", "key", "value"):
        given = {"query": q, "key": k, "value": v}
        given[name] = np.ma.masked_less(given[name], 0)
        with pytest.raises(annulus.Unsupported, match=f"^{name} is not supported: a masked array"):
            annulus.flash_attention(**given)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero(q_len: int, kv_len: int) -> None:
    q, k = random(1, q_len, 2, 4), random(1, kv_len, 2, 4)
    out, lse = annulus.ring_attention(q, k, k, ranks=2, return_lse=True)
    assert out.shape == q.shape and (out == 0).all() and (lse == -np.inf).all()
