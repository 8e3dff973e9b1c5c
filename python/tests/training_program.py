"""Trains a transformer of 2 layers (sliding window, grouped-query heads, packed documents) over the
ranks of mpi4py, and compares every loss with that of one process.

    mpirun -n 3 python tests/training_program.py
"""

from __future__ import annotations

from typing import Any

import torch
from helpers import run_rank
from mpi4py import MPI
from torch import nn

import annulus.torch

WORLD = MPI.COMM_WORLD
LENGTH, WIDTH, HEADS, KV_HEADS, DIM, STEPS, WORDS = 48, 32, 4, 2, 8, 50, 11


class Layer(nn.Module):
    """Attention with rotary positions, then a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Any, rows: Any, ids: Any, comm: Any) -> Any:
        y = self.norms[0](x)
        batch, length, _ = y.shape
        q = rotate(self.q(y).view(batch, length, HEADS, DIM), rows)
        k, v = self.kv(y).view(batch, length, KV_HEADS, 2 * DIM).split(DIM, -1)
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
    angles = rows[:, None] / 100.0 ** (torch.arange(DIM // 2) / (DIM // 2))
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def train(comm: Any) -> list[float]:
    """Returns the loss of every step, of the whole sequence."""
    torch.manual_seed(0)
    words = torch.randint(WORDS, (2, LENGTH + 1))
    documents = torch.tensor([[0] * 20 + [1] * 28, [0] * 33 + [1] * 15])
    model = nn.ModuleList([nn.Embedding(WORDS, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, WORDS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    rows = torch.arange(LENGTH * rank // ranks, LENGTH * (rank + 1) // ranks)
    losses = []
    for _ in range(STEPS):
        x = model[0](words[:, rows])
        for layer in model[1:3]:
            x = layer(x, rows, documents[:, rows], comm)
        # every rank has its part of the mean
        loss = nn.functional.cross_entropy(
            model[3](x).flatten(0, 1), words[:, rows + 1].flatten(), reduction="sum"
        ) / (2 * LENGTH)
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


def main() -> str:
    torch.set_num_threads(1)
    got, want = train(WORLD), train(None)
    apart = max(abs(a - b) for a, b in zip(got, want, strict=True))
    assert apart < 1e-4, apart
    assert want[-1] < 0.85 * want[0], want
    return f": losses apart by {apart:.1e}"


if __name__ == "__main__":
    run_rank(main, WORLD)
