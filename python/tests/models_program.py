"""One rank of an MPI program: models whose attention is sharded over mpi4py, against one process.

mpirun -n 2 python tests/models_program.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers import chosen_strategies, run_rank
from mpi4py import MPI
from torch import nn

import annulus_attention as annulus
import annulus_attention.torch
from annulus_attention import _plan_cache

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
LENGTH, WIDTH, HEADS, KV_HEADS, DIM, WORDS = 41, 32, 4, 2, 8, 50


class Layer(nn.Module):
    """Causal attention of torch, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x: Any, positions: Any, dropout: float) -> Any:
        batch, length, _ = x.shape
        q = rotate(self.q(x).view(batch, length, HEADS, DIM), positions)
        k, v = self.kv(x).view(batch, length, KV_HEADS, 2 * DIM).split(DIM, -1)
        y = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            rotate(k, positions).transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
            dropout_p=dropout,
        )
        return x + self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Any, positions: Any) -> Any:
    """Rotary position embedding."""
    angles = positions[:, None] / 100.0 ** (torch.arange(DIM // 2) / (DIM // 2))
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def shard(layout: Any) -> Any:
    """The rows of this rank."""
    if layout == "custom":
        rows = np.random.default_rng(0).permutation(LENGTH)
        parts = [part.tolist() for part in np.array_split(rows, RANKS)]
        layout = (parts, parts)
    return annulus.Attention(causal=True).shard(LENGTH, comm=WORLD, layout=layout)


def whole(parts: Any, rows: Any) -> Any:
    """Puts the rows of all ranks together, along the second axis."""
    result = torch.empty(parts.shape[0], LENGTH, *parts.shape[2:], dtype=parts.dtype)
    for own, part in WORLD.allgather((rows, parts.detach().numpy())):
        result[:, own] = torch.from_numpy(part)
    return result


def gradients(loss: Any, model: Any) -> list[Any]:
    """Gradients of all parameters, summed over the ranks."""
    own = torch.autograd.grad(loss, list(model.parameters()))
    return [torch.from_numpy(WORLD.allreduce(gradient.numpy())) for gradient in own]


def compare(got: Any, want: Any, bound: float = 2e-5) -> None:
    """Asserts that lists of tensors are equal, up to rounding."""
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        assert torch.isfinite(one).all() and abs(one - other).max() < bound, abs(one - other).max()


def rotary_model(layout: Any) -> None:
    """A model of torch: its outputs and gradients, sharded and not."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Embedding(WORDS, WIDTH), Layer(), Layer()])
    words = torch.randint(WORDS, (2, LENGTH))
    weights = torch.randn(2, LENGTH, WIDTH)
    own = shard(layout)

    def run(rows: Any, positions: Any) -> Any:
        x = model[0](words[:, rows])
        for layer in model[1:]:
            x = layer(x, positions, 0.0)
        return x, (x * weights[:, rows]).sum()

    with annulus.torch.context_parallel(own, WORLD, threads=1):
        x, loss = run(own.q_rows, torch.from_numpy(own.q_positions))
    sharded = [whole(x, own.q_rows), *gradients(loss, model)]
    x, loss = run(np.arange(LENGTH), torch.arange(LENGTH))
    compare(sharded, [x, *torch.autograd.grad(loss, list(model.parameters()))])


def masks_and_dropout() -> None:
    """Masks of own queries × all keys, a bias with a gradient, dropout with one seed."""
    torch.manual_seed(1)
    q = torch.randn(2, HEADS, LENGTH, DIM)
    visible, bias = torch.rand(LENGTH, LENGTH) > 0.3, torch.randn(1, HEADS, LENGTH, LENGTH)
    attend = nn.functional.scaled_dot_product_attention
    own = shard("zigzag")
    rows = own.q_rows
    local = q[:, :, rows]
    with annulus.torch.context_parallel(own, WORLD, threads=1):
        by_pairs = attend(local, local, local, attn_mask=visible[rows])
        part = bias[:, :, rows].requires_grad_()
        by_bias = attend(local, local, local, attn_mask=part)
        (dbias,) = torch.autograd.grad(by_bias.sum(), part)
        torch.manual_seed(100 + RANK)
        dropped = attend(local, local, local, dropout_p=0.5)
    torch.manual_seed(100)
    want = annulus.torch.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    compare([dropped], [want[:, :, rows]])
    compare([by_pairs], [attend(q, q, q, attn_mask=visible)[:, :, rows]])
    full = bias.clone().requires_grad_()
    want = attend(q, q, q, attn_mask=full)
    compare(
        [by_bias, dbias], [want[:, :, rows], torch.autograd.grad(want.sum(), full)[0][:, :, rows]]
    )


def documents() -> None:
    """Packed documents, and the attention of nn.MultiheadAttention."""
    torch.manual_seed(2)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = torch.randn(2, LENGTH, WIDTH)
    ids = torch.tensor([[0] * 20 + [1] * 15 + [-1] * 6, [4] * 33 + [2] * 8])
    own = shard("striped")
    rows = own.q_rows
    part = x[:, rows]
    with annulus.torch.context_parallel(own, WORLD, segment_ids=ids[:, rows], threads=1):
        got, _ = module(part, part, part, need_weights=False)
    hidden = (ids[:, :, None] != ids[:, None]) | (ids < 0)[:, None]
    # a row of padding attends to nothing, of which the formula of torch makes a NaN
    hidden = hidden & (ids >= 0)[:, :, None]
    want, _ = module(x, x, x, attn_mask=hidden.repeat_interleave(HEADS, 0), need_weights=False)
    tokens = (ids >= 0)[:, rows]
    compare([got[tokens]], [want[:, rows][tokens]])


def strategy_of_documents() -> None:
    """The strategy is chosen for the documents of the shard, or for those that are given."""
    length = 12 * RANKS
    ids = torch.arange(length)[None] // 6
    x = torch.randn(1, RANKS, length, DIM, generator=torch.Generator().manual_seed(3))
    attend = nn.functional.scaled_dot_product_attention
    want = attend(x, x, x, attn_mask=ids[0][:, None] == ids[0])
    own = annulus.Attention().shard(
        length, comm=WORLD, layout="contiguous", q_segment_ids=ids.numpy()
    )
    rows = own.q_rows
    part = x[:, :, rows]
    one = {"cum_seqlens_q": [0, length]}
    # on two ranks the ring sends the fewest bytes anyway
    by_mask = "ring" if RANKS < 3 else f"heads:{RANKS}"
    for documents, strategy in ((None, "ring"), (one, by_mask)):
        options = {"strategy": "auto", "documents": documents, "threads": 1}
        annulus.torch.clear_plans()
        with (
            chosen_strategies() as strategies,
            annulus.torch.context_parallel(own, WORLD, segment_ids=ids[:, rows], **options),
        ):
            compare([attend(part, part, part)], [want[:, :, rows]])
        assert strategies == [strategy], strategies


def fails(kind: type[Exception], text: str, work: Any) -> None:
    """Asserts that a call fails on this rank."""
    try:
        work()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error: {text}")


def refusals() -> None:
    """Attention that would stay local, wrong shards and wrong positions are refused."""
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, own = torch.randn(1, LENGTH, WIDTH), shard("contiguous")
    q = torch.randn(1, HEADS, len(own.q_rows), DIM)
    attend = nn.functional.scaled_dot_product_attention
    layer = annulus.torch.attention_forward
    positions = torch.from_numpy(own.q_positions)[None]
    with annulus.torch.context_parallel(own, WORLD, threads=1):
        fails(annulus.Unsupported, "need_weights", lambda: module(x, x, x))
        fails(
            annulus.InvalidArgument,
            "position_ids",
            lambda: layer(None, q, q, q, position_ids=positions + 1),
        )
        layer(None, q, q, q, position_ids=positions)
        if RANKS > 1:
            longer = torch.cat([q, q[:, :, :1]], 2)
            fails(annulus.InvalidArgument, "key", lambda: attend(q, longer, longer))
            wrong = torch.ones(1, dtype=torch.bool).expand(q.shape[2], q.shape[2])
            fails(annulus.InvalidArgument, "attn_mask", lambda: attend(q, q, q, attn_mask=wrong))

    def without_attention() -> None:
        with annulus.torch.context_parallel(own, WORLD):
            torch.ones(3).softmax(0)

    fails(annulus.Unsupported, "no attention", without_attention)
    other = annulus.Attention().shard(LENGTH, ranks=RANKS + 1, rank=0)

    def with_another_shard() -> None:
        with annulus.torch.context_parallel(other, WORLD):
            pass

    fails(annulus.InvalidArgument, "shard", with_another_shard)


def plans() -> None:
    """Ranks agree on the plan that they reuse, and on the batch that it is adapted to."""
    # contiguous rows, as a call with comm expects them; ranks have unequal numbers
    total = 10 * RANKS + 1
    own = torch.randn(1, total * (RANK + 1) // RANKS - total * RANK // RANKS, 2, 8)
    cache = _plan_cache.cache_of(WORLD)
    annulus.torch.clear_plans()

    def attend(ids: Any = None, **options: Any) -> Any:
        return annulus.torch.ring_attention(
            own, own, own, q_segment_ids=ids, comm=WORLD, threads=1, **options
        )

    plain = attend()
    first = cache._made
    assert torch.equal(attend(), plain) and cache._made == first
    # one rank has lost its plan: all plan anew
    if RANK == 0:
        cache.clear()
    assert torch.equal(attend(), plain) and cache._made == first + 1
    # one rank's part of the batch changes
    ids = torch.zeros(1, own.shape[1], dtype=torch.int64)
    assert torch.equal(attend(ids), plain)
    ids = ids - 1 if RANK == RANKS - 1 else ids
    hidden = attend(ids)
    assert torch.equal(attend(), plain) and cache._made == first + 1
    if RANK == RANKS - 1:
        assert (hidden == 0).all()
    elif RANKS > 1:
        assert not torch.equal(hidden, plain)
    # an argument that one rank refuses ends no plan
    if RANKS > 1:
        wrong = "yes" if RANK == 1 else False
        fails(annulus.Error, "causal", lambda: attend(causal=wrong))
        short = torch.zeros(1, 3, dtype=torch.int64) if RANK == 1 else ids
        fails(annulus.Error, "q_segment_ids", lambda: attend(short))
    assert torch.equal(attend(), plain) and cache._made == first + 1
    # a communicator takes its plans with it
    part = WORLD.Dup()
    annulus.torch.ring_attention(own, own, own, comm=part, threads=1)
    assert id(part) in _plan_cache._of_communicators
    name = id(part)
    part.Free()
    del part
    assert name not in _plan_cache._of_communicators


def main() -> None:
    torch.set_num_threads(1)
    for layout in ("contiguous", "zigzag", "striped", None, "custom"):
        rotary_model(layout)
    masks_and_dropout()
    documents()
    strategy_of_documents()
    refusals()
    plans()


if __name__ == "__main__":
    run_rank(main, WORLD)
