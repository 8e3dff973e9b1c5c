"""Attention with gradients for JAX, also under ``jax.jit``.

``annulus.flash_attention`` and ``annulus.ring_attention`` route traced arrays here. XLA's CPU
runtime calls a pass (``jax.ffi``), which reads operands and writes results in XLA's buffers. Its
gradient is a custom VJP, whose backward pass has the plan of the forward pass, and the gradient of
this pass another one: ``grad`` of ``grad``, ``jacrev`` of ``jacrev``. A jitted call gives the bits
of an eager one. A custom VJP has no forward mode: ``jvp``, ``jacfwd``, ``linearize`` and
``hessian`` raise JAX's TypeError, and third derivatives a NotImplementedError.

Options are constants of a trace; query, key and value have one element type. Without
``jax_enable_x64``, ids and positions beyond 32 bits are refused, and ``return_max_sum`` always,
whose results have no gradient. Sharded arrays are gathered: each device of the mesh computes the
whole attention. Under ``jax.shard_map`` and ``jax.pmap`` each device computes its own part, and the
gradient of a replicated operand is the sum over devices. A program that another process compiled
(``jax_compilation_cache_dir``) is compiled again. Plans are reused; ``clear_plans`` frees them.
"""

from __future__ import annotations

import ctypes
import functools
import json
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from . import _annulus, _arrays, _calls, _check, _options, _plan_cache
from ._calls import BATCH, TENSORS, Call, Shapes, Tensors, keeps_out_residual
from ._errors import invalid, unsupported
from ._plan import Plan
from ._plan_cache import plan_for
from ._results import Forward, Gradients

__all__ = ["clear_plans", "dot_product_attention", "flash_attention", "ring_attention"]

Array = np.ndarray[Any, Any]

_TARGET = "annulus_attend"

_PROCESS = secrets.token_hex(8)
"""A part of each call's text. A cache of compiled programs outlives the process, and masks and bias
functions do not: another process must not find a program by the text of this one.
"""

_type_of = getattr(jax, "typeof", None) or jax.core.get_aval
"""The type of an array; JAX before 0.6 has ``get_aval``."""

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


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """Computes ``jax.nn.dot_product_attention``, with its arguments and layout.

    As there, out is 0 for a query beyond ``query_seq_lengths``, and the mean of all values for any
    other query without a visible key.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``, or without batch.
        key, value: ``[batch, kv_len, kv_heads, head_dim]``, or without batch.
        bias: Added to the scores; broadcast to ``[batch, q_heads, q_len, kv_len]``.
        mask: Bools, true where visible; broadcast like bias.
        scale: Factor of the scores, a number or a traced one. Default: 1/√head_dim.
        is_causal: Visible only if j ≤ i, for query row i and key row j.
        query_seq_lengths, key_value_seq_lengths: ``[batch]``, int32: rows that are not padding.
        local_window_size: (left, right): visible only if i − left ≤ j ≤ i + right. One integer
            stands for both sides.
        implementation: None; those of JAX are refused.
        return_residual: Returns (out, lse), with lse ``[batch, q_len, q_heads]``, without gradient.

    Returns:
        out, with the shape and element type of query; or a tuple, see ``return_residual``.

    Raises:
        annulus.Error: As ``flash_attention``.
    """
    if implementation is not None:
        raise unsupported("implementation", "annulus computes; jax.nn has the others")
    shape = jnp.shape(query)
    query, key, value = _checked_tensors(query, key, value)
    dtype = query.dtype
    batch, q_len, q_heads, _ = query.shape
    _, kv_len, kv_heads, _ = key.shape
    pairs = (batch, q_heads, q_len, kv_len)
    with_residual = _check.boolean("return_residual", return_residual)
    q_valid = _valid_rows("query_seq_lengths", query_seq_lengths, batch, q_len)
    kv_valid = _valid_rows("key_value_seq_lengths", key_value_seq_lengths, batch, kv_len)
    if isinstance(scale, jax.core.Tracer):
        query, key, value = _scaled(scale, query, key, value)
        scale = 1.0
    options: dict[str, Any] = {
        "attention_mask": _checked_mask(mask, pairs),
        "bias": _checked_bias(bias, pairs),
        "causal": _check.boolean("is_causal", is_causal),
        "sliding_window": _checked_window(local_window_size),
        "softmax_scale": _check.number_or_none("scale", scale),
    }
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        # a negative segment id is padding
        options["q_segment_ids"] = q_valid.astype(jnp.int32) - 1
        options["kv_segment_ids"] = kv_valid.astype(jnp.int32) - 1
    if batch == 0:
        # a plan has at least one batch row
        out, lse = query, jnp.zeros((0, q_heads, q_len))
    else:
        out, lse = flash_attention(query, key, value, **options, return_lse=True)
    lse = jax.lax.stop_gradient(lse.transpose(0, 2, 1))
    if kv_len > 0:
        mean = jnp.repeat(value.mean(1, keepdims=True), q_heads // kv_heads, 2)
        is_masked = jnp.isneginf(lse) & q_valid[:, :, None]
        out = jnp.where(is_masked[..., None], mean, out)
    out = out.astype(dtype).reshape(shape)
    # the score of a masked pair in jax.nn
    lse = jnp.maximum(lse, -0.7 * float(jnp.finfo(jnp.float32).max))
    return (out, lse.astype(dtype).reshape(shape[:-1])) if with_residual else out


def clear_plans() -> None:
    """Frees the plans that compiled programs keep for later calls."""
    _plan_cache.clear()


def attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> tuple[Any, ...]:
    """Computes a call on traced arrays: out and lse."""
    arrays: Any = tuple(None if array is None else jnp.asarray(array) for array in tensors)
    # shapes and types are refused here, where the error reaches the caller as it is
    Shapes.of(*arrays)
    given = {name: _integers(name, array) for name, array in batch.items() if array is not None}
    results: tuple[Any, ...] = _attend(call, True, *_together(arrays, given))
    # statistics have no gradient, as in torch
    of_scores = results[-2:] if call.attention.return_statistics else ()
    return (*results[:2], *map(jax.lax.stop_gradient, of_scores))


def _integers(name: str, value: Any) -> Any:
    """Returns an array of a batch as one of JAX, with the same values."""
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        kind = jax.dtypes.canonicalize_dtype(value.dtype)
        if value.dtype.kind in "iu" and (value.astype(kind) != value).any():
            want = f"numbers that fit {kind}, or jax_enable_x64"
            raise invalid(name, f"numbers {value.min()} to {value.max()}", want)
    return jnp.asarray(value)


def _together(*operands: Any) -> Any:
    """Returns operands with one sharding: whole on every device of a mesh, or, under ``shard_map``,
    varying over the same axes. JAX transposes both, so that a gradient has its operand's sharding.
    """
    axes = _varying_axes(operands)

    def placed(array: Any) -> Any:
        sharding = getattr(_type_of(array), "sharding", None)
        if sharding is not None and any(axis is not None for axis in sharding.spec):
            array = jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
        return _varying(array, axes)

    return jax.tree.map(placed, operands)


def _varying_axes(operands: Any) -> set[str]:
    """Returns the mesh axes of ``shard_map`` over which one of the operands varies."""
    axes: set[str] = set()
    for array in jax.tree.leaves(operands):
        kind = _type_of(array)
        # JAX before 0.10 has vma, and before 0.7 neither
        kind = getattr(kind, "manual_axis_type", kind)
        axes.update(getattr(kind, "varying", ()) or getattr(kind, "vma", ()))
    return axes


def _varying(array: Any, axes: set[str]) -> Any:
    """Returns an array whose type says that it varies over some mesh axes of ``shard_map``."""
    missing = tuple(sorted(axes - _varying_axes(array)))
    if not missing:
        return array
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(array, missing, to="varying")
    return jax.lax.pvary(array, missing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(call: Call, forward_only: bool, tensors: Tensors, batch: dict[str, Any]) -> Any:
    """Computes a forward pass. Only out and lse have a gradient."""
    return _forward(call, tensors, batch, forward_only=forward_only)


def _forward(call: Call, tensors: Tensors, batch: dict[str, Any], *, forward_only: bool) -> Any:
    """Returns the outputs of a forward pass, by name in the order of ``_results``."""
    query, value = tensors[0], tensors[2]
    rows, q_len, q_heads, _ = query.shape
    statistics = jax.ShapeDtypeStruct((rows, q_heads, q_len), _arrays.accumulator(query.dtype.name))
    out = jax.ShapeDtypeStruct((rows, q_len, q_heads, value.shape[3]), query.dtype)
    names = _results(call, query.dtype, forward_only=forward_only)
    of_heads = jax.ShapeDtypeStruct((q_heads, 3, 2), statistics.dtype)
    of_rows = jax.ShapeDtypeStruct((*statistics.shape, 3), statistics.dtype)
    shapes = {"out": out, "out_residual": out, "statistics": of_rows, "head_statistics": of_heads}
    wanted = [shapes.get(name, statistics) for name in names]
    given = {**_named(tensors), **batch}
    return _run(call, given, wanted, forward_only=forward_only)


def _results(call: Call, dtype: Any, *, forward_only: bool) -> tuple[str, ...]:
    """Returns the names of the outputs of a forward pass: ties only of an unnormalised output,
    statistics if they are wanted, the rounding residual of out only where the backward pass reads
    it.
    """
    ties = () if call.attention.normalize_output else ("ties",)
    of_scores = call.attention.return_statistics
    statistics = ("statistics", "head_statistics") if of_scores else ()
    keeps = keeps_out_residual(dtype.name, call.backend, forward_only=forward_only)
    return ("out", "lse", "max", "sum", *ties, *statistics, *(("out_residual",) if keeps else ()))


def _attend_forward(call: Call, forward_only: bool, tensors: Tensors, batch: dict[str, Any]) -> Any:
    # by itself, so that it has a derivative where the gradient is differentiated
    forward = _attend(call, False, tensors, batch)
    of_backward = (tensors, batch, forward)
    # what forward_only leaves out comes last
    names = _results(call, tensors[0].dtype, forward_only=forward_only)
    return forward[: len(names)], of_backward


def _attend_backward(call: Call, _: bool, saved: Any, cotangents: Any) -> Any:
    # a batch has no gradient
    return _gradients(call, *saved, cotangents[:2]), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    call: Call, tensors: Tensors, batch: dict[str, Any], forward: Any, cotangents: Any
) -> Any:
    """Computes a backward pass."""
    named = _named(tensors)
    names = _results(call, tensors[0].dtype, forward_only=False)
    # statistics have no gradient
    named_results = zip(names, forward, strict=True)
    results = {name: array for name, array in named_results if not name.endswith("statistics")}
    of_outputs = dict(zip(("dout", "dlse"), cotangents, strict=True))
    return _of_inputs(call, named, {**named, **batch, **results, **of_outputs})


def _gradients_forward(
    call: Call, tensors: Tensors, batch: dict[str, Any], forward: Any, cotangents: Any
) -> Any:
    gradients = _gradients(call, tensors, batch, forward, cotangents)
    return gradients, (tensors, batch, cotangents)


def _gradients_backward(call: Call, saved: Any, directions: Any) -> Any:
    tensors, batch, cotangents = saved
    named = _named(tensors)
    of_outputs = dict(zip(("dout", "dlse"), cotangents, strict=True))
    direction = {f"{name}_direction": array for name, array in _named(directions).items()}
    given = {**named, **batch, **of_outputs, **direction}
    gradients, of_cotangents = _of_inputs(call, named, given, tuple(cotangents))
    # the results of the forward pass depend on the tensors, whose gradients include theirs
    return gradients, None, None, of_cotangents


def _of_inputs(call: Call, named: dict[str, Any], given: dict[str, Any], more: Any = None) -> Any:
    """Lets a pass compute gradients of the tensors that are given, in the order of ``TENSORS``, and
    those of the arrays ``more``, if there are some.
    """
    like = [*named.values(), *(more or ())]
    wanted = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like]
    results = _run(call, given, wanted, forward_only=False)
    gradients = dict(zip(named, results, strict=False))
    of_tensors = tuple(gradients.get(name) for name in TENSORS)
    return of_tensors if more is None else (of_tensors, tuple(results[len(named) :]))


_attend.defvjp(_attend_forward, _attend_backward)
_gradients.defvjp(_gradients_forward, _gradients_backward)


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

    def compute(*operands: Any) -> tuple[Any, ...]:
        results = jax.ffi.ffi_call(_TARGET, wanted, vmap_method="sequential")(*operands, call=text)
        # results of ffi_call do not vary in their type
        return tuple(_varying(array, _varying_axes(operands)) for array in results)

    differentiated = jax.custom_jvp(compute)
    differentiated.defjvp(_refuse_derivative)
    return differentiated(*given.values())


def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    """Refuses to differentiate a pass, which happens in derivatives of a second one only."""
    raise unsupported("a third derivative", "attention has first and second derivatives")


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
    of_pass = "forward"
    write: Callable[[Plan, Tensors, dict[str, Array], list[Array]], None] = _write_outputs
    if "query_direction" in given:
        of_pass, write = "double backward", _write_second
    elif "dout" in given:
        of_pass, write = "backward", _write_gradients
    with plan_for(
        (options, seed), call, tensors, batch, forward_only=forward_only, of_pass=of_pass
    ) as plan:
        write(plan, tensors, given, written)


def _write_outputs(plan: Plan, tensors: Tensors, _: dict[str, Array], written: list[Array]) -> None:
    """Writes the outputs of a forward pass, in the order of ``_results``."""
    query, key, value, bias, softmax_aux = tensors
    out, lse, *statistics = written
    done = plan.forward(query, key, value, bias=bias, softmax_aux=softmax_aux, out=out, lse=lse)
    of_scores = done.statistics
    rows_and_heads = () if of_scores is None else (of_scores.rows, of_scores.heads)
    computed = (done.max, done.sum, done.ties, *rows_and_heads, done.out_residual)
    given = [array for array in computed if array is not None]
    for array, values in zip(statistics, given, strict=False):
        array[...] = values


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
        out_residual=given.get("out_residual"),
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
    _copy(gradients, (), written)


def _write_second(
    plan: Plan, tensors: Tensors, given: dict[str, Array], written: list[Array]
) -> None:
    """Writes the gradients of the tensors that are given, in their order, then ddout and ddlse."""
    query, key, value, bias, softmax_aux = tensors
    dq, dk, dv, dbias, dsoftmax_aux = (given.get(f"{name}_direction") for name in TENSORS)
    double = plan.double_backward(
        query,
        key,
        value,
        given["dout"],
        dq,
        dk,
        dv,
        given["dlse"],
        bias=bias,
        softmax_aux=softmax_aux,
        dbias_cotangent=dbias,
        dsoftmax_aux_cotangent=dsoftmax_aux,
    )
    _copy(double.inputs, (double.ddout, double.ddlse), written)


def _copy(gradients: Gradients, more: tuple[Any, ...], written: list[Array]) -> None:
    of_inputs = (gradients.dq, gradients.dk, gradients.dv)
    all = (*of_inputs, gradients.dbias, gradients.dsoftmax_aux, *more)
    computed = [gradient for gradient in all if gradient is not None]
    for array, gradient in zip(written, computed, strict=True):
        array[...] = gradient


def _viewed(buffer: Any) -> Array:
    """Returns the array in a buffer of XLA's."""
    array = np.asarray(buffer)
    return array.view(np.dtype(jnp.bfloat16)) if buffer.is_bfloat16 else array


def _checked_tensors(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Returns query, key and value of ``dot_product_attention`` with an axis of the batch."""
    given = {"query": query, "key": key, "value": value}
    query, key, value = (_with_4_axes(name, jnp.asarray(array)) for name, array in given.items())
    Shapes.of(query, key, value, None, None)
    if _arrays.device_of(query) is not None:
        raise unsupported("query", "an array in the memory of a GPU; use flash_attention")
    if value.shape != key.shape:
        raise invalid("value", f"shape {value.shape}", f"{key.shape}, as key")
    q_heads, kv_heads = query.shape[2], key.shape[2]
    if kv_heads == 0 or q_heads % kv_heads:
        raise invalid("query", f"{q_heads} heads", f"a multiple of key's, which has {kv_heads}")
    return query, key, value


def _with_4_axes(name: str, array: Any) -> Any:
    """Adds leading axes."""
    if array.ndim > 4:
        raise invalid(name, f"{array.ndim} axes", "at most 4")
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _broadcastable(name: str, value: Any, pairs: tuple[int, ...]) -> Any:
    """Returns an array over pairs of ``dot_product_attention`` with 4 axes."""
    array = _with_4_axes(name, jnp.asarray(value))
    if any(length not in (1, whole) for length, whole in zip(array.shape, pairs, strict=True)):
        raise invalid(name, f"shape {array.shape}", f"{pairs}, where any length may be 1")
    return array


def _checked_mask(mask: Any, pairs: tuple[int, ...]) -> Any:
    """Returns a mask of ``dot_product_attention`` as ``attention_mask``."""
    if mask is None:
        return None
    mask = _broadcastable("mask", mask, pairs)
    if mask.dtype != bool:
        raise invalid("mask", f"elements {mask.dtype}", "bools")
    return jnp.broadcast_to(mask, (*mask.shape[:2], *pairs[2:]))


def _checked_bias(bias: Any, pairs: tuple[int, ...]) -> Any:
    """Returns a bias of ``dot_product_attention`` as one of ``flash_attention``."""
    if bias is None:
        return None
    bias = _broadcastable("bias", bias, pairs)
    if jnp.iscomplexobj(bias):
        raise invalid("bias", f"elements {bias.dtype}", "real numbers")
    return bias if bias.dtype.name in _arrays.FLOATS else bias.astype(jnp.float32)


def _checked_window(window: Any) -> tuple[int, ...] | None:
    """Returns a window of ``dot_product_attention`` as (left, right)."""
    if window is None:
        return None
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise invalid("local_window_size", window, "an integer or (left, right)")
    return tuple(_check.integer("local_window_size", side) for side in sides)


def _valid_rows(name: str, lengths: Any, batch: int, rows: int) -> Any:
    """Returns ``[batch, rows]``: true for rows that are not padding."""
    if lengths is None:
        return jnp.ones((batch, rows), bool)
    lengths = jnp.asarray(lengths)
    if lengths.dtype != jnp.int32 or lengths.shape != (batch,):
        raise invalid(name, f"{lengths.dtype} {lengths.shape}", f"int32 {(batch,)}")
    return jnp.arange(rows) < lengths[:, None]


def _scaled(scale: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Multiplies queries by a traced scale, in a type in which the product is as exact as scores.

    A plan has its scale as a constant.
    """
    if scale.ndim > 0:
        raise invalid("scale", f"shape {scale.shape}", "a number")
    wide = _arrays.accumulator(query.dtype.name)
    query, key, value = (array.astype(wide) for array in (query, key, value))
    return query * scale.astype(wide), key, value
