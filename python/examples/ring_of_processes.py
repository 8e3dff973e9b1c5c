"""Attention over the ranks of mpi4py: each process holds its own rows, and nothing else.

mpirun -n 2 python python/examples/ring_of_processes.py
"""

import numpy as np
from mpi4py import MPI

import annulus_attention as annulus

comm = MPI.COMM_WORLD
attention = annulus.Attention(causal=True, sliding_window=(255, 0))
with attention.plan(batch=1, q_len=2048, q_heads=4, head_dim=32, comm=comm) as plan:
    # the layout deals the rows; an application would load these ones
    rows = plan.q_rows
    x = np.sin(0.3 * (rows[:, None, None] * 31 + np.arange(4 * 32).reshape(4, 32)))
    x = x[None].astype(np.float32)

    forward = plan.forward(x, x, x)
    gradients = plan.backward(x, x, x, forward, dout=forward.out)
    report = forward.reports[0]

loss = comm.allreduce(0.5 * float((forward.out.astype("f8") ** 2).sum()))
norm = comm.allreduce(float((gradients.dq**2).sum())) ** 0.5
if comm.rank == 0:
    print(f"loss {loss:.6g}, |dq| {norm:.4g} on {comm.size} ranks")
    print(f"rank 0 sent {report.bytes_sent} bytes forward")
