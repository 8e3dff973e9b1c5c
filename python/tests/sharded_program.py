"""Attention of JAX arrays that are sharded over 4 devices: the values and gradients of whole
arrays.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python tests/sharded_program.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import random
from jax.sharding import NamedSharding, PartitionSpec

import annulus.jax

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


def main() -> None:
    for flag in (False, True):
        sharded_by_the_compiler(flag)
        sharded_by_the_program(flag)
    one = lambda *args: attend(*(x[None] for x in args))[0]  # noqa: E731
    check(jax.pmap(one)(*OPERANDS), attend(*OPERANDS))
    check(gradients(jax.pmap(one), *OPERANDS), gradients(attend, *OPERANDS))


if __name__ == "__main__":
    main()
