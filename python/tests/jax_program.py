"""JAX arrays that are sharded over 4 devices: the values and gradients of whole arrays. And over
the ranks of mpi4py: gradients of parameters, and calls that one rank traces.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python tests/jax_program.py sharded
    mpirun -n 3 python tests/jax_program.py ranks
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random, run_rank
from jax.sharding import NamedSharding, PartitionSpec

import annulus_attention as annulus
import annulus_attention.jax

OPERANDS = tuple(jnp.asarray(random(4, 8, heads, 4, seed=heads)) for heads in (4, 2, 2))


def attend(q: Any, k: Any, v: Any) -> Any:
    return annulus.jax.flash_attention(q, k, v, causal=True, threads=1)


def gradients(function: Any, *operands: Any) -> Any:
    """Gradients of a sum of squares by q, k and v."""
    return jax.grad(lambda *args: (function(*args) ** 2).sum(), (0, 1, 2))(*operands)


def check(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def sharded_by_the_compiler(explicit: bool) -> None:
    """Arrays of a mesh are gathered, whether the compiler or the program shards them."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    want, of_want = attend(*OPERANDS), gradients(attend, *OPERANDS)
    for spec in (PartitionSpec("x", None, "y"), PartitionSpec(None, "x"), PartitionSpec()):
        with jax.set_mesh(mesh):
            operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x in OPERANDS]
            check(attend(*operands), want)
            check(jax.jit(attend)(*operands), want)
            of_operands = gradients(attend, *operands)
            check(of_operands, of_want)
            check(gradients(jax.jit(attend), *operands), of_want)
            if explicit:
                for a, b in zip(of_operands, operands, strict=True):
                    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def sharded_by_the_program(check_vma: bool) -> None:
    """Every device of ``shard_map`` computes its part; gradients of what is on all are sums."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    heads, rows, whole = PartitionSpec("x", None, "y"), PartitionSpec(None, "x"), PartitionSpec()
    full = lambda *args: annulus.jax.flash_attention(*args, threads=1)  # noqa: E731
    for function, specs in ((attend, (heads,) * 3), (full, (rows, whole, whole))):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma
        )
        check(jax.jit(mapped)(*OPERANDS), function(*OPERANDS))
        check(
            jax.jit(lambda *args, f=mapped: gradients(f, *args))(*OPERANDS),
            gradients(function, *OPERANDS),
        )
    mapped = jax.shard_map(
        lambda *args: gradients(attend, *args),
        mesh=mesh,
        in_specs=(heads,) * 3,
        out_specs=(heads,) * 3,
        check_vma=check_vma,
    )
    check(jax.jit(mapped)(*OPERANDS), gradients(attend, *OPERANDS))


def sharded() -> None:
    for flag in (False, True):
        sharded_by_the_compiler(flag)
        sharded_by_the_program(flag)
    one = lambda *args: attend(*(x[None] for x in args))[0]  # noqa: E731
    check(jax.pmap(one)(*OPERANDS), attend(*OPERANDS))
    check(gradients(jax.pmap(one), *OPERANDS), gradients(attend, *OPERANDS))


LENGTH = 13


def gradients_of_parameters(world: Any, sinks: tuple[int, ...], bias: tuple[int, ...]) -> None:
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
            **lengths, **shapes, threads=1, comm=world, local_gradients=local
        ) as plan:
            q, k = x[:, plan.q_rows], x[:, plan.kv_rows]
            forward = plan.forward(q, k, k, **parameters)
            got = plan.backward(q, k, k, forward, 2 * forward.out, **parameters)
        for name, expected in want.items():
            gradient = getattr(got, f"d{name}")
            assert isinstance(gradient, jax.Array) and gradient.shape == expected.shape
            parts = np.stack(world.allgather(np.asarray(gradient)))
            if local:
                parts = parts.sum(0, keepdims=True)
            assert abs(parts - np.asarray(expected)).max() < 1e-5, (name, local)


def traced_calls(world: Any) -> None:
    """A traced call is refused, on all ranks also if one rank only traces it."""
    edges = [LENGTH * rank // world.size for rank in range(world.size + 1)]
    q = jnp.asarray(random(1, LENGTH, 2, 8))[:, edges[world.rank] : edges[world.rank + 1]]
    attend = lambda q: annulus.jax.ring_attention(q, q, q, comm=world, threads=1)  # noqa: E731
    want = attend(q)
    for tracing in ({*range(world.size)}, {world.size - 1}):
        began = time.monotonic()
        try:
            (jax.jit(attend) if world.rank in tracing else attend)(q)
        except annulus.Error as error:
            assert error.code == (2 if world.rank in tracing else 4), error
            assert "comm is not supported: in a traced JAX call" in str(error), error
        else:
            raise AssertionError("a traced call over ranks")
        assert time.monotonic() - began < 10
        assert (attend(q) == want).all()


def over_ranks(world: Any) -> None:
    gradients_of_parameters(world, sinks=(3,), bias=(1, 4, 1, LENGTH))
    gradients_of_parameters(world, sinks=(4, 2), bias=(2, 1, 1, 1))
    traced_calls(world)


if __name__ == "__main__":
    if sys.argv[1:] == ["sharded"]:
        sharded()
    else:
        from mpi4py import MPI

        run_rank(lambda: over_ranks(MPI.COMM_WORLD), MPI.COMM_WORLD)
