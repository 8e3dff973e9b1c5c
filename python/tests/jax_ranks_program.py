"""JAX arrays over the ranks of mpi4py: gradients of parameters, and calls that one rank traces.

mpirun -n 3 python tests/jax_ranks_program.py
"""

from __future__ import annotations

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random
from mpi4py import MPI

import annulus.jax

WORLD = MPI.COMM_WORLD
RANK, RANKS = WORLD.rank, WORLD.size
LENGTH = 13


def gradients_of_parameters(sinks: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """Sinks, and a bias without an axis of queries, have the gradient of all ranks on each of
    them; with ``local_gradients`` the parts of the ranks, whose sum it is.
    """
    x = jnp.asarray(random(2, LENGTH, 4, 8))
    parameters = {
        "softmax_aux": jnp.asarray(random(*sinks, seed=1)),
        "bias": jnp.asarray(random(*bias, seed=2)),
    }

    def loss(parameters: Any) -> Any:
        return (annulus.jax.flash_attention(x, x, x, causal=True, **parameters) ** 2).sum()

    want = jax.grad(loss)(parameters)
    lengths: dict[str, Any] = {"batch": 2, "q_len": LENGTH, "q_heads": 4, "head_dim": 8}
    shapes = {f"{name}_shape": array.shape for name, array in parameters.items()}
    for local in (False, True):
        with annulus.Attention(causal=True).plan(
            **lengths, **shapes, threads=1, comm=WORLD, local_gradients=local
        ) as plan:
            q, k = x[:, plan.q_rows], x[:, plan.kv_rows]
            forward = plan.forward(q, k, k, **parameters)
            got = plan.backward(q, k, k, forward, 2 * forward.out, **parameters)
        for name, expected in want.items():
            gradient = getattr(got, f"d{name}")
            assert isinstance(gradient, jax.Array) and gradient.shape == expected.shape
            parts = np.stack(WORLD.allgather(np.asarray(gradient)))
            if local:
                parts = parts.sum(0, keepdims=True)
            assert abs(parts - np.asarray(expected)).max() < 1e-5, (name, local)


def traced_calls() -> None:
    """A traced call is refused, on all ranks also if one rank only traces it."""
    edges = [LENGTH * rank // RANKS for rank in range(RANKS + 1)]
    q = jnp.asarray(random(1, LENGTH, 2, 8))[:, edges[RANK] : edges[RANK + 1]]
    attend = lambda q: annulus.jax.ring_attention(q, q, q, comm=WORLD, threads=1)  # noqa: E731
    want = attend(q)
    for tracing in ({*range(RANKS)}, {RANKS - 1}):
        began = MPI.Wtime()
        try:
            (jax.jit(attend) if RANK in tracing else attend)(q)
        except annulus.Error as error:
            assert error.code == (2 if RANK in tracing else 4), error
            assert "comm is not supported: in a traced JAX call" in str(error), error
        else:
            raise AssertionError("a traced call over ranks")
        assert MPI.Wtime() - began < 10
        assert (attend(q) == want).all()


def main() -> None:
    gradients_of_parameters(sinks=(3,), bias=(1, 4, 1, LENGTH))
    gradients_of_parameters(sinks=(4, 2), bias=(2, 1, 1, 1))
    traced_calls()
    WORLD.Barrier()
    if RANK == 0:
        print(f"passed on {RANKS} ranks", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        WORLD.Abort(1)
