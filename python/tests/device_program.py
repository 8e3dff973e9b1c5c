"""One rank of an MPI program, with its rows in the memory of a GPU of its own.

mpirun -n 2 python tests/device_program.py
"""

from __future__ import annotations

from typing import Any

import cuda_driver
import numpy as np
from helpers import run_rank
from mpi4py import MPI

import annulus

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
DIMS: dict[str, int] = dict(batch=1, q_len=90, q_heads=4, kv_heads=2, head_dim=16)


def near(gpu: Any, got: Any, want: Any) -> None:
    np.testing.assert_allclose(gpu.download(got), want, rtol=1e-3, atol=1e-4)


def main() -> None:
    gpu = cuda_driver.Gpu(RANK)
    on_gpu: dict[str, Any] = dict(backend="cuda", device=RANK, stream=gpu.stream)
    attention = annulus.Attention(causal=True)
    random = np.random.default_rng(5)
    whole = [random.standard_normal((1, 90, heads, 16)).astype("float32") for heads in (4, 2, 2, 4)]
    with annulus.Plan(attention, **DIMS, threads=1) as alone:
        want = alone.forward(*whole[:3])
        wanted = alone.backward(*whole[:3], want, whole[3])
    with annulus.Plan(attention, **DIMS, comm=WORLD, **on_gpu) as plan:
        sides = (plan.q_rows, plan.kv_rows, plan.kv_rows, plan.q_rows)
        own = [array[:, rows] for array, rows in zip(whole, sides, strict=True)]
        lent = [gpu.upload(array) for array in own]
        forward = plan.forward(*lent[:3])
        gradients = plan.backward(*lent[:3], forward, lent[3])
        near(gpu, forward.out, want.out[:, plan.q_rows])
        near(gpu, forward.lse, want.lse[:, :, plan.q_rows])
        for name, rows in (("dq", plan.q_rows), ("dk", plan.kv_rows), ("dv", plan.kv_rows)):
            near(gpu, getattr(gradients, name), getattr(wanted, name)[:, rows])
        if RANKS > 1:
            assert forward.reports[0].bytes_sent == forward.reports[0].bytes_predicted > 0
        # one rank passes an array in host memory: every rank gets an error, none waits for it
        try:
            plan.forward(own[0] if RANK == 0 else lent[0], *lent[1:3])
        except annulus.Error as error:
            want_start = "query: got an array in host memory" if RANK == 0 else "rank 0 refused"
            assert str(error).startswith(want_start), error
        else:
            raise AssertionError("an array in host memory was taken")
        plan.forward(*lent[:3])
    # one call, of which each rank passes its own rows in ascending order
    rows = np.array_split(np.arange(90), RANKS)[RANK]
    lent = [gpu.upload(array[:, rows]) for array in whole[:3]]
    out = annulus.ring_attention(*lent, causal=True, comm=WORLD, stream=gpu.stream)
    near(gpu, out, want.out[:, rows])


if __name__ == "__main__":
    run_rank(main, WORLD)
