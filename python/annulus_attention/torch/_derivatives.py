"""Derivatives of the operators of attention (``_ops.py``).

    _Attend                attend: its gradient is _AttendBackward, its tangent _AttendJvp
    _AttendBackward        attend_backward: its gradient is _AttendDoubleBackward
    _AttendJvp             attend_jvp
    _AttendDoubleBackward  attend_double_backward, which has no derivative

With J the Jacobian of (out, lse) at the inputs x, the tangent along ẋ is J·ẋ and the gradients are
g = Jᵀ·(dout, dlse). The Hessian H of ⟨(dout, dlse), (out, lse)⟩ is symmetric, so one pass has all
second derivatives: the double backward along a direction ẋ returns H·ẋ and J·ẋ.

    gradient of ⟨c, g⟩        by x: H·c    by (dout, dlse): J·c
    tangent of g              H·ẋ + Jᵀ·(tangents of dout and dlse)
    gradient of ⟨c, J·ẋ⟩      by x: H·ẋ with (dout, dlse) = c    by ẋ: Jᵀ·c

``apply`` goes through an ``autograd.Function``, since ``torch.func`` differentiates no operator
that Python defines. A compiler traces first derivatives by reverse mode only; all others raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from .._errors import unsupported
from ._ops import (
    _LIST_BIAS,
    _READ,
    attend,
    attend_backward,
    attend_double_backward,
    attend_jvp,
)

_DIFFERENTIATED = (*range(5), _LIST_BIAS)
"""Places of query, key, value, bias, softmax_aux and key_list_bias among the inputs."""
_RESULTS = 6
"""Results of attend that a backward pass reads: all but the statistics of the scores."""


def _save(ctx: Any, *tensors: Any) -> None:
    ctx.save_for_backward(*tensors)
    # plain references, which would keep what checkpointing and offloading free
    if forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)


def _setup_attend(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.options, _ = inputs
    # only out and lse are returned with a gradient
    _save(ctx, *tensors, *output)


def _backward_by(compute: Any, ctx: Any, dout: Any, dlse: Any) -> Any:
    """Returns the gradients of the inputs of ``annulus::attend``."""
    # unpacked once: activation checkpointing frees what it has recomputed
    saved = ctx.saved_tensors
    tensors, results = saved[:_READ], saved[_READ:][:_RESULTS]
    gradients = iter(compute(*tensors, ctx.options, False, *results, dout, dlse))
    return *_of_given(tensors, gradients), None, None


def _of_given(tensors: Any, values: Any) -> list[Any]:
    """Returns the next of ``values`` for each given tensor that is differentiated, else None."""
    return [
        next(values) if place in _DIFFERENTIATED and tensor is not None else None
        for place, tensor in enumerate(tensors)
    ]


def _direction(of_tensors: Any) -> list[Any]:
    """Returns tangents or cotangents of the inputs as the operators take them."""
    return [of_tensors[place] for place in _DIFFERENTIATED]


def _setup_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.options = inputs[_READ]
    _save(ctx, *inputs[:_READ], *inputs[_READ + 2 :])


def _double_backward_by(compute: Any, ctx: Any, cotangents: Any) -> Any:
    """Returns the gradients of the inputs of ``annulus::attend_backward``.

    Those of the results of ``attend`` among them are None: they depend on the other inputs, whose
    gradients include theirs.
    """
    saved = ctx.saved_tensors
    tensors, results, given = saved[:_READ], saved[_READ:-2], saved[-2:]
    direction = _direction(_of_given(tensors, iter(cotangents)))
    gradients = iter(compute(*tensors, ctx.options, False, *given, *direction))
    of_tensors = _of_given(tensors, gradients)
    none = (None for _ in ("options", "forward_only", *results))
    return *of_tensors, *none, next(gradients), next(gradients)


def _no_forward_mode(*_: Any) -> Any:
    raise unsupported("forward mode", "under torch.compile; differentiate outside of it")


def _no_second_derivative(*_: Any) -> Any:
    raise unsupported("double backward", "under torch.compile; differentiate outside of it")


def _no_third_derivative(*_: Any) -> Any:
    raise unsupported("a third derivative", "attention has first and second derivatives")


def _no_tangent_of_a_tangent(*_: Any) -> Any:
    raise unsupported("forward mode twice", "want jvp of grad, grad of jvp or grad of grad")


attend.register_autograd(
    lambda ctx, dout, dlse, *_: _backward_by(attend_backward, ctx, dout, dlse),
    setup_context=_setup_attend,
)
attend_backward.register_autograd(
    lambda ctx, cotangents: _double_backward_by(attend_double_backward, ctx, cotangents),
    setup_context=_setup_backward,
)
attend_double_backward.register_autograd(_no_third_derivative)


class _Attend(torch.autograd.Function):
    """``annulus::attend``, as a compiler traces it."""

    generate_vmap_rule = True
    setup_context = staticmethod(_setup_attend)

    @staticmethod
    def forward(*given: Any) -> Any:
        return attend(*given)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any, *_: Any) -> Any:
        is_traced = torch.compiler.is_compiling()
        function = _AttendBackward if is_traced else _EagerAttendBackward
        return _backward_by(function.apply, ctx, dout, dlse)


class _AttendBackward(torch.autograd.Function):
    """``annulus::attend_backward``, as a compiler traces it."""

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
    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        tangent = _AttendJvp.apply(*saved[:_READ], ctx.options, *_direction(tangents))
        # a plan with second derivatives returns nothing but out and lse to a program
        return *tangent, *(torch.zeros_like(result) for result in saved[_READ + 2 :])


class _EagerAttendBackward(_AttendBackward):
    setup_context = staticmethod(_setup_backward)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _double_backward_by(_AttendDoubleBackward.apply, ctx, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        saved = ctx.saved_tensors
        tensors, given = saved[:_READ], saved[-2:]
        direction, of_given = _direction(tangents), tangents[-2:]
        double = _AttendDoubleBackward.apply(*tensors, ctx.options, False, *given, *direction)
        of_tensors = double[:-2]
        if any(tangent is not None for tangent in of_given):
            filled = [
                torch.zeros_like(tensor) if tangent is None else tangent
                for tensor, tangent in zip(given, of_given, strict=True)
            ]
            inputs = (*tensors, ctx.options, False, *saved[_READ:-2], *filled)
            linear = _EagerAttendBackward.apply(*inputs)
            of_tensors = [a + b for a, b in zip(of_tensors, linear, strict=True)]
        return tuple(of_tensors)


class _AttendJvp(torch.autograd.Function):
    """``annulus::attend_jvp``."""

    generate_vmap_rule = True
    jvp = staticmethod(_no_tangent_of_a_tangent)

    @staticmethod
    def forward(*given: Any) -> Any:
        return attend_jvp(*given[: _READ + 1], False, *given[_READ + 1 :])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[_READ]
        _save(ctx, *inputs[:_READ], *inputs[_READ + 1 :])

    @staticmethod
    def backward(ctx: Any, of_out: Any, of_lse: Any) -> Any:
        saved = ctx.saved_tensors
        tensors, direction = saved[:_READ], saved[_READ:]
        inputs = (*tensors, ctx.options, False)
        double = iter(_AttendDoubleBackward.apply(*inputs, of_out, of_lse, *direction))
        of_tensors = _of_given(tensors, double)
        results = _EagerAttend.apply(*inputs)[:_RESULTS]
        linear = iter(_EagerAttendBackward.apply(*inputs, *results, of_out, of_lse))
        of_direction = _direction(_of_given(tensors, linear))
        return *of_tensors, None, *of_direction


class _AttendDoubleBackward(torch.autograd.Function):
    """``annulus::attend_double_backward``, which has no derivative."""

    generate_vmap_rule = True
    backward = staticmethod(_no_third_derivative)
    jvp = staticmethod(_no_third_derivative)

    @staticmethod
    def forward(*given: Any) -> Any:
        return tuple(attend_double_backward(*given))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


def apply(*given: Any) -> Any:
    """Computes ``annulus::attend`` with its derivatives."""
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
    if torch.compiler.is_compiling():
        if "Jvp" in kinds or forward_ad._current_level >= 0:
            _no_forward_mode()
        if kinds.count("Grad") > 1:
            _no_second_derivative()
    return bool(kinds)
