"""Attention as operators of torch, which ``torch.compile`` puts into its graph unopened.

    annulus::attend           out, lse, max, sum, ties, out_residual, and statistics of the scores
                              by row and by head; ties is empty if normalised, out_residual if
                              there is no use for it, statistics if they are not wanted
    annulus::attend_backward  dq, dk, dv, then dbias and dsoftmax_aux of those that are given

An operator takes tensors and simple types. The options of a call are a text (``_options.py``), and
its plan comes from a cache (``_plan_cache.py``), so that forward and backward share one. The seed
of dropout is a tensor, so that a new seed in every step is not a new graph.

``apply`` adds the derivative for ``torch.func``, which differentiates an ``autograd.Function``, but
no operator that Python defines. Only the reverse mode exists, once: other derivatives raise. Under
``vmap`` a call is computed for each element in turn.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import _options
from .._arrays import accumulator
from .._calls import BATCH, Call, Shapes, keeps_out_residual, pass_forward
from .._errors import invalid, unsupported
from .._plan_cache import plan_for
from .._results import Forward

_INPUTS = ", ".join(
    (
        "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? softmax_aux",
        *(f"Tensor? {name}" for name in BATCH),
        "Tensor? dropout_seed, str options, bool forward_only",
    )
)
_STATISTICS = "Tensor lse, Tensor max, Tensor sum, Tensor ties, Tensor out_residual"


def _read(given: tuple[Any, ...]) -> tuple[Call, Any, Any, dict[str, Any], bool]:
    """Returns call, key of its options, tensors, batch and forward_only of an operator's inputs."""
    tensors, batch = given[:5], dict(zip(BATCH, given[5:12], strict=True))
    dropout_seed, options, forward_only = given[12:]
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
    if forward.out_residual is not None and _keeps_residual(tensors[0], given[13], forward_only):
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
    options, forward_only = given[13:]
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
    call, options, tensors, batch, forward_only = _read(given[:15])
    query, key, value, bias, softmax_aux = tensors
    out, lse, max, sum, ties, residual, dout, dlse = given[15:]
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
    all = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias, gradients.dsoftmax_aux)
    return [gradient for gradient in all if gradient is not None]


@attend_backward.register_fake
def _(*given: Any) -> Any:
    return [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for tensor in given[:5]
        if tensor is not None
    ]


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


@attend.register_vmap
def _(info: Any, dims: Any, *given: Any) -> Any:
    outputs = _in_turn(attend, info.batch_size, dims, given)
    return tuple(outputs), (0,) * len(outputs)


@attend_backward.register_vmap
def _(info: Any, dims: Any, *given: Any) -> Any:
    outputs = _in_turn(attend_backward, info.batch_size, dims, given)
    return outputs, [0] * len(outputs)


def _backward_of_batched_gradients(*given: Any) -> Any:
    """Computes ``attend_backward`` for ``torch.autograd.grad(is_grads_batched=True)``, which has a
    ``vmap`` of its own, without rules of operators.
    """
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
    outputs = _in_turn(attend_backward, elements, dims, given)
    return [torch._add_batch_dim(output, 0, level) for output in outputs]


def _is_batched(value: Any) -> bool:
    legacy = torch._C._functorch.is_legacy_batchedtensor
    return isinstance(value, torch.Tensor) and bool(legacy(value))


_library = torch.library.Library("annulus", "IMPL")
_library.impl("attend_backward", _backward_of_batched_gradients, "Batched")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.options, _ = inputs
    # only out and lse are returned with a gradient
    ctx.save_for_backward(*tensors, *output[:6])


def _backward_by(compute: Any, ctx: Any, dout: Any, dlse: Any) -> Any:
    """Returns the gradients of the inputs of ``annulus::attend``."""
    # unpacked once: activation checkpointing frees what it has recomputed
    saved = ctx.saved_tensors
    tensors, results = saved[:13], saved[13:]
    gradients = iter(compute(*tensors, ctx.options, False, *results, dout, dlse))
    of_tensors = [None if tensor is None else next(gradients) for tensor in tensors[:5]]
    return *of_tensors, *(None for _ in tensors[5:]), None, None


def _backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
    return _backward_by(attend_backward, ctx, dout, dlse)


def _no_second_derivative(*_: Any) -> Any:
    raise unsupported("double backward", "attention has first derivatives only")


def _no_forward_mode(*_: Any) -> Any:
    raise unsupported("forward mode", "want reverse mode: backward, torch.func.grad, vjp, jacrev")


attend.register_autograd(_backward, setup_context=_setup_context)
attend_backward.register_autograd(_no_second_derivative)


class _Attend(torch.autograd.Function):
    """``annulus::attend`` with its derivative."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_context)

    @staticmethod
    def forward(*given: Any) -> Any:
        return attend(*given)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        is_traced = torch.compiler.is_compiling()
        function = _AttendBackward if is_traced else _EagerAttendBackward
        return _backward_by(function.apply, ctx, dout, dlse)


class _AttendBackward(torch.autograd.Function):
    """``annulus::attend_backward``, which has no derivative."""

    generate_vmap_rule = True
    backward = staticmethod(_no_second_derivative)

    @staticmethod
    def forward(*given: Any) -> Any:
        return tuple(attend_backward(*given))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


# a compiler traces no Function with a jvp of its own
class _EagerAttend(_Attend):
    jvp = staticmethod(_no_forward_mode)


class _EagerAttendBackward(_AttendBackward):
    jvp = staticmethod(_no_forward_mode)


def apply(*given: Any) -> Any:
    """Computes ``annulus::attend`` with a derivative."""
    is_transformed = _checked_transforms()
    if not torch.compiler.is_compiling():
        return _EagerAttend.apply(*given)
    return (_Attend.apply if is_transformed else attend)(*given)


def _transforms() -> list[str]:
    """Returns the kinds of the transforms of ``torch.func`` in force, such as ``Grad``."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return [interpreter.key().name for interpreter in stack]


@torch.compiler.assume_constant_result
def hides_gradients() -> bool:
    """Returns true in a vmap within a grad, where tensors lack their ``requires_grad``."""
    return {"Grad", "Vmap"} <= set(_transforms())


@torch.compiler.assume_constant_result
def _checked_transforms() -> bool:
    """Returns true in transforms of ``torch.func``, and refuses those that lose a derivative.

    A compiler calls it as it traces, within the transforms.
    """
    kinds = _transforms()
    if "Functionalize" in kinds:
        raise unsupported("torch.func.functionalize", "no rule for an autograd.Function")
    # outside of a graph, autograd.Function refuses tangents and second derivatives itself
    is_traced = torch.compiler.is_compiling()
    if "Jvp" in kinds and (is_traced or "Vmap" in kinds):
        _no_forward_mode()
    if is_traced and forward_ad._current_level >= 0:
        _no_forward_mode()
    if is_traced and kinds.count("Grad") > 1:
        _no_second_derivative()
    return bool(kinds)
