"""Attention with gradients for JAX, also under ``jax.jit``.

``annulus.flash_attention`` and ``annulus.ring_attention`` route traced arrays here. The pass runs
on the host as a pure callback (``jax.pure_callback``), and its gradient is a custom VJP. A jitted
call gives the bits of an eager one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _arrays, _calls
from ._calls import Call, Shapes, Tensors
from ._errors import unsupported
from ._results import Forward

__all__ = ["flash_attention", "ring_attention"]


def flash_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.flash_attention``, which defines the parameters, on JAX arrays.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.flash_attention``.
    """
    tensors = (jnp.asarray(query), jnp.asarray(key), jnp.asarray(value))
    return _calls.flash_attention(*tensors, *args, **options)


def ring_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.ring_attention``, which defines the parameters, on JAX arrays.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.ring_attention``.
    """
    tensors = (jnp.asarray(query), jnp.asarray(key), jnp.asarray(value))
    return _calls.ring_attention(*tensors, *args, **options)


def attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> tuple[Any, ...]:
    """Computes a call on traced arrays: out and lse."""
    if call.comm is not None:
        raise unsupported("comm", "in a traced JAX call, whose order is the compiler's; use Plan")
    arrays = tuple(None if array is None else jnp.asarray(array) for array in tensors)
    # shapes and types are refused here, where the error reaches the caller as it is
    Shapes.of(*arrays)
    given = {name: array for name, array in batch.items() if array is not None}
    results: tuple[Any, ...] = _attend(call, arrays, given)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> Any:
    return _forward(call, tensors, batch)[:2]


def _forward(call: Call, tensors: Tensors, batch: dict[str, Any]) -> Any:
    """Returns out and lse, and of an unnormalised output max, sum and ties."""
    query, value = tensors[0], tensors[2]
    length, (rows, q_len, q_heads, _) = value.shape[3], query.shape
    acc = _arrays.accumulator(query.dtype.name)
    statistics = jax.ShapeDtypeStruct((rows, q_heads, q_len), acc)
    count = 1 if call.attention.normalize_output else 4
    out = jax.ShapeDtypeStruct((rows, q_len, q_heads, length), query.dtype)

    def host(tensors: Tensors, batch: dict[str, Any]) -> Any:
        tensors, batch = _on_host(tensors), _on_host(batch)
        with _calls.plan_of(call, tensors, batch, forward_only=True) as plan:
            forward = _calls.pass_forward(plan, tensors)
        all = (forward.out, forward.lse, forward.max, forward.sum, forward.ties)
        return all[: 1 + count]

    wanted = (out, *[statistics] * count)
    return jax.pure_callback(host, wanted, tensors, batch, vmap_method="sequential")


def _attend_forward(call: Call, tensors: Tensors, batch: dict[str, Any]) -> Any:
    forward = _forward(call, tensors, batch)
    return forward[:2], (tensors, batch, forward)


def _attend_backward(call: Call, saved: Any, cotangents: Any) -> Any:
    tensors, batch, forward = saved
    given = tuple(array for array in tensors if array is not None)

    def host(tensors: Tensors, batch: dict[str, Any], forward: Any, cotangents: Any) -> Any:
        tensors, batch = _on_host(tensors), _on_host(batch)
        query, key, value, bias, softmax_aux = tensors
        dout, dlse = _on_host(cotangents)
        result = Forward(*_on_host(forward))
        with _calls.plan_of(call, tensors, batch, forward_only=False) as plan:
            gradients = plan.backward(
                query, key, value, result, dout, dlse, bias=bias, softmax_aux=softmax_aux
            )
        all = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias, gradients.dsoftmax_aux)
        return tuple(gradient for gradient in all if gradient is not None)

    wanted = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given)
    results = iter(
        jax.pure_callback(
            host, wanted, tensors, batch, forward, cotangents, vmap_method="sequential"
        )
    )
    # a batch has no gradient
    return tuple(None if array is None else next(results) for array in tensors), None


_attend.defvjp(_attend_forward, _attend_backward)


def _on_host(arrays: Any) -> Any:
    """Returns a tree of arrays as NumPy arrays."""
    return jax.tree.map(np.asarray, arrays)
