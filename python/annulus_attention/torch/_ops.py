"""Attention as operators of torch, which ``torch.compile`` puts into its graph unopened.

    annulus::attend                  out, lse, max, sum, ties, out_residual, and statistics of the
                                     scores by row and by head; ties is empty if normalised,
                                     out_residual if there is no use for it, statistics if they are
                                     not wanted
    annulus::attend_backward         dq, dk, dv, then dbias and dsoftmax_aux of those that are given
    annulus::attend_jvp              tangents of out and lse
    annulus::attend_double_backward  as attend_backward, then the gradients of dout and dlse

An operator takes tensors and simple types. The options of a call are a text (``_options.py``), and
its plan comes from a cache (``_plan_cache.py``), so that forward and backward share one. The seed
of dropout is a tensor, so that a new seed in every step is not a new graph. Under ``vmap`` a call
is computed for each element in turn. ``_derivatives.py`` adds the derivatives.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .. import _options
from .._arrays import accumulator
from .._calls import BATCH, TENSORS, Call, Shapes, keeps_out_residual, pass_forward
from .._errors import invalid, unsupported
from .._plan_cache import plan_for
from .._results import Forward, Gradients

_INPUTS = ", ".join(
    (
        "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? softmax_aux",
        *(f"Tensor? {name}" for name in BATCH),
        "Tensor? dropout_seed, str options, bool forward_only",
    )
)
_READ = 5 + len(BATCH) + 1
"""Tensors of an operator's inputs: of a call, of its batch, the seed of dropout."""
_INPUTS_END = _READ + 2
"""These, the options and forward_only."""
_LIST_BIAS = 5 + BATCH.index("key_list_bias")
"""The only tensor of a batch that has a gradient."""
_STATISTICS = "Tensor lse, Tensor max, Tensor sum, Tensor ties, Tensor out_residual"


def _read(given: tuple[Any, ...]) -> tuple[Call, Any, Any, dict[str, Any], bool]:
    """Returns call, key of its options, tensors, batch and forward_only of an operator's inputs."""
    tensors, batch = given[:5], dict(zip(BATCH, given[5 : _READ - 1], strict=True))
    dropout_seed, options, forward_only = given[_READ - 1 :]
    seed = None
    if dropout_seed is not None:
        if dropout_seed.dtype.is_floating_point or dropout_seed.numel() != 1:
            got = f"{dropout_seed.dtype} of shape {tuple(dropout_seed.shape)}"
            raise invalid("dropout_seed", got, "one integer")
        # int64 has the bits of an unsigned number
        seed = int(dropout_seed.item()) % 2**64
    return _options.read(options, seed), (options, seed), tensors, batch, forward_only


@torch.library.custom_op(
    "annulus::attend",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}) -> ({', '.join(['Tensor'] * 8)})",
)
def attend(*given: Any) -> Any:
    """Computes a forward pass."""
    call, key, tensors, batch, forward_only = _read(given)
    with plan_for(key, call, tensors, batch, forward_only=forward_only) as plan:
        forward = pass_forward(plan, tensors)
    ties = forward.lse.new_empty(0) if forward.ties is None else forward.ties
    residual = forward.out.new_empty(0)
    if forward.out_residual is not None and _keeps_residual(tensors[0], given[_READ], forward_only):
        residual = forward.out_residual
    rows, heads = forward.lse.new_empty(0), forward.lse.new_empty(0)
    if forward.statistics is not None:
        rows, heads = forward.statistics.rows, forward.statistics.heads
    return forward.out, forward.lse, forward.max, forward.sum, ties, residual, rows, heads


def _keeps_residual(query: Any, options: str, forward_only: bool) -> bool:
    dtype = str(query.dtype).removeprefix("torch.")
    backend = json.loads(options)["backend"] if query.device.type == "cpu" else "cuda"
    return keeps_out_residual(dtype, backend, forward_only=forward_only)


@attend.register_fake
def _(*given: Any) -> Any:
    query, key, value, bias, softmax_aux = given[:5]
    options, forward_only = given[_READ:]
    shapes = Shapes.of(query, key, value, bias, softmax_aux)
    batch, q_len, q_heads, _ = shapes.query
    acc = getattr(torch, accumulator(shapes.dtype))
    attention = json.loads(options)["attention"]
    is_normalized = attention["normalize_output"]
    has_statistics = attention["return_statistics"]
    lse = (batch, q_heads, q_len)
    statistics = [lse, lse, lse, (0,) if is_normalized else lse]
    out = query.new_empty((batch, q_len, q_heads, shapes.value[3]))
    keeps = _keeps_residual(query, options, forward_only)
    residual = query.new_empty(out.shape if keeps else (0,))
    of_scores = [(*lse, 3), (q_heads, 3, 2)] if has_statistics else [(0,), (0,)]
    lists = [[query.new_empty(shape, dtype=acc) for shape in of] for of in (statistics, of_scores)]
    return out, *lists[0], residual, *lists[1]


@torch.library.custom_op(
    "annulus::attend_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, Tensor out, {_STATISTICS}, Tensor dout, Tensor dlse) -> Tensor[]",
)
def attend_backward(*given: Any) -> Any:
    """Computes a backward pass."""
    call, options, tensors, batch, forward_only = _read(given[:_INPUTS_END])
    query, key, value, bias, softmax_aux = tensors
    out, lse, max, sum, ties, residual, dout, dlse = given[_INPUTS_END:]
    forward = Forward(
        out,
        lse,
        max,
        sum,
        None if call.attention.normalize_output else ties,
        residual if residual.shape == out.shape else None,
    )
    with plan_for(
        options, call, tensors, batch, forward_only=forward_only, of_pass="backward"
    ) as plan:
        gradients = plan.backward(
            query,
            key,
            value,
            forward,
            dout,
            dlse,
            bias=bias,
            softmax_aux=softmax_aux,
        )
    return _given_gradients(gradients, given)


@attend_backward.register_fake
def _(*given: Any) -> Any:
    return [_like(tensor) for tensor in (*given[:5], given[_LIST_BIAS]) if tensor is not None]


def _like(tensor: Any) -> Any:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


_DIRECTION = ", ".join(f"Tensor? {name}_direction" for name in (*TENSORS, "key_list_bias"))
"""Tangents or cotangents of the inputs; None is 0."""


@torch.library.custom_op(
    "annulus::attend_jvp",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, {_DIRECTION}) -> (Tensor, Tensor)",
)
def attend_jvp(*given: Any) -> Any:
    """Computes the tangents of out and lse."""
    call, options, tensors, batch, _ = _read(given[:_INPUTS_END])
    query, key, value, bias, softmax_aux = tensors
    tangents = _direction(tensors, given[_INPUTS_END:])
    with plan_for(options, call, tensors, batch, forward_only=False, of_pass="jvp") as plan:
        jvp = plan.jvp(
            query,
            key,
            value,
            *tangents[:3],
            bias=bias,
            softmax_aux=softmax_aux,
            bias_tangent=tangents[3],
            softmax_aux_tangent=tangents[4],
            list_bias_tangent=tangents[5],
        )
    return jvp.out_tangent, jvp.lse_tangent


@attend_jvp.register_fake
def _(*given: Any) -> Any:
    query, _, value = given[:3]
    batch, q_len, q_heads, _ = query.shape
    acc = getattr(torch, accumulator(str(query.dtype).removeprefix("torch.")))
    out = query.new_empty((batch, q_len, q_heads, value.shape[3]))
    return out, query.new_empty((batch, q_heads, q_len), dtype=acc)


@torch.library.custom_op(
    "annulus::attend_double_backward",
    mutates_args=(),
    device_types=("cpu", "cuda"),
    schema=f"({_INPUTS}, Tensor dout, Tensor dlse, {_DIRECTION}) -> Tensor[]",
)
def attend_double_backward(*given: Any) -> Any:
    """Computes the gradients of the gradients."""
    call, options, tensors, batch, _ = _read(given[:_INPUTS_END])
    query, key, value, bias, softmax_aux = tensors
    dout, dlse = given[_INPUTS_END : _INPUTS_END + 2]
    direction = _direction(tensors, given[_INPUTS_END + 2 :])
    dq, dk, dv, dbias, dsoftmax_aux, dlist_bias = direction
    with plan_for(
        options, call, tensors, batch, forward_only=False, of_pass="double backward"
    ) as plan:
        double = plan.double_backward(
            query,
            key,
            value,
            dout,
            dq,
            dk,
            dv,
            dlse,
            bias=bias,
            softmax_aux=softmax_aux,
            dbias_cotangent=dbias,
            dsoftmax_aux_cotangent=dsoftmax_aux,
            dlist_bias_cotangent=dlist_bias,
        )
    return [*_given_gradients(double.inputs, given), double.ddout, double.ddlse]


@attend_double_backward.register_fake
def _(*given: Any) -> Any:
    inputs = [tensor for tensor in (*given[:5], given[_LIST_BIAS]) if tensor is not None]
    return [_like(tensor) for tensor in (*inputs, *given[_INPUTS_END : _INPUTS_END + 2])]


def _given_gradients(gradients: Gradients, given: tuple[Any, ...]) -> list[Any]:
    """Returns the gradients of the inputs that there are."""
    of_lists = gradients.dlist_bias
    if of_lists is not None:
        of_lists = torch.from_numpy(of_lists).to(given[_LIST_BIAS].dtype)
    all = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias, gradients.dsoftmax_aux)
    return [gradient for gradient in (*all, of_lists) if gradient is not None]


def _direction(tensors: tuple[Any, ...], given: tuple[Any, ...]) -> list[Any]:
    """Returns a direction, with zeros for query, key and value without one."""
    filled = [
        torch.zeros_like(tensor) if part is None else part
        for tensor, part in zip(tensors[:3], given[:3], strict=True)
    ]
    return [*filled, *given[3:]]


def _in_turn(operator: Any, elements: int, dims: Any, given: Any) -> list[Any]:
    """Returns the outputs of an operator for each element of a batch, stacked."""
    outputs = []
    for element in range(elements):
        of_element = [
            value if dim is None else value.select(dim, element)
            for value, dim in zip(given, dims, strict=True)
        ]
        outputs.append(operator(*of_element))
    return [torch.stack(parts) for parts in zip(*outputs, strict=True)]


def _register_vmap(operator: Any) -> None:
    """Computes an operator under ``vmap`` for each element in turn."""

    def in_turn(info: Any, dims: Any, *given: Any) -> Any:
        outputs = _in_turn(operator, info.batch_size, dims, given)
        # a list where the operator returns one
        is_tuple = operator in (attend, attend_jvp)
        return (tuple(outputs), (0,) * len(outputs)) if is_tuple else (outputs, [0] * len(outputs))

    operator.register_vmap(in_turn)


def _of_batched_gradients(operator: Any) -> Any:
    """Returns an operator for ``torch.autograd.grad(is_grads_batched=True)``, which has a ``vmap``
    of its own, without rules of operators.
    """

    def compute(*given: Any) -> Any:
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        dims = [0 if _is_batched(value) else None for value in given]
        given = tuple(
            value if dim is None else torch._remove_batch_dim(value, level, 1, 0)
            for value, dim in zip(given, dims, strict=True)
        )
        if any(map(_is_batched, given)):
            raise unsupported("is_grads_batched", "gradients that are batched twice")
        elements = given[dims.index(0)].shape[0]
        outputs = _in_turn(operator, elements, dims, given)
        return [torch._add_batch_dim(output, 0, level) for output in outputs]

    return compute


def _is_batched(value: Any) -> bool:
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return isinstance(value, torch.Tensor) and bool(legacy(value))


for _operator in (attend, attend_backward, attend_jvp, attend_double_backward):
    _register_vmap(_operator)
_library = torch.library.Library("annulus", "IMPL")
for _name, _operator in (
    ("attend_backward", attend_backward),
    ("attend_double_backward", attend_double_backward),
):
    _library.impl(_name, _of_batched_gradients(_operator), "Batched")
