"""Derivatives of attention against finite differences in float64, of random configurations: torch's
``gradcheck``, also in forward mode, and ``gradgradcheck``, reverse over reverse and forward over
reverse, on rings of 1, 2 and 3 ranks of threads. Over MPI, against one process.

    python tests/second_derivatives.py [COUNT [FIRST [whole]]]
    mpirun -n 3 python tests/second_derivatives.py [COUNT [FIRST]]

Prints one line, and every configuration that fails. Its number draws it again. Jacobians are
compared along random vectors (``fast_mode``) or, with ``whole``, element by element.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import annulus_attention as annulus
import annulus_attention.torch
from annulus_attention import biases, masks

Draw = np.random.Generator


@dataclass
class Configuration:
    """Tensors of a call, its options, and the number of ranks that fits it."""

    tensors: dict[str, Any]
    options: dict[str, Any]
    ranks: int


def drawn(number: int, least: int = 3) -> Configuration:
    """Draws the configuration of a number, with at least ``least`` queries and keys."""
    draw = np.random.default_rng(number)
    chance = lambda probability: bool(draw.random() < probability)  # noqa: E731
    batch, kv_heads, group = (int(draw.integers(1, most + 1)) for most in (2, 2, 2))
    q_len, kv_len = (int(draw.integers(least, least + 4)) for _ in range(2))
    head_dim, value_dim = (int(draw.integers(1, 5)) for _ in range(2))
    heads = kv_heads * group
    tensors: dict[str, Any] = {
        "query": tensor(draw, batch, q_len, heads, head_dim),
        "key": tensor(draw, batch, kv_len, kv_heads, head_dim),
        "value": tensor(draw, batch, kv_len, kv_heads, value_dim),
    }
    options: dict[str, Any] = {"softmax_scale": float(draw.uniform(0.3, 1.0))}
    if chance(0.5):
        axes = (batch, heads, q_len, kv_len)
        tensors["bias"] = tensor(draw, *(axis if chance(0.6) else 1 for axis in axes))
        options["bias_order"] = ("after_soft_cap", "before_soft_cap")[int(draw.integers(2))]
    if chance(0.4):
        sinks = int(draw.integers(1, 3))
        shape = (heads, sinks) if chance(0.5) else (sinks,)
        tensors["softmax_aux"] = tensor(draw, *shape)
    if chance(0.4):
        options["logits_soft_cap"] = float(draw.uniform(0.8, 3.0))
    if chance(0.3):
        options.update(dropout_prob=0.3, dropout_seed=int(draw.integers(1 << 40)))
    if chance(0.15):
        slopes = [float(slope) for slope in draw.uniform(0.05, 0.5, heads)]
        options["bias_function"] = biases.alibi(slopes)
    options.update(visible(draw, batch, heads, q_len, kv_len))
    ranks = int(draw.integers(1, 4))
    if ranks > 1 and chance(0.5):
        options["route"] = ("relay_up", "relay_down", "direct")[int(draw.integers(3))]
    if ranks > 1 and chance(0.3):
        options["receive_ahead"] = 2
    if chance(0.2):
        tables = {"clipped:2,1": 4, "t5:4,3": 4, "t5-causal:4,3": 4, "grid:2x3": 15}
        options["bias_table"] = list(tables)[int(draw.integers(len(tables)))]
        shape = (heads if chance(0.5) else 1, tables[options["bias_table"]])
        tensors["bias"] = tensor(draw, *shape)
    if chance(0.3):
        groups = (1, kv_heads, heads)[int(draw.integers(3))]
        listed = draw.random((batch if chance(0.4) else 1, groups, q_len, kv_len)) < 0.6
        listed[0, 0, 0, 0] = True
        options["key_lists"] = lists(listed)
        options.pop("route", None)
        if chance(0.7):
            tensors["list_bias"] = tensor(draw, int(listed.sum()))
    bias = tensors.get("bias")
    has_rows = bias is not None and bias.ndim == 4 and bias.shape[2] > 1
    if not has_rows and "attention_mask" not in options and chance(0.3):
        options["fused_backward"] = False
    if ranks == 2 and heads % 2 == 0 and "key_lists" not in options and chance(0.4):
        options["strategy"] = "heads:2"
        options.pop("route", None)
    return Configuration(tensors, options, ranks)


def lists(listed: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Returns indptr and indices of the pairs that are listed, by batch row, group and query."""
    ends = np.cumsum(listed.sum(-1)).reshape(*listed.shape[:2], -1)
    starts = np.concatenate([[0], ends[..., -1].ravel()[:-1]]).reshape(*listed.shape[:2], 1)
    return np.concatenate([starts, ends], axis=-1), np.nonzero(listed)[-1]


def visible(draw: Draw, batch: int, heads: int, q_len: int, kv_len: int) -> dict[str, Any]:
    """Draws what hides pairs: a mask, and segment ids, packed sequences or a dense mask."""
    options: dict[str, Any] = {"alignment": ("top_left", "bottom_right")[int(draw.integers(2))]}
    kind = int(draw.integers(6))
    if kind == 1:
        options["causal"] = True
    elif kind == 2:
        options["sliding_window"] = tuple(int(side) for side in draw.integers(0, 4, 2))
        options["attention_sink_size"] = int(draw.integers(2))
    elif kind == 3:
        options["chunk_size"] = int(draw.integers(2, 5))
    elif kind == 4:
        options["prefix_len"] = int(draw.integers(0, 4))
    elif kind == 5:
        options["mask_builder"] = masks.local((1, 2)) | masks.causal()
    batched = int(draw.integers(5))
    if batched == 1:
        options["q_segment_ids"] = draw.integers(-1, 2, (batch, q_len))
        options["kv_segment_ids"] = draw.integers(0, 2, (batch, kv_len))
    elif batched == 2:
        shape = (batch, heads if draw.random() < 0.5 else 1, q_len, kv_len)
        options["attention_mask"] = draw.random(shape) < 0.7
    elif batched == 3 and kind != 4:
        options["cum_seqlens_q"] = np.array([0, 2, q_len])
        options["cum_seqlens_k"] = np.array([0, 1, kv_len])
    return options


def tensor(draw: Draw, *shape: int) -> Any:
    return torch.tensor(draw.standard_normal(shape), requires_grad=True)


def attend(configuration: Configuration, **options: Any) -> Any:
    """Returns out and lse as a function of the tensors. lse is 0 where it is −∞."""
    names = list(configuration.tensors)

    def function(*tensors: Any) -> tuple[Any, Any]:
        out, lse = annulus.torch.ring_attention(
            **dict(zip(names, tensors, strict=True)),
            **{**configuration.options, **options},
            threads=1,
            return_lse=True,
        )
        return out, torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))

    return function


def check(number: int, *, fast: bool) -> None:
    """Compares the derivatives of a configuration with finite differences."""
    configuration = drawn(number)
    function = attend(configuration, ranks=configuration.ranks)
    tensors = tuple(configuration.tensors.values())
    torch.manual_seed(number)
    options: dict[str, Any] = {"fast_mode": fast, "atol": 1e-5, "rtol": 1e-3}
    assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, **options)
    assert torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, **options)


def check_over_ranks(number: int, comm: Any) -> None:
    """Compares the derivatives over MPI with those of one process: of out and lse along a
    direction, and the gradients of their product with weights, and of the product of these
    gradients with the direction. A rank has its rows of every tensor.
    """
    configuration = drawn(number, least=2 * comm.size)
    q_len, kv_len = (configuration.tensors[name].shape[1] for name in ("query", "key"))
    shard = annulus.Attention().shard(q_len, kv_len=kv_len, comm=comm, layout="contiguous")
    q_rows, kv_rows = shard.q_rows, shard.kv_rows
    axes = {"query": (1, q_rows), "key": (1, kv_rows), "value": (1, kv_rows)}
    axes |= {"bias": (2, q_rows), "attention_mask": (2, q_rows)}
    axes |= {"q_segment_ids": (1, q_rows), "kv_segment_ids": (1, kv_rows)}

    def own(name: str, x: Any) -> Any:
        if name in ("key_lists", "list_bias"):
            indptr, indices = configuration.options["key_lists"]
            spans = np.stack([indptr[..., :-1], indptr[..., 1:]], axis=-1)[:, :, q_rows]
            entries = np.concatenate([np.arange(*span) for span in spans.reshape(-1, 2)])
            if name == "list_bias":
                return x[entries]
            listed = np.zeros((*spans.shape[:3], kv_len), dtype=bool)
            for at in np.ndindex(*spans.shape[:3]):
                listed[at][indices[slice(*spans[at])]] = True
            return lists(listed)
        axis, rows = axes.get(name, (0, None))
        # a table is whole on every rank
        whole = rows is None or x.ndim <= axis or x.shape[axis] == 1
        return x if whole else x[(slice(None),) * axis + (rows,)]

    def of_rank(*tensors: Any) -> tuple[Any, Any]:
        parts = [own(name, x) for name, x in zip(configuration.tensors, tensors, strict=True)]
        return attend(configuration, **options)(*parts)

    changed = {*axes, "key_lists"}
    options = {name: own(name, x) for name, x in configuration.options.items() if name in changed}
    options["comm"] = comm
    if comm.size != 2:
        options["strategy"] = "ring"
    draw = np.random.default_rng(number)
    tensors = list(configuration.tensors.values())
    direction = [tensor(draw, *x.shape).detach() for x in tensors]
    whole = attend(configuration, strategy="ring")
    weights = [tensor(draw, *x.shape) for x in whole(*tensors)]
    rows = ((slice(None), q_rows), (slice(None), slice(None), q_rows))
    tangents = [torch.func.jvp(f, tuple(tensors), tuple(direction)) for f in (of_rank, whole)]
    for got, want in zip(*tangents, strict=True):
        assert_close(got, [x[at] for x, at in zip(want, rows, strict=True)])

    def gradients(outputs: Any, weights: Any) -> list[Any]:
        product = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
        first = torch.autograd.grad(product, tensors, create_graph=True)
        product = sum((c * x).sum() for c, x in zip(direction, first, strict=True))
        second = torch.autograd.grad(product, [*tensors, *given])
        return [x.detach() for x in (*first, *second)]

    given = weights
    want = gradients(whole(*tensors), weights)
    got = gradients(of_rank(*tensors), [x[at] for x, at in zip(weights, rows, strict=True)])
    assert_close([torch.from_numpy(comm.allreduce(x.numpy())) for x in got], want)


def assert_close(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-10 * (1 + other.abs().max())


def main() -> int:
    is_whole = "whole" in sys.argv[1:]
    numbers = [int(text) for text in sys.argv[1:] if text != "whole"]
    count, first = numbers[0] if numbers else 200, numbers[1] if numbers[1:] else 0
    comm = None
    if "OMPI_COMM_WORLD_SIZE" in os.environ or "PMI_SIZE" in os.environ:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    begin, failed = time.monotonic(), 0
    for number in range(first, first + count):
        try:
            if comm is None:
                check(number, fast=not is_whole)
            else:
                check_over_ranks(number, comm)
        except Exception:
            failed += 1
            print(f"configuration {number}: {drawn(number).options}", file=sys.stderr)
            traceback.print_exc()
            if comm is not None:
                comm.Abort(1)
    if comm is None or comm.rank == 0:
        ranks = "1 to 3 ranks of threads" if comm is None else f"{comm.size} ranks of MPI"
        seconds = time.monotonic() - begin
        print(f"{count} configurations on {ranks}: {failed} failed, {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
