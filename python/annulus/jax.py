"""Attention with gradients for JAX, also under ``jax.jit``.

``annulus.flash_attention`` and ``annulus.ring_attention`` route traced arrays here. XLA's CPU
runtime calls a pass (``jax.ffi``), which reads operands and writes results in XLA's buffers. Its
gradient is a custom VJP, whose backward pass has the plan of the forward pass. A jitted call gives
the bits of an eager one.
"""

from __future__ import annotations

import ctypes
import functools
import json
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _annulus, _arrays, _calls, _options, _plan_cache
from ._calls import BATCH, TENSORS, Call, Shapes, Tensors
from ._errors import unsupported
from ._plan import Plan
from ._plan_cache import plan_for
from ._results import Forward

__all__ = ["clear_plans", "flash_attention", "ring_attention"]

Array = np.ndarray[Any, Any]

_TARGET = "annulus_attend"

_PROCESS = secrets.token_hex(8)
"""A part of each call's text. A cache of compiled programs outlives the process, and masks and bias
functions do not: another process must not find a program by the text of this one.
"""

_kept: dict[str, Call] = {}
"""The calls of compiled programs, by the text of their options: the text names masks and bias
functions, and a program may run as long as the process.
"""

jax.ffi.register_ffi_target(
    _TARGET, jax.ffi.pycapsule(ctypes.c_void_p(_annulus.xla_handler())), platform="cpu"
)


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


def clear_plans() -> None:
    """Frees the plans that compiled programs keep for later calls."""
    _plan_cache.clear()


def attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> tuple[Any, ...]:
    """Computes a call on traced arrays: out and lse."""
    if call.comm is not None:
        raise unsupported("comm", "in a traced JAX call, whose order is the compiler's; use Plan")
    arrays = tuple(None if array is None else jnp.asarray(array) for array in tensors)
    # shapes and types are refused here, where the error reaches the caller as it is
    Shapes.of(*arrays)
    given = {name: jnp.asarray(array) for name, array in batch.items() if array is not None}
    results: tuple[Any, ...] = _attend(call, arrays, given)
    return results


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> Any:
    return _forward(call, tensors, batch, forward_only=True)[:2]


def _forward(call: Call, tensors: Tensors, batch: dict[str, Any], *, forward_only: bool) -> Any:
    """Returns out and lse, and of an unnormalised output max, sum and ties."""
    query, value = tensors[0], tensors[2]
    rows, q_len, q_heads, _ = query.shape
    statistics = jax.ShapeDtypeStruct((rows, q_heads, q_len), _arrays.accumulator(query.dtype.name))
    count = 1 if call.attention.normalize_output else 4
    out = jax.ShapeDtypeStruct((rows, q_len, q_heads, value.shape[3]), query.dtype)
    given = {**_named(tensors), **batch}
    return _run(call, given, [out, *[statistics] * count], forward_only=forward_only)


def _attend_forward(call: Call, tensors: Tensors, batch: dict[str, Any]) -> Any:
    forward = _forward(call, tensors, batch, forward_only=False)
    return tuple(forward[:2]), (tensors, batch, forward)


def _attend_backward(call: Call, saved: Any, cotangents: Any) -> Any:
    tensors, batch, forward = saved
    named = _named(tensors)
    wanted = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in named.values()]
    results = dict(zip(("out", "lse", "max", "sum", "ties"), forward, strict=False))
    given = {**named, **batch, **results, **dict(zip(("dout", "dlse"), cotangents, strict=True))}
    gradients = dict(zip(named, _run(call, given, wanted, forward_only=False), strict=True))
    # a batch has no gradient
    return tuple(gradients.get(name) for name in TENSORS), None


_attend.defvjp(_attend_forward, _attend_backward)


def _named(tensors: Tensors) -> dict[str, Any]:
    """Returns the tensors that are given, by name."""
    named = zip(TENSORS, tensors, strict=True)
    return {name: array for name, array in named if array is not None}


def _run(call: Call, given: dict[str, Any], wanted: list[Any], *, forward_only: bool) -> Any:
    """Lets the compiled program compute a pass on arrays: backward if ``dout`` is among them."""
    options = _options.spelled(call)
    _kept.setdefault(options, call)
    text = json.dumps(
        {
            "process": _PROCESS,
            "options": options,
            "dropout_seed": call.attention.dropout_seed,
            "forward_only": forward_only,
            "given": list(given),
        }
    )
    compute = jax.ffi.ffi_call(_TARGET, wanted, vmap_method="sequential")
    return compute(*given.values(), call=text)


def _execute(text: str, operands: list[Any], results: list[Any]) -> None:
    """Computes a pass in the buffers of a running program. The extension module calls it."""
    asked = json.loads(text)
    if asked["process"] != _PROCESS:
        raise unsupported("call", "this program was compiled in another process")
    given = dict(zip(asked["given"], map(_viewed, operands), strict=True))
    written = [_viewed(result) for result in results]
    options, seed = asked["options"], asked["dropout_seed"]
    call = _options.read(options, seed)
    tensors: Any = tuple(given.get(name) for name in TENSORS)
    batch = {name: given.get(name) for name in BATCH}
    forward_only = asked["forward_only"]
    with plan_for((options, seed), call, tensors, batch, forward_only=forward_only) as plan:
        if "dout" in given:
            _write_gradients(plan, tensors, given, written)
        else:
            _write_outputs(plan, tensors, written)


def _write_outputs(plan: Plan, tensors: Tensors, written: list[Array]) -> None:
    """Writes out, lse and, of an unnormalised output, max, sum and ties."""
    query, key, value, bias, softmax_aux = tensors
    out, lse, *statistics = written
    done = plan.forward(query, key, value, bias=bias, softmax_aux=softmax_aux, out=out, lse=lse)
    # a normalised output has none of them
    for array, computed in zip(statistics, (done.max, done.sum, done.ties), strict=False):
        array[...] = computed


def _write_gradients(
    plan: Plan, tensors: Tensors, given: dict[str, Array], written: list[Array]
) -> None:
    """Writes the gradients of the tensors that are given, in their order."""
    query, key, value, bias, softmax_aux = tensors
    forward = Forward(
        given["out"],
        given["lse"],
        max=given.get("max"),
        sum=given.get("sum"),
        ties=given.get("ties"),
    )
    gradients = plan.backward(
        query,
        key,
        value,
        forward,
        given["dout"],
        given["dlse"],
        bias=bias,
        softmax_aux=softmax_aux,
    )
    of_inputs = (gradients.dq, gradients.dk, gradients.dv)
    all = (*of_inputs, gradients.dbias, gradients.dsoftmax_aux)
    computed = [gradient for gradient in all if gradient is not None]
    for array, gradient in zip(written, computed, strict=True):
        array[...] = gradient


def _viewed(buffer: Any) -> Array:
    """Returns the array in a buffer of XLA's."""
    array = np.asarray(buffer)
    return array.view(np.dtype(jnp.bfloat16)) if buffer.is_bfloat16 else array
