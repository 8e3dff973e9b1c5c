"""A field on a grid over MPI ranks: each holds a box and receives its halo alone.

mpirun -n 4 python python/examples/field_halo.py
"""

import numpy as np
from mpi4py import MPI

import annulus_attention as annulus

comm, grid, window = MPI.COMM_WORLD, (48, 64), (7, 7)  # 3 points on every side
points, heads, dim = grid[0] * grid[1], 2, 16
mask = annulus.masks.neighborhood(grid, window, periodic=(False, True))  # a circle of longitude
attention = annulus.Attention(mask=mask)
layout = annulus.layouts.boxes(grid, comm.size)
plan = attention.plan(
    batch=1, q_len=points, q_heads=heads, head_dim=dim, dtype="float64", comm=comm, layout=layout
)

rows = np.asarray(plan.q_rows)  # of this rank's box, in patches; row = latitude · 64 + longitude
rng = np.random.default_rng(0)  # equal on all ranks: a program would load its rows only
q, k, v = (rng.standard_normal((1, points, heads, dim)) for _ in range(3))
forward = plan.forward(q[:, rows], k[:, rows], v[:, rows])
gradients = plan.backward(q[:, rows], k[:, rows], v[:, rows], forward, forward.out)

# the halo, counted: points that a point of the box attends to and that are not in it
latitude, longitude = np.divmod(rows, grid[1])
start = np.clip(latitude - 3, 0, grid[0] - 7)  # shifted back at the poles
away = np.arange(-3, 4)
box = {
    (y, x)
    for first, at in zip(start, longitude, strict=True)
    for y in first + away + 3
    for x in (at + away) % 64
}
halo = len(box) - len(rows)
received = comm.allreduce(forward.reports[0].bytes_sent) / (2 * heads * dim * 8)
alone = annulus.flash_attention(q, k, v, mask_builder=mask)
error = comm.allreduce(float(abs(forward.out - alone[:, rows]).max()), MPI.MAX)
total = comm.allreduce(halo)
if comm.rank == 0:
    print(
        f"{comm.size} boxes, {total} points of halos, {received:.0f} rows sent, error {error:.1e}"
    )
assert received == total and error < 1e-12 and gradients.dq.shape == (1, len(rows), heads, dim)
