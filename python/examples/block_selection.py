"""Causal attention in which each block of queries selects blocks of keys, over the ranks of MPI.

    python block_selection.py
    mpirun -n 3 python block_selection.py

As in NSA and MoBA, a block of queries scores the blocks of keys by their mean key, and its queries
attend to the best of them, to the first block and to their own, by group of query heads. Each rank
receives the selected blocks of other ranks and no other keys.
"""

import numpy as np
from mpi4py import MPI

import annulus_attention as annulus

LEN, BLOCK, BEST, HEADS, KV_HEADS, DIM = 1536, 64, 3, 8, 2, 32
comm = MPI.COMM_WORLD


def selected(q, means, first):
    """Returns the blocks of keys that each block of the queries ``q`` selects: indptr, indices."""
    blocks = q.reshape(-1, BLOCK, KV_HEADS, HEADS // KV_HEADS, DIM).mean((1, 3))
    scores = np.einsum("ngd,mgd->gnm", blocks, means)
    indptr, indices = [], []
    for of_group in scores:
        indptr.append([len(indices)])
        for number, row in enumerate(of_group, start=first):
            best = np.argsort(row[: number + 1])[-BEST:]
            indices.extend(sorted({0, number, *best.tolist()}))
            indptr[-1].append(len(indices))
    return [indptr], indices


def main():
    blocks = LEN // BLOCK
    own = range(blocks * comm.rank // comm.size, blocks * (comm.rank + 1) // comm.size)
    rows = slice(own.start * BLOCK, own.stop * BLOCK)
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, LEN, heads, DIM), np.float32)[:, rows]
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    means = comm.allgather(k[0].reshape(-1, BLOCK, KV_HEADS, DIM).mean(1))
    indptr, indices = selected(q[0], np.concatenate(means), own.start)
    lists = annulus.masks.key_blocks(indptr, indices, BLOCK, (q.shape[1], LEN))
    out = annulus.ring_attention(q, k, v, key_lists=lists, causal=True, comm=comm)
    total = comm.allreduce(float(np.square(out).sum()))
    pairs = comm.allreduce(int((lists[2] - lists[1]).sum()))
    if comm.rank == 0:
        share = pairs / (KV_HEADS * LEN * (LEN + 1) / 2)
        print(f"{total:.4f}, with {share:.2f} of the causal pairs listed")


if __name__ == "__main__":
    main()
