"""Attention with gradients for torch tensors on the CPU.

``annulus.flash_attention`` and ``annulus.ring_attention`` route tensors that require gradients
here. Under ``torch.compile`` the call is a graph break and gives the eager bits.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _calls
from ._calls import Call, Tensors
from ._errors import invalid
from ._plan import Forward

__all__ = ["flash_attention", "ring_attention"]


@torch.compiler.disable
def flash_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.flash_attention``, which defines the parameters, on torch tensors.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.flash_attention``.
    """
    _check(query=query, key=key, value=value)
    return _calls.flash_attention(query, key, value, *args, **options)


@torch.compiler.disable
def ring_attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    """Computes ``annulus.ring_attention``, which defines the parameters, on torch tensors.

    With ``comm`` every rank runs its backward pass too, in the same order.

    Args:
        query: ``[batch, q_len, q_heads, head_dim]``; with comm, q_len counts this rank's rows.
        key: ``[batch, kv_len, kv_heads, head_dim]``.
        value: ``[batch, kv_len, kv_heads, value_dim]``.

    Returns:
        out, ``[batch, q_len, q_heads, value_dim]``, or a tuple, as ``annulus.ring_attention``.
    """
    _check(query=query, key=key, value=value)
    return _calls.ring_attention(query, key, value, *args, **options)


def attend(call: Call, tensors: Tensors, batch: dict[str, Any]) -> tuple[Any, ...]:
    """Computes a call on tensors that require gradients: out and lse."""
    results: tuple[Any, ...] = _Attend.apply(call, batch, *tensors)
    return results


def _check(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise invalid(name, f"a {type(value).__name__}", "a torch tensor")


class _Attend(torch.autograd.Function):
    """A forward pass whose plan waits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: Call, batch: dict[str, Any], *tensors: Any) -> Any:
        query, key, value, bias, softmax_aux = tensors
        given = (query, key, value, bias, softmax_aux)
        plan = _calls.plan_of(call, given, batch, forward_only=False)
        result = _calls.pass_forward(plan, given)
        statistics = (result.max, result.sum, result.ties)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, result.out, result.lse, *statistics)
        return result.out, result.lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        query, key, value, bias, softmax_aux, *statistics = ctx.saved_tensors
        result = Forward(*statistics)
        gradients = ctx.plan.backward(
            query, key, value, result, dout, dlse, bias=bias, softmax_aux=softmax_aux
        )
        all = (gradients.dq, gradients.dk, gradients.dv, gradients.dbias, gradients.dsoftmax_aux)
        return (None, None, *all)
