"""One rank of an MPI program: what ranks of torch agree on, and gradients over them, against one
process. And the training of a transformer of 2 layers (sliding window, grouped-query heads, packed
documents).

    mpirun -n 3 python tests/torch_ranks_program.py
    mpirun -n 3 python tests/torch_ranks_program.py training
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from helpers import random, run_rank
from mpi4py import MPI
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import annulus_attention as annulus
import annulus_attention.torch
from annulus_attention import _agreement

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
BATCH, HEADS, KV_HEADS, LENGTH, DIM = 2, 6, RANKS, 13, 4
sdpa = nn.functional.scaled_dot_product_attention


def tensor(*shape: int, seed: int = 0) -> Any:
    return torch.tensor(random(*shape, seed=seed, dtype="f8"), requires_grad=True)


def summed(gradients: Any) -> list[Any]:
    """Sums the gradients of parameters over the ranks, as a program does."""
    return [torch.from_numpy(WORLD.allreduce(gradient.numpy())) for gradient in gradients]


def compare(got: Any, want: Any, what: Any, bound: float = 1e-10) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and abs(one - other).max() < bound, (RANK, what)


def gradients_of(rows: Any, bias: Any, aux: Any, **options: Any) -> list[Any]:
    """Gradients of query, key, value, bias and sinks, of which a rank uses its rows."""
    given = [tensor(BATCH, LENGTH, heads, DIM, seed=heads) for heads in (HEADS, KV_HEADS)]
    given.append(tensor(BATCH, LENGTH, KV_HEADS, DIM, seed=20))
    of_rank = [each[:, rows] for each in given]
    given += [each for each in (bias, aux) if each is not None]
    if bias is not None and bias.shape[2] > 1:
        bias = bias[:, :, rows]
    out = annulus.torch.ring_attention(
        *of_rank, bias=bias, softmax_aux=aux, causal=True, threads=1, **options
    )
    weights = tensor(BATCH, LENGTH, HEADS, DIM, seed=9).detach()[:, rows]
    return list(torch.autograd.grad((out * weights).sum(), given))


def gradients() -> None:
    """The sum over ranks of the gradients of every tensor is the gradient of one process."""
    axes = itertools.product((1, BATCH), (1, HEADS), (1, LENGTH), (1, LENGTH))
    strategies = ("ring", "all-to-all", "pass-q")
    shard = annulus.Attention(causal=True).shard(LENGTH, comm=WORLD)
    for index, shape in enumerate([None, *axes]):
        bias = None if shape is None else tensor(*shape, seed=4)
        aux = (None, tensor(2, seed=5), tensor(HEADS, 2, seed=5))[index % 3]
        form = {
            "strategy": strategies[index % 2 + index % 5 % 2],
            # two passes have no bias with a query axis
            "fused_backward": index % 4 < 2 or (shape is not None and shape[2] > 1),
        }
        got = gradients_of(shard.q_rows, bias, aux, comm=WORLD, layout=shard.layout, **form)
        compare(summed(got), gradients_of(slice(None), bias, aux), (shape, form))


class Recomputed(torch.autograd.Function):
    """A function of a program that recomputes in its backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Any) -> Any:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = ctx.run(leaf)
        return None, torch.autograd.grad(out, leaf, dout)[0]


RECOMPUTED: dict[str, Any] = {
    "kept": lambda run, x: run(x),
    "non-reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "own function": Recomputed.apply,
}


def recomputation() -> None:
    """What a backward pass recomputes is sharded as its forward pass, also after the context."""
    whole = tensor(1, 2, LENGTH, DIM, seed=1)
    weights = tensor(1, 2, LENGTH, DIM, seed=2).detach()

    def run(x: Any, dropout: float) -> Any:
        for _ in range(2):
            x = x + sdpa(x * 2, x, x.sin(), is_causal=True, dropout_p=dropout)
        return x

    want = torch.autograd.grad((run(whole, 0.0) * weights).sum(), whole)
    for layout in ("contiguous", "zigzag", "striped"):
        shard = annulus.Attention(causal=True).shard(LENGTH, comm=WORLD, layout=layout)
        rows = shard.q_rows
        of_dropout = None
        for name, inside in itertools.product(RECOMPUTED, (True, False)):
            # of these only the function of the program keeps no state of the generator
            for dropout in (0.0,) if name == "own function" else (0.0, 0.5):
                torch.manual_seed(10 + RANK)
                whole.grad = None
                x = whole[:, :, rows]
                with annulus.torch.context_parallel(shard, WORLD, threads=1, deadline=60):
                    y = RECOMPUTED[name](lambda x, p=dropout: run(x, p), x)
                    loss = (y * weights[:, :, rows]).sum()
                    if inside:
                        loss.backward()
                if not inside:
                    loss.backward()
                got = summed([whole.grad])
                if dropout == 0:
                    compare(got, want, (name, layout, inside))
                else:
                    of_dropout = of_dropout or got
                    compare(got, of_dropout, (name, layout, inside, dropout))
        assert abs(of_dropout[0] - want[0]).max() > 0.01


def masks_and_types() -> None:
    """A mask that torch describes is about the whole sequence, and autocast casts."""
    whole = tensor(1, 2, LENGTH, DIM, seed=1).detach()
    want = sdpa(whole, whole, whole, is_causal=True)
    shard = annulus.Attention(causal=True).shard(LENGTH, comm=WORLD, layout="zigzag")
    x = whole[:, :, shard.q_rows]
    with annulus.torch.context_parallel(shard, WORLD, threads=1):
        for make in (causal_upper_left, causal_lower_right):
            out = sdpa(x, x, x, attn_mask=make(LENGTH, LENGTH))
            compare([out], [want[:, :, shard.q_rows]], make)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert sdpa(x.float(), x.float(), x.bfloat16()).dtype == torch.bfloat16
        # every pair is dropped
        assert not sdpa(x, x, x, dropout_p=1.0).any()


def fails(code: int, other: int, text: str, work: Any, rank: int = 1) -> None:
    """Asserts that a call fails at once, with a code on one rank and another one elsewhere."""
    began = time.monotonic()
    try:
        work()
    except annulus.Error as error:
        assert error.code == (code if RANK == rank else other), (RANK, error)
        assert text in str(error), (RANK, error)
    else:
        raise AssertionError(f"no error on rank {RANK}: {text}")
    assert time.monotonic() - began < 20, text


class Elsewhere(annulus.Error):
    """An error of the program."""

    def __init__(self) -> None:
        super().__init__("out of luck", 1)


def refusals() -> None:
    """What one rank refuses, or does not do, is an error on all, and the next model is right."""
    shard = annulus.Attention().shard(LENGTH, comm=WORLD)
    rows = shard.q_rows
    whole = tensor(1, 2, LENGTH, DIM).detach()
    x = whole[:, :, rows]
    want = sdpa(whole, whole, whole)[:, :, rows]
    is_odd = RANK == 1

    def context(work: Any, **options: Any) -> Any:
        def run() -> None:
            with annulus.torch.context_parallel(shard, WORLD, threads=1, **options):
                work()

        return run

    def right() -> None:
        compare([sdpa(x, x, x)], [want], "the next call")

    def caught(work: Any) -> None:
        with contextlib.suppress(annulus.Error):
            work()
        right()

    def raise_elsewhere() -> None:
        sdpa(x, x, x)
        if is_odd:
            raise Elsewhere()
        sdpa(x, x, x)

    def raise_at_the_end() -> None:
        sdpa(x, x, x)
        if is_odd:
            raise Elsewhere()

    def call_once_more() -> None:
        sdpa(x, x, x)
        if is_odd:
            sdpa(x, x, x)

    def other_library() -> None:
        sdpa(x, x, x)
        given = [x.transpose(1, 2).numpy() if is_odd else x.transpose(1, 2)] * 3
        annulus.ring_attention(*given, comm=WORLD)

    def lack_a_gradient() -> None:
        sdpa(x.clone().requires_grad_(is_odd), x, x)

    ours = annulus.torch.scaled_dot_product_attention
    rounded = x.float() if is_odd else x
    layer = annulus.torch.attention_forward
    for code, other, text, work in (
        (1, 4, "is_causal", lambda: ours(x, x, x, is_causal=1 if is_odd else False)),
        (1, 4, "attn_mask", lambda: sdpa(x, x, x, attn_mask=x if is_odd else None)),
        (1, 4, "key", lambda: sdpa(x, torch.cat([x, x], 2) if is_odd else x, x)),
        (1, 4, "dropout_p", lambda: sdpa(x, x, x, dropout_p=2.0 if is_odd else 0.5)),
        (2, 4, "odd", lambda: layer(None, x, x, x, odd=1 if is_odd else None)),
        (3, 3, "dropout_prob differs", lambda: sdpa(x, x, x, dropout_p=0.5 if is_odd else 0.0)),
        (3, 3, "query differs", lambda: sdpa(rounded, rounded, rounded)),
        (3, 3, "requires_grad differs", lack_a_gradient),
        (3, 3, "call differs", other_library),
        (1, 4, "out of luck", raise_elsewhere),
        (1, 4, "out of luck", raise_at_the_end),
        (4, 4, "", call_once_more),
    ):
        fails(code, other, text, context(work))
        # a program that catches the error goes on, in this context or in the next one
        if text and "luck" not in text:
            context(partial(caught, work))()
        context(right)()


def deadlines() -> None:
    """No rank waits longer than the deadline for one that does not come."""
    q = tensor(1, 2, 1, DIM).detach()
    want = annulus.torch.ring_attention(q, q, q, comm=WORLD, threads=1)
    calls = [
        lambda: annulus.torch.ring_attention(q, q, q, comm=WORLD, threads=1, deadline=1),
        lambda: annulus.ring_attention(*[q.numpy()] * 3, comm=WORLD, threads=1, deadline=1),
        lambda: annulus.Attention().plan(
            batch=1, q_len=8, q_heads=1, head_dim=4, comm=WORLD, deadline=1, threads=1
        ),
    ]
    for call in calls:
        if RANK == 1:
            WORLD.Barrier()
            # the others have ended their calls, and this one may not be taken for theirs
            fails(42, 42, "deadline", call)
        else:
            fails(42, 42, "rank 1 has not made this call within the deadline", call)
            WORLD.Barrier()
        fails(42, 42, "clear_plans", call)
        WORLD.Barrier()
        annulus.torch.clear_plans()
        assert torch.equal(annulus.torch.ring_attention(q, q, q, comm=WORLD, threads=1), want)
    # a context, whose other rank never ends it
    shard = annulus.Attention().shard(LENGTH, comm=WORLD)
    x = tensor(1, 2, len(shard.q_rows), DIM).detach()

    def work() -> None:
        with annulus.torch.context_parallel(shard, WORLD, threads=1, deadline=1):
            sdpa(x, x, x, dropout_p=0.1)
            if RANK == 1:
                WORLD.Barrier()

    fails(42, 42, "", work)
    if RANK != 1:
        WORLD.Barrier()
    WORLD.Barrier()
    annulus.torch.clear_plans()


def channels() -> None:
    """A communicator takes its channel with it."""
    part = WORLD.Dup()
    assert np.array_equal(_agreement.gathered(part, "ranks", lambda: RANK, None), range(RANKS))
    name = id(part)
    assert name in _agreement._channels
    part.Free()
    del part
    assert name not in _agreement._channels


ROWS, WIDTH, STEPS, WORDS = 48, 32, 50, 11
MODEL_HEADS, MODEL_KV_HEADS, MODEL_DIM = 4, 2, 8
"""Of the model that is trained."""


class Layer(nn.Module):
    """Attention with rotary positions, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, MODEL_HEADS * MODEL_DIM)
        self.kv = nn.Linear(WIDTH, 2 * MODEL_KV_HEADS * MODEL_DIM)
        self.out = nn.Linear(MODEL_HEADS * MODEL_DIM, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Any, rows: Any, ids: Any, comm: Any) -> Any:
        y = self.norms[0](x)
        batch, length, _ = y.shape
        q = rotate(self.q(y).view(batch, length, MODEL_HEADS, MODEL_DIM), rows)
        kv = self.kv(y).view(batch, length, MODEL_KV_HEADS, 2 * MODEL_DIM)
        k, v = kv.split(MODEL_DIM, -1)
        y = annulus.torch.ring_attention(
            q,
            rotate(k, rows),
            v,
            q_segment_ids=ids,
            causal=True,
            sliding_window=(15, 0),
            comm=comm,
            threads=1,
        )
        x = x + self.out(y.flatten(2))
        return x + self.mlp(self.norms[1](x))


def rotate(x: Any, rows: Any) -> Any:
    """Rotary position embedding."""
    angles = rows[:, None] / 100.0 ** (torch.arange(MODEL_DIM // 2) / (MODEL_DIM // 2))
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def train(comm: Any) -> list[float]:
    """Returns the loss of every step, of the whole sequence."""
    torch.manual_seed(0)
    words = torch.randint(WORDS, (2, ROWS + 1))
    documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 33 + [1] * 15])
    model = nn.ModuleList([nn.Embedding(WORDS, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, WORDS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    rows = torch.arange(ROWS * rank // ranks, ROWS * (rank + 1) // ranks)
    losses = []
    for _ in range(STEPS):
        x = model[0](words[:, rows])
        for layer in model[1:3]:
            x = layer(x, rows, documents[:, rows], comm)
        # every rank has its part of the mean
        loss = nn.functional.cross_entropy(
            model[3](x).flatten(0, 1), words[:, rows + 1].flatten(), reduction="sum"
        ) / (2 * ROWS)
        optimizer.zero_grad()
        loss.backward()
        total = loss.item()
        if comm is not None:
            for parameter in model.parameters():
                comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            total = comm.allreduce(total)
        optimizer.step()
        losses.append(total)
    return losses


def training() -> str:
    """Trains over the ranks, and compares every loss with that of one process."""
    torch.set_num_threads(1)
    got, want = train(WORLD), train(None)
    apart = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert apart < 1e-4, apart
    assert want[-1] < 0.85 * want[0], want
    return f": losses apart by {apart:.1e}"


def main() -> None:
    torch.set_num_threads(1)
    gradients()
    recomputation()
    masks_and_types()
    channels()
    if RANKS > 1:
        refusals()
        deadlines()


if __name__ == "__main__":
    run_rank(training if sys.argv[1:] == ["training"] else main, WORLD)
