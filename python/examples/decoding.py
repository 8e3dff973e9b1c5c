"""Decoding with a KV cache that is sharded over ranks: a token costs as many bytes after 4,000 rows
as after 500.

python python/examples/decoding.py
mpirun -n 2 python python/examples/decoding.py mpi
"""

import sys

import numpy as np

import annulus_attention as annulus

HEADS, KV_HEADS, DIM = 8, 2, 64
ring = {"ranks": 2}
if sys.argv[1:] == ["mpi"]:
    from mpi4py import MPI

    ring = {"comm": MPI.COMM_WORLD}


def project(first: int, end: int, heads: int, salt: int) -> np.ndarray:
    """Projections of some tokens, which every rank computes. Here they are made up."""
    rows = np.arange(first, end)[:, None, None] * 31 + salt
    x = np.sin(0.3 * (rows + np.arange(heads * DIM).reshape(heads, DIM)))
    return x[None].astype(np.float32)


attention = annulus.Attention(causal=True)
with annulus.Cache(
    attention, batch=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, **ring
) as cache:
    for end in (500, 501, 502, 4000, 4001, 4002):
        first = len(cache)
        cache.append(project(first, end, KV_HEADS, 2), project(first, end, KV_HEADS, 3))
        forward = cache.attend(project(first, end, HEADS, 1))
        if cache.rank == 0:
            sent = forward.reports[0].bytes_sent
            print(f"{end} rows: last out {forward.out[0, -1, 0, 0]:.4f}, rank 0 sent {sent} bytes")
